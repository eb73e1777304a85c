"""Does a small job keep its share beside one with ten times its step?

    python benchmarks/unequal.py [--rate 500mbit] [--json FILE] [--smoke]

There are two jobs on two hosts with a real slow link: ResNet-50, and a small Transformer whose step
computes and exchanges for about a tenth as long. In one run, each job runs alone, and then both run
together in three ways: with whole steps, in pieces, and in pieces with equal shares. We report:
  relative     a job's steps per second over those that it makes alone and uncut
  progress     the sum of both jobs' `relative`; it would be 1 if the jobs ran one after the other,
               and 1.1 if they made their steps in lock step
  over_pieces  `relative` and `progress` compared with ResNet-50 alone in pieces, where its own
               computation and exchange overlap
A job's rate is computed from those of its steps that end while both jobs are running, without the
first tenth of that time. It's the number of these steps minus one, over the time from the end of
the first of them to the end of the last one.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import workloads
from hosts import on_hosts, parser_of_hosts
from plan_show import rates
from workloads import write_json

PIECES = 16
WAYS = {
    "whole steps": ("whole", "round-robin"),
    "pieces": (PIECES, "round-robin"),
    "pieces, equal shares": (PIECES, "weighted"),
}


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.add_argument(
        "--seconds", type=float, default=40, help="of each run, or so (default %(default)s)"
    )
    options.add_argument("--repeats", type=int, default=3, help="default %(default)s")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result = on_hosts(__file__, args.rate)
    print(
        "alone: "
        + ", ".join(f"{name} {1 / rate:.3f} s a step" for name, rate in result["alone"].items())
    )
    for way, row in result["ways"].items():
        each = ", ".join(f"{name} {value:.2f}" for name, value in row["relative"].items())
        print(f"{way:22} relative {each}; progress {row['progress']:.2f}")
    write_json(args.json, __doc__, result)
    return 0


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize()

    import jax
    import numpy as np
    from jax import lax

    if args.smoke:
        works = {
            "large": workloads.resnet("resnet8", batch_size=2, image_size=32, classes=8),
            "small": workloads.transformer(
                layers=1, width=64, length=16, batch_size=2, vocabulary=64
            ),
        }
    else:
        works = {
            "large": workloads.resnet("resnet50", batch_size=4, image_size=224),
            "small": workloads.transformer(layers=2, width=192, length=128, batch_size=4),
        }
    seconds, repeats = (1.0, 1) if args.smoke else (args.seconds, args.repeats)

    def cross(name: str, cut: Any) -> Any:
        return jaxcross.crossover(
            works[name].make(lambda tree: lax.pmean(tree, "batch")),
            axes="batch",
            cut=cut,
            donate_argnums=0,
        )

    steps = {
        (name, cut): cross(name, cut)
        for name, cut in (("large", "whole"), ("large", PIECES), ("small", "whole"))
    }
    initial = {name: jax.tree.map(np.asarray, work.state(0)) for name, work in works.items()}
    batches = {name: work.batch(world.rank) for name, work in works.items()}

    def run(
        counts: dict[str, int], cut: Any = "whole", policy: Any = None
    ) -> dict[str, list[float]]:
        """When each step of each job returned, in seconds since the start."""
        ends: dict[str, list[float]] = {name: [] for name in counts}
        begin = time.perf_counter()

        def loop(job: Any) -> None:
            state = jax.tree.map(jax.numpy.array, initial[job.name])
            step = steps[job.name, cut if job.name == "large" else "whole"]
            for batch in itertools.repeat(batches[job.name], counts[job.name]):
                state, _ = step(state, batch)
                ends[job.name].append(time.perf_counter() - begin)

        with jaxcross.Runner(world, policy) as runner:
            for name in counts:
                runner.add(name, loop)
            runner.run()
        return ends

    def agreed(value: float) -> float:
        return float(world.control.allgather_text(str(value))[0])

    policies = {"round-robin": jaxcross.RoundRobin(), "weighted": jaxcross.Weighted((1, 1))}
    for cut in ("whole", PIECES):
        run(dict.fromkeys(works, 2), cut)  # compiles
    counts = {
        name: max(3, round(seconds / 2 * agreed(rates(run({name: 4}))[name]))) for name in works
    }
    alone: dict[str, list[float]] = {name: [] for name in works}
    in_pieces: list[float] = []
    raw: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for name, count in counts.items():
            alone[name].append(rates(run({name: count}))[name])
        in_pieces.append(rates(run({"large": counts["large"]}, PIECES))["large"])
        solo = {name: agreed(statistics.median(values)) for name, values in alone.items()}
        for way, (cut, policy) in WAYS.items():
            # As many steps as both would make in that time if none hindered the other: none ends
            # long before the other.
            guess = rates(
                run(
                    {name: max(3, round(seconds / 4 * rate)) for name, rate in solo.items()},
                    cut,
                    policies[policy],
                )
            )
            plan = {name: max(3, round(seconds * agreed(rate))) for name, rate in guess.items()}
            raw[way].append(rates(run(plan, cut, policies[policy])))
            if world.rank == 0:
                print(
                    way,
                    {name: round(value / solo[name], 2) for name, value in raw[way][-1].items()},
                    flush=True,
                )
    if world.rank == 0:
        medians = {name: statistics.median(values) for name, values in alone.items()}
        ways = {}
        for way, samples in raw.items():
            relative = {n: statistics.median(s[n] for s in samples) / medians[n] for n in works}
            over = {
                **relative,
                "large": relative["large"] * medians["large"] / statistics.median(in_pieces),
            }
            ways[way] = {
                "relative": relative,
                "progress": sum(relative.values()),
                "raw_steps_per_s": samples,
                "over_pieces": {"relative": over, "progress": sum(over.values())},
            }
        facts = {
            "alone": medians,
            "raw_alone": alone,
            "raw_in_pieces": in_pieces,
            "pieces": PIECES,
            "ways": ways,
        }
        Path(args.worker).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
