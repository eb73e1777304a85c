"""What does the joint start do for two jobs if one of them compiles for much longer?

    python benchmarks/joint_start.py [--ranks 2] [--json FILE] [--smoke]

By default, jobs in crossover make their first steps together, once all of them have compiled. We
train two networks on the ranks of this machine. `quick` has few layers. `deep` has many layers,
which aren't in a loop, so XLA takes much longer to compile it. Both jobs make the same number of
steps. Runs with `start="together"` and runs with `start="as_ready"` alternate. We report:
  early             how many steps `quick` has made when `deep` starts its first one
  early_over_later  the median time of these steps over that of the later ones
  round_s           the period of a round of both jobs, from the report
  steady            the share of the run in such rounds
  first_s           the seconds until the first step of `quick` started
  wall_s            the seconds of the whole run
All numbers are medians over the repeats.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise, repeat
from typing import Any

from ranks import start_workers
from workloads import parser, write_json

STARTS = ("together", "as_ready")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    options.add_argument("--worker", action="store_true", help="one of the ranks")
    args = options.parse_args()
    return worker(args) if args.worker else start_workers(args.ranks)


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize()
    steps, layers, repeats = (6, 4, 1) if args.smoke else (300, 60, args.repeats)
    rows: dict[str, list[dict[str, float]]] = {start: [] for start in STARTS}
    for turn in range(repeats):
        for start in STARTS:
            new = turn + 1000 * STARTS.index(
                start
            )  # a constant that no earlier program has, so nothing is compiled yet
            rows[start].append(measured(world, start, steps=steps, layers=layers, new=new))
    if world.rank == 0:
        names = list(rows[STARTS[0]][0])
        result = {
            s: {n: statistics.median(row[n] for row in rows[s]) for n in names} | {"raw": rows[s]}
            for s in rows
        }
        for start in STARTS:
            print(f"{start:9} " + ", ".join(f"{name} {result[start][name]:.3g}" for name in names))
        write_json(args.json, __doc__, result)
    return 0


def measured(world: Any, start: str, *, steps: int, layers: int, new: int) -> dict[str, float]:
    """Runs both jobs once, with steps that haven't been compiled before."""
    import numpy as np

    import jaxcross
    from jaxcross.interleave.instrument import SpanLog

    log = SpanLog()
    x = np.ones((32, 128), np.float32)
    jobs = [
        jaxcross.Job(name, made_step(depth, new), state_of(depth), repeat(x), steps=steps)
        for name, depth in (("quick", 4), ("deep", layers))
    ]
    report = jaxcross.run(
        jobs, world=world, policy=jaxcross.RoundRobin(start=start), instruments=[log]
    )
    spans = {
        name: [s for s in log.spans if s.job == name and s.kind == "compute"]
        for name in ("quick", "deep")
    }
    ends = [max(s.end_ns for s in spans["quick"] if s.step == n) for n in range(1, steps + 1)]
    begin = {name: min(s.start_ns for s in each) for name, each in spans.items()}
    lengths = [b - a for a, b in pairwise(ends)]
    early = sum(end <= begin["deep"] for end in ends)
    later = statistics.median(lengths[early:]) if early < len(lengths) else float("nan")
    first_ns = min(s.start_ns for s in log.spans)
    return {
        "early": early,
        "early_over_later": statistics.median(lengths[: early - 1]) / later
        if early > 1
        else float("nan"),
        "round_s": report.rounds.period_s or float("nan"),
        "steady": report.rounds.steady_share or 0.0,
        "first_s": (begin["quick"] - first_ns) / 1e9,
        "wall_s": (max(s.end_ns for s in log.spans) - first_ns) / 1e9,
    }


def state_of(layers: int) -> Any:
    """Returns the weights of a network with `layers` layers."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.normal(size=(128, 128)).astype(np.float32) / 12 for _ in range(layers)]


def made_step(layers: int, new: int) -> Any:
    """Returns the train step of a network with `layers` layers, each different to the compiler."""
    import jax
    import jax.numpy as jnp

    import jaxcross

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = batch
            for n in range(layers):
                hidden = jnp.tanh(hidden @ weights[n]) * (1 + (n + 1) / (new + 1000))
            return jnp.mean(hidden**2)

        value, grads = jax.lax.pmean(jax.value_and_grad(loss)(weights), "batch")
        return [w - 0.01 * g for w, g in zip(weights, grads, strict=True)], {"loss": value}

    return jaxcross.crossover(step, axes="batch", donate_argnums=0)


if __name__ == "__main__":
    sys.exit(main())
