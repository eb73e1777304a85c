"""Size of XLA's CPU thread pool: a blocked exchange holds a thread of it and must never starve
compute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxcross.errors import ExchangeError

# XLA reads both, in this order, when its CPU client starts.
_VARIABLES = ("NPROC", "PJRT_NPROC")

MINIMUM = 2
"""Threads below which a blocked exchange could starve compute."""


def cores() -> int:
    """Cores that this process may use: its affinity, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needed(core_count: int) -> int:
    """Threads for `core_count` cores of compute while an exchange waits: one a core, and at least
    `MINIMUM`.

    No more than that: on 2 cores a convolution took 26 ms with 2 threads, 40 with 3 and 50 with 4.
    A waiting exchange runs in its lane's own thread, and holds a thread of the pool only where its
    program has other work as well.
    """
    return max(core_count, MINIMUM)


def plan_pool(
    wanted: int, *, started: bool, core_count: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables to set before XLA's CPU client starts; empty if the pool is already large
    enough.

    Args:
        wanted: Threads to set where the user set none.
        started: Whether JAX has started a backend, so that nothing can be changed.
        core_count: Threads of the pool where no variable sets it.
        environ: The environment, where the user may have set a size.

    Raises:
        ExchangeError: The pool is too small and cannot be changed any more.
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
    """Threads that the pool has, or will have when JAX starts."""
    return next((int(environ[v]) for v in _VARIABLES if environ.get(v, "").isdecimal()), core_count)
