"""What does it cost to compare across ranks which step each call of a plain loop runs?

    python benchmarks/call_check.py [--ranks 2] [--json FILE] [--smoke]

In a plain loop, the ranks can compare which step they're calling, just before each call exchanges
(`JAXCROSS_CHECK_CALLS=1`). The step that we measure multiplies matrices for about 1 ms or 100 ms,
and then averages 1000 numbers over the ranks. In each round, we time a block of calls with the
comparison and an equal block without it, in the same process. Which of the two comes first
alternates from round to round. We report:
  with_ms, without_ms  the time of a call with and without the comparison
  ratio                for each round, the time of the block with the comparison over the block
                       without it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ranks import start_workers
from workloads import parser, spread, write_json

STEPS_MS = {1: 200, 100: 4}
"""Milliseconds of a step -> calls per block."""
NEVER = 2**62


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=40, help="default %(default)s")
    options.add_argument("--worker", action="store_true", help="one of the ranks")
    args = options.parse_args()
    return worker(args) if args.worker else start_workers(args.ranks)


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize()
    rounds, steps = (2, {1: 3}) if args.smoke else (args.rounds, STEPS_MS)
    result = {
        f"{ms} ms": measured(world, ms, calls=calls, rounds=rounds) for ms, calls in steps.items()
    }
    if world.rank == 0:
        for name, row in result.items():
            ratio = row["ratio"]
            print(
                f"step of {name:6}  with {row['with_ms']['median']:8.3f} ms   without"
                f" {row['without_ms']['median']:8.3f} ms   ratio {ratio['median']:.4f}"
                f" ({ratio['p25']:.4f} to {ratio['p75']:.4f})"
            )
        write_json(args.json, __doc__, {"ranks": world.size, "rounds": rounds, "steps": result})
    return 0


def measured(world: Any, milliseconds: float, *, calls: int, rounds: int) -> dict[str, Any]:
    """Times blocks of calls with and without the comparison, alternating between the two."""
    call = made_call(world, milliseconds)
    owner = world.exchange_owner
    times: dict[str, list[float]] = {"with_ms": [], "without_ms": []}
    for turn in range(rounds):
        for way in sorted(times, reverse=bool(turn % 2)):
            owner.check_every, owner.unchecked = 1 if way == "with_ms" else NEVER, 0
            call()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[way].append((time.perf_counter() - start) / calls * 1e3)
    owner.check_every = 1
    ratios = [a / b for a, b in zip(times["with_ms"], times["without_ms"], strict=True)]
    return {name: spread(raw) for name, raw in times.items()} | {
        "ratio": spread(ratios),
        "calls": calls,
    }


def made_call(world: Any, milliseconds: float) -> Callable[[], Any]:
    """Returns a function that calls a step of about `milliseconds` and waits for its result.

    The step has already been compiled on every rank.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxcross

    def work(x: Any, times: int) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, y: jnp.tanh(x @ y), x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32) / 12)
    timed = jax.jit(work, static_argnums=1)
    jax.block_until_ready(timed(x, 100))
    start = time.perf_counter()
    jax.block_until_ready(timed(x, 100))
    product_s = (time.perf_counter() - start) / 100
    own = max(1, round(milliseconds / 1e3 / product_s))
    times = int(world.control.allreduce_min(np.array([own], np.int64))[0])

    @jaxcross.crossover(axes="x")
    def step(x: Any) -> Any:
        return jax.lax.pmean(work(x, times).ravel()[:1000], "x")

    def call() -> Any:
        return jax.block_until_ready(step(x))

    call()
    return call


if __name__ == "__main__":
    sys.exit(main())
