"""What does an exchange cost over each wire, and what does a plain jitted call of mpi4jax cost?

    python benchmarks/wire_call.py [--ranks 2] [--json FILE] [--smoke]

We time all-reduces of float32 between two ranks of one machine: of 4 bytes, of 1 MB, of 100 MB, and
20 small ones that depend on each other. `mpi4jax` and `mpi4py` are jaxcross's two wires. With
`mpi4jax`, the exchanges are part of one executable. With `mpi4py`, the host makes them between
executables. `jit` is mpi4jax without jaxcross.

All three alternate in one run, and each round starts with a different one. Both ranks enter each
call together. Times are those of the slower rank, from the call until the result is available, in
microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from paired import ratios, with_interval
from ranks import start_workers
from workloads import parser, write_json

# What is exchanged -> float32 elements, exchanges per call, and calls in a block.
WORK = {
    "4 B": (1, 1, 100),
    "20 of 32 B": (8, 20, 50),
    "1 MB": (250_000, 1, 20),
    "100 MB": (25_000_000, 1, 1),
}
RIVALS = ("mpi4jax", "mpi4py", "jit")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    return worker(args) if args.worker else start_workers(args.ranks)


def worker(args: argparse.Namespace) -> int:
    from jaxcross.world import initialize

    world = initialize(wire="mpi4jax")
    rounds = 3 if args.smoke else 30
    found: dict[str, dict[str, list[float]]] = {}
    for name, (elements, exchanges, calls) in WORK.items():
        rivals = make(world, elements, exchanges)
        times = found[name] = {rival: [] for rival in RIVALS}
        for n in range(rounds):
            for rival in RIVALS[n % 3 :] + RIVALS[: n % 3]:
                times[rival].append(
                    microseconds(world, rivals[rival], min(calls, 5) if args.smoke else calls)
                )
    if world.rank == 0:
        for name, times in found.items():
            for rival, values in times.items():
                quartiles = statistics.quantiles(values, n=4)
                print(
                    f"{name:12} {rival:8} {quartiles[1]:10.1f} us   ({quartiles[0]:.1f} to "
                    f"{quartiles[2]:.1f})"
                )
            print(
                f"{name:12} mpi4py over mpi4jax "
                f"{with_interval(ratios(times['mpi4py'], times['mpi4jax']))}"
            )
        write_json(args.json, __doc__, {"raw_us": found, "ranks": world.size, "mpi": world.vendor})
    return 0


def make(world: Any, elements: int, exchanges: int) -> dict[str, Callable[[], Any]]:
    """Returns the rivals, compiled and warm, by name."""
    import jax
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    from jaxcross.wire import MpiWire

    comm = MPI.COMM_WORLD.Dup()
    host, axes = jax.devices("cpu")[0], {"ranks": world.size}

    def own(x: Any) -> Any:
        for _ in range(exchanges):
            x = mpi4jax.allreduce(x, MPI.SUM, comm=comm)
        return x

    def named(x: Any) -> Any:
        for _ in range(exchanges):
            x = jax.lax.psum(x, "ranks")
        return x

    x = jnp.ones(elements, jnp.float32)
    jaxpr = jax.make_jaxpr(named, axis_env=list(axes.items()))(x)
    functions: dict[str, Callable[[Any], Any]] = {"jit": jax.jit(own)}
    for over in ("mpi4jax", "mpi4py"):
        lowered = MpiWire(world, over=over).lower(jaxpr, axes)
        functions[over] = lowered.compile([x], name=over, host=host, place=None)
    for function in functions.values():
        jax.block_until_ready(function(x))
    return {name: lambda function=function: function(x) for name, function in functions.items()}


def microseconds(world: Any, call: Callable[[], Any], calls: int) -> float:
    """Returns the time of one call on the slower rank, the mean of a block."""
    import jax

    world.control.allgather_text("")
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call())
    own = (time.perf_counter() - start) / calls * 1e6
    return max(float(text) for text in world.control.allgather_text(repr(own)))


if __name__ == "__main__":
    sys.exit(main())
