"""Size of XLA's CPU thread pool.

A blocked exchange occupies a thread of the pool, and there must always be another one for
computation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxcross.errors import ExchangeError

# XLA reads both variables when its CPU client starts. The first one takes precedence.
_VARIABLES = ("NPROC", "PJRT_NPROC")

MINIMUM = 2
"""With fewer threads, a blocked exchange could starve computation."""


def cores() -> int:
    """Returns the number of cores that this process may use, by its affinity, as XLA does."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needed(core_count: int) -> int:
    """Returns how many threads the pool needs: one per core, and at least `MINIMUM`.

    Additional threads would slow down computation: on 2 cores, a convolution took 26 ms with 2
    threads, 40 ms with 3 and 50 ms with 4. A waiting exchange runs in its lane's own thread, and
    only occupies a thread of the pool if its program has other work as well.
    """
    return max(core_count, MINIMUM)


def plan_pool(
    wanted: int, *, started: bool, core_count: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables to set before XLA's CPU client starts; none if the pool is fine.

    Args:
        wanted: Number of threads to set if the user hasn't set any.
        started: Whether JAX has already started a backend, so that nothing can be changed.
        core_count: Number of threads of the pool if no variable sets it.
        environ: The environment, in which the user may have set the number of threads.

    Raises:
        ExchangeError: The pool is too small, and it's too late to change it.
    """
    variable = next((v for v in _VARIABLES if environ.get(v, "").isdecimal()), None)
    size = effective(environ, core_count)
    if not started:
        if variable is None:
            return {"PJRT_NPROC": str(wanted)}
        return {} if size >= MINIMUM else {variable: str(MINIMUM)}
    if size >= MINIMUM:
        return {}
    raise ExchangeError(
        f"JAX started before `jaxcross.initialize()`, with a CPU pool of {size} threads where "
        f"{MINIMUM} are needed. A waiting exchange holds a thread, and the ranks would stop for "
        "ever. Call `jaxcross.initialize()` before the first JAX array or `jax.devices()`, or set "
        f"`{variable or 'PJRT_NPROC'}={wanted}`."
    )


def effective(environ: Mapping[str, str], core_count: int) -> int:
    """Returns the number of threads that the pool has, or will have once JAX starts."""
    return next((int(environ[v]) for v in _VARIABLES if environ.get(v, "").isdecimal()), core_count)
