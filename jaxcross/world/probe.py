"""Probes which parts of MPI, mpi4jax and JAX work, and prints the results as JSON.

Usage: `python -m jaxcross.world.probe [exchange | versions]`.

`jaxcross doctor` runs this file in a separate process, because loading a broken MPI library can
kill the process. To check other hosts (`--hosts`), it sends the file to their Python interpreters.
jaxcross may not be installed there, so only the functions that need it import it.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

PACKAGES = ("jaxcross", "jax", "jaxlib", "mpi4py", "mpi4jax")


def probe_mpi() -> dict[str, Any]:
    """Returns MPI's library, version and thread level. Starts MPI."""
    from mpi4py import MPI

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
    }
    return {
        "library": _first_line(MPI.Get_library_version()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": levels.get(MPI.Query_thread(), "multiple"),
    }


def _first_line(version: str) -> str:
    return version.split("\n")[0].strip("\x00 ")


def probe_mpi4jax() -> dict[str, Any]:
    """Returns which MPI mpi4jax was built for and what it supports. Starts MPI.

    Reports the version of mpi4jax, the MPI library that mpi4jax was built for, whether it can send
    directly from GPUs, and any warnings raised on import.
    """
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        import mpi4jax
    from jaxcross import _jax_compat as compat

    compat.register_host_calls()
    bridge = sys.modules["mpi4jax._src.xla_bridge"]
    built = getattr(getattr(bridge, "mpi_xla_bridge_cpu", None), "MPI_ABI_INFO", {})
    return {
        "version": mpi4jax.__version__,
        "built_for": _first_line(str(built.get("mpi_library_version", "unknown"))),
        "cuda": bool(mpi4jax.has_cuda_support()),
        "warnings": [
            str(w.message).strip().split("\n")[0]
            for w in raised
            if issubclass(w.category, UserWarning)
        ],
    }


def probe_jax() -> dict[str, Any]:
    """Returns JAX's versions and devices. Starts JAX's backends."""
    import jax

    return {
        "version": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
    }


def probe_versions() -> dict[str, str | None]:
    """Returns the versions of everything that must match across hosts. Starts nothing.

    Packages that aren't installed map to None.
    """
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        versions["MPI"] = _first_line(MPI.Get_library_version())
    except Exception as error:  # whatever it is, the doctor reports it
        versions |= {"MPI": None, "error": f"{type(error).__name__}: {_first_line(str(error))}"}
    return versions


def probe_exchange() -> dict[str, Any]:
    """Performs an all-reduce over all ranks, in the same way as a step does. Waits for all ranks.

    Returns whether the result is correct, and the pairs of addresses over which ranks are
    connected.
    """
    import jax

    # The exchange only needs the CPU device. Starting the accelerators as well would allocate their
    # memory, in the first rank of each node.
    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp

    from jaxcross.world import initialize

    world = initialize(stall_timeout_s=20.0)
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "ranks"), axis_env=[("ranks", world.size)])(
        jnp.zeros(4)
    )
    with world.monitor(job="doctor", step=0, segment=0, what="psum"):
        lowered = world.wire().lower(jaxpr, {"ranks": world.size})
        exchange = lowered.compile(
            jaxpr.in_avals, name="doctor", host=jax.devices("cpu")[0], place=None
        )
        (total,) = jax.block_until_ready(exchange(jnp.full(4, world.rank + 1.0)))
        # Importing this starts MPI, which may hang. By now, though, `initialize` has already
        # started it under a time limit.
        from mpi4py import (
            MPI,
        )

        ends = MPI.COMM_WORLD.gather(tcp_ends())
    expected = world.size * (world.size + 1) / 2
    return {
        "ranks": world.size,
        "pool": world.pool_size,
        "over": world.over,
        "correct": bool((total == expected).all()),
        "connections": connections(ends or []),
    }


def tcp_ends() -> list[tuple[str, str]]:
    """Returns both ends of each of this process's TCP connections, as `address:port`.

    This process's end comes first. Only works on Linux.
    """
    own = set()
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed in the meantime
            own.add(os.readlink(link))
    tables: list[str] = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            tables += Path("/proc/self/net", name).read_text().splitlines()[1:]
    return ends_of(tables, own)


def ends_of(table: Iterable[str], own: set[str]) -> list[tuple[str, str]]:
    """Returns both ends of every established connection whose socket is in `own`. Pure.

    `table` holds the lines of `/proc/net/tcp`.
    """
    rows = (line.split() for line in table)
    return [
        (_end(row[1]), _end(row[2]))
        for row in rows
        if row[3] == "01" and f"socket:[{row[9]}]" in own
    ]


def _end(text: str) -> str:
    """Formats an end as text, e.g. `0200000A:B461` as `10.0.0.2:46177`.

    The kernel prints addresses as 32-bit words, each in this machine's byte order.
    """
    digits, port = text.split(":")
    words = [bytes.fromhex(digits[n : n + 8]) for n in range(0, len(digits), 8)]
    address = ipaddress.ip_address(
        b"".join(w[::-1] if sys.byteorder == "little" else w for w in words)
    )
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return f"{mapped or address}:{int(port, 16)}"


def connections(ends: Sequence[Iterable[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Returns the pairs of addresses over which ranks are connected. Pure.

    `ends` holds the result of `tcp_ends` for every rank.
    """
    found = {
        (own.rpartition(":")[0], other.rpartition(":")[0])
        for first, second in combinations(ends, 2)
        for own, other in first
        if (other, own) in set(second)
    }
    return sorted(found)


def main() -> int:
    """Runs the probes selected on the command line, and prints the results.

    Without arguments, it probes MPI, mpi4jax and JAX. If one of these fails, that's reported and
    the others still run.
    """
    if sys.argv[1:] == ["exchange"]:
        found: dict[str, Any] = {"exchange": probe_exchange()}
        rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        if rank != "0":
            return 0
    elif sys.argv[1:] == ["versions"]:
        found = {"versions": probe_versions()}
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
