"""Findings of a rank as one line of JSON: `python -m jaxcross.world.probe [exchange]`.

It runs in a process of its own, because a broken MPI may end the process that touches it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import warnings
from typing import Any


def probe_mpi() -> dict[str, Any]:
    """MPI's library, version and thread level. Starts MPI."""
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    return {
        "library": MPI.Get_library_version().split("\n")[0].strip("\x00 "),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": levels.get(MPI.Query_thread(), "multiple"),
    }


def probe_mpi4jax() -> dict[str, Any]:
    """mpi4jax's version and warnings, the MPI it was built for, and whether it can send from GPUs. Starts MPI."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        import mpi4jax

    bridge = sys.modules["mpi4jax._src.xla_bridge"]
    built = getattr(getattr(bridge, "mpi_xla_bridge_cpu", None), "MPI_ABI_INFO", {})
    return {
        "version": mpi4jax.__version__,
        "built_for": str(built.get("mpi_library_version", "unknown")).split("\n")[0].strip("\x00 "),
        "cuda": bool(mpi4jax.has_cuda_support()),
        "warnings": [str(w.message).strip().split("\n")[0] for w in raised if issubclass(w.category, UserWarning)],
    }


def probe_jax() -> dict[str, Any]:
    """JAX's versions and devices. Starts JAX's backends."""
    import jax

    return {
        "version": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
    }


def probe_exchange() -> dict[str, Any]:
    """One all-reduce over all ranks, through the whole wire. Waits for every rank."""
    import jax

    # Exchanges run on the host's CPU device. An accelerator would lend its memory to the first rank that asks for it.
    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp

    from jaxcross.world import initialize

    world = initialize(stall_timeout_s=20.0)
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "ranks"), axis_env=[("ranks", world.size)])(jnp.zeros(4))
    with world.monitor(job="doctor", step=0, segment=0, what="psum"):
        lowered = world.wire().lower(jaxpr, {"ranks": world.size})
        exchange = lowered.compile(jaxpr.in_avals, name="doctor", host=jax.devices("cpu")[0], place=None)
        (total,) = jax.block_until_ready(exchange(jnp.full(4, world.rank + 1.0)))
    expected = world.size * (world.size + 1) / 2
    return {"ranks": world.size, "pool": world.pool_size, "correct": bool((total == expected).all())}


def main() -> int:
    """Run the probes that can be run; each failure is a value, not the end."""
    if sys.argv[1:] == ["exchange"]:
        found: dict[str, Any] = {"exchange": probe_exchange()}
        rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        if rank != "0":
            return 0
    else:
        found = {}
        for name, probe in {"mpi": probe_mpi, "mpi4jax": probe_mpi4jax, "jax": probe_jax}.items():
            try:
                found[name] = probe()
            except Exception as error:  # whatever it is, the doctor reports it
                found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
