"""What does calling a collective executable cost, beside the exchange itself?

    jaxcross launch -n 1 benchmarks/wire_call.py --json wire_call.json

The wire's own primitive against a jitted function of mpi4jax calls, with 1 and with 20 all-reduces of 8 float32, called
alternately in one run. On one rank the all-reduces are local copies, so that the time is the call's.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from workloads import parser, write_json

OPERATIONS = (1, 20)


def main() -> int:
    args = parser(__doc__).parse_args()
    rounds, calls = (3, 5) if args.smoke else (40, 100)

    from jaxcross.world import initialize

    world = initialize()
    found = {f"{rival} {n} ops": [] for n in OPERATIONS for rival in ("jaxcross", "mpi4jax")}
    for n in OPERATIONS:
        rivals = make(world, n)
        for _ in range(rounds):
            for name, (function, x) in rivals.items():
                found[f"{name} {n} ops"].append(microseconds(function, x, calls))
    if world.rank == 0:
        medians = {name: round(statistics.median(times), 1) for name, times in found.items()}
        for name, value in medians.items():
            spread = statistics.quantiles(found[name], n=10)
            print(f"{name:20} {value:8.1f} us   (10% to 90%: {spread[0]:.1f} to {spread[-1]:.1f})")
        write_json(args.json, __doc__, {"median_us": medians, "raw_us": found, "ranks": world.size})
    return 0


def make(world: Any, n: int) -> dict[str, Any]:
    """Both rivals, compiled and warm."""
    import jax
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()

    def own(x: Any) -> Any:
        for _ in range(n):
            x = mpi4jax.allreduce(x, MPI.SUM, comm=comm)
        return x

    x = jnp.ones(8)
    jaxpr = jax.make_jaxpr(own)(x)
    rivals = {"jaxcross": jax.jit(world.wire().lower(jaxpr, {"ranks": world.size})), "mpi4jax": jax.jit(own)}
    for function in rivals.values():
        jax.block_until_ready(function(x))
    return {name: (function, x) for name, function in rivals.items()}


def microseconds(function: Any, x: Any, calls: int) -> float:
    import jax

    start = time.perf_counter()
    for _ in range(calls):
        result = function(x)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls * 1e6


if __name__ == "__main__":
    sys.exit(main())
