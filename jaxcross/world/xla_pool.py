"""Size of XLA's CPU thread pool.

An exchange that waits for other ranks occupies a thread of XLA's CPU pool. If the pool has no other
thread, all computation stalls until the exchange is over, so this module makes sure that there are
enough threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxcross.errors import ExchangeError

# XLA reads these variables when its CPU client starts. The first takes precedence.
_VARIABLES = ("NPROC", "PJRT_NPROC")

MINIMUM = 2
"""With fewer threads, a waiting exchange could block all computation."""


def cores() -> int:
    """Returns the number of cores available to this process. Goes by affinity, like XLA."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needed(core_count: int) -> int:
    """Returns how many threads the pool needs: one per core, and at least `MINIMUM`.

    More threads than cores would slow down computation: on 2 cores, a convolution took 26 ms with 2
    threads, 40 ms with 3, and 50 ms with 4.

    Exchanges don't call for extra threads, either. They wait in their lane's own thread, outside
    the pool, and only occupy a pool thread if their program contains other work as well.
    """
    return max(core_count, MINIMUM)


def plan_pool(
    wanted: int, *, started: bool, core_count: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables to set before XLA's CPU client starts, if any. Pure.

    Args:
        wanted: Number of threads to set if the user hasn't set one.
        started: Whether JAX has already started a backend, which makes it too late to change
            anything.
        core_count: Number of threads in the pool if no variable sets it.
        environ: The environment, in which the user may have set the number of threads.

    Raises:
        ExchangeError: The pool is too small, and it's too late to change that.
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
        f"{MINIMUM} are needed. A waiting exchange occupies a thread, so the ranks would "
        "deadlock. Call `jaxcross.initialize()` before the first JAX array or `jax.devices()`, or "
        f"set `{variable or 'PJRT_NPROC'}={wanted}`. "
        "See docs/reference/limits-steps.md#the-step."
    )


def effective(environ: Mapping[str, str], core_count: int) -> int:
    """Returns the number of threads the pool has, or will have once JAX starts."""
    return next((int(environ[v]) for v in _VARIABLES if environ.get(v, "").isdecimal()), core_count)
