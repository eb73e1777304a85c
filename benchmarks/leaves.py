"""How long does the first step take if the model has many small leaves?

    python benchmarks/leaves.py [--json FILE] [--smoke] [--ranks N] [--repeats N]

We compare jaxcross with `jax.jit` and mpi4jax. The step is gradient descent on n leaves of six
small shapes, whose gradients are averaged over the ranks. It does this with one `pmean` per leaf
under `crossover`, and with one `mpi4jax.allreduce` per leaf under `jax.jit`. Each measurement
starts new ranks, and repeats of the two alternate.

We report the seconds of the first call on rank 0, which includes tracing, cutting, agreement,
compilation and one step, and the milliseconds of later calls. `power` is the exponent p if the time
of the first call grows as n^p, computed from the two largest sizes. A value of 1 means that it
grows linearly.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from ranks import answer
from workloads import parser, spread, write_json

SIZES = (375, 750, 1500, 3000)
SHAPES = ((3,), (4, 5), (), (7,), (2, 3, 4), (16,))
STEPS = 20


def measured(how: str, leaves: int) -> dict[str, float]:
    """Returns one rank's times, measured in this process."""
    import jaxcross

    world = jaxcross.initialize()

    import jax
    import jax.numpy as jnp
    from jax import lax

    params = {
        f"{n:05d}": jnp.full(SHAPES[n % len(SHAPES)], 0.1, jnp.float32) for n in range(leaves)
    }

    def loss(params: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.square(p) * x) for p in params.values())

    def step(params: Any, x: Any) -> Any:
        grads = jax.tree.map(mean, jax.grad(loss)(params, x))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    if how == "jit":
        import mpi4jax
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()
        mean = lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=comm) / world.size  # noqa: E731
        function = jax.jit(step)
    else:
        mean = lambda x: lax.pmean(x, "batch")  # noqa: E731
        function = jaxcross.crossover(step, axes="batch")
    x, took = jnp.float32(1), []
    for _ in range(1 + STEPS):
        begin = time.perf_counter()
        jax.block_until_ready(function(params, x))
        took.append(time.perf_counter() - begin)
    return {"first_s": took[0], "later_ms": 1e3 * statistics.median(took[1:])}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    options.add_argument(
        "--repeats", type=int, default=3, help="of each size (default %(default)s)"
    )
    options.add_argument(
        "--worker", nargs=3, metavar=("HOW", "LEAVES", "FILE"), help="(internal) one rank"
    )
    args = options.parse_args()
    if args.worker:
        how, leaves, out = args.worker
        times = measured(how, int(leaves))
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) in ("0", None):
            Path(out).write_text(json.dumps(times))
        return
    sizes, repeats = ((4, 8), 1) if args.smoke else (SIZES, args.repeats)
    rows = []
    for leaves in sizes:
        arguments = {how: ["--worker", how, str(leaves)] for how in ("jit", "jaxcross")}
        raw = [
            {how: answer(__file__, each, args.ranks) for how, each in arguments.items()}
            for _ in range(repeats)
        ]
        row: dict[str, Any] = {"leaves": leaves}
        for how in ("jit", "jaxcross"):
            row[how] = {
                name: spread([one[how][name] for one in raw]) for name in ("first_s", "later_ms")
            }
        row["ratio"] = row["jaxcross"]["first_s"]["median"] / row["jit"]["first_s"]["median"]
        rows.append(row)
        shown = ", ".join(
            f"{how} {row[how]['first_s']['median']:.2f} s and {row[how]['later_ms']['median']:.1f} "
            "ms"
            for how in ("jit", "jaxcross")
        )
        print(f"{leaves} leaves: {shown}; first step {row['ratio']:.2f} times as long", flush=True)
    small, large = rows[-2:]
    power = {
        how: math.log(
            large[how]["first_s"]["median"] / small[how]["first_s"]["median"],
            large["leaves"] / small["leaves"],
        )
        for how in ("jit", "jaxcross")
    }
    print("power:", {how: round(p, 2) for how, p in power.items()})
    write_json(args.json, __doc__, {"ranks": args.ranks, "rows": rows, "power": power})


if __name__ == "__main__":
    sys.exit(main())
