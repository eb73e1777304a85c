"""Do eight tiny networks train faster fused into one program than in crossover?

    python benchmarks/fuse.py [--rate 1000mbit] [--json FILE] [--smoke]

All jobs have the same step, and they run on two hosts with one core each and a real link. In one
run, we alternate between three ways to train them: one after the other, in crossover, and fused as
with `jaxcross.fuse(when="always")`. The final states must be the same in all three, bit for bit.

Seconds are the time in which each job makes one step, on the slowest rank, not counting the first
ten steps. Ratios are ratios of medians. `first_s` is the time of the whole first run, including
compilation. `chosen` is what `jaxcross.fuse` would decide by itself.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import workloads
from hosts import on_hosts, parser_of_hosts
from workloads import Workload, spread, write_json

WAYS = ("one by one", "crossover", "fused")
WARM_UP_STEPS = 10


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.set_defaults(rate="1000mbit")
    options.add_argument(
        "--steps", type=int, default=60, help="steps per job and repeat (default %(default)s)"
    )
    options.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    options.add_argument(
        "--cases", default="", metavar="A,B", help="only these, of those it prints (default: all)"
    )
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result = on_hosts(__file__, args.rate)
    for row in result["rows"]:
        times = ", ".join(f"{way} {1e3 * row[way]['median']:.2f} ms" for way in WAYS)
        print(
            f"{row['case']:12} {row['jobs']} jobs: {times}; fused {row['over_crossover']:.2f} "
            "times as fast"
        )
        print(f"{'':12} {row['chosen']}")
    write_json(args.json, __doc__, result)
    return 0


def cases(smoke: bool) -> dict[str, tuple[int, Callable[[], Workload]]]:
    """Maps the name of each case to its number of jobs and its network."""
    if smoke:
        return {"dense": (2, lambda: workloads.mlp(width=8, batch_size=4))}
    return {
        "dense": (8, lambda: workloads.mlp(width=64, batch_size=32)),
        "dense of 2": (2, lambda: workloads.mlp(width=64, batch_size=32)),
        "convolution": (8, lambda: workloads.convolution(channels=8, batch_size=16)),
        "transformer": (
            8,
            lambda: workloads.transformer(
                layers=1, width=64, length=16, batch_size=2, vocabulary=64
            ),
        ),
        "larger": (4, lambda: workloads.mlp(width=512, batch_size=128)),
    }


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize()

    import jax
    import numpy as np

    from jaxcross.gains.fusion import fused_step
    from jaxcross.jobs.fused import FusedJob

    def agreed(value: float) -> float:
        """Returns the value of the slowest rank."""
        return max(map(float, world.control.allgather_text(str(value))))

    def once(
        way: str, step: Any, states: list[Any], batches: list[Any], steps: int
    ) -> tuple[float, float, list[Any]]:
        """Returns the seconds per step of all jobs, those of the whole run, and the final
        states.
        """
        stamps: list[list[float]] = []

        def timed(function: Any) -> Any:
            mine: list[float] = []
            stamps.append(mine)

            def call(state: Any, batch: Any) -> Any:
                mine.append(time.perf_counter())
                return function(state, batch)

            return call

        def job(n: int, function: Any) -> Any:
            return jaxcross.Job(
                f"job-{n}", function, states[n], itertools.repeat(batches[n]), steps=steps
            )

        begin = time.perf_counter()
        jobs = [job(n, step if way == "fused" else timed(step)) for n in range(len(states))]
        if way == "fused":
            jaxcross.run([FusedJob(jobs, timed(fused_step(step)))], progress=False)
        else:
            policy = jaxcross.Sequential() if way == "one by one" else jaxcross.RoundRobin()
            jaxcross.run(jobs, policy=policy, progress=False)
        whole = time.perf_counter() - begin
        warm = min(WARM_UP_STEPS, steps // 2)
        if way == "one by one":
            seconds = sum((each[-1] - each[warm]) / (steps - 1 - warm) for each in stamps)
        else:
            seconds = (max(each[-1] for each in stamps) - max(each[warm] for each in stamps)) / (
                steps - 1 - warm
            )
        return agreed(seconds), agreed(whole), [each.state for each in jobs]

    def measure(case: str, number: int, work: Workload) -> dict[str, Any]:
        step = jaxcross.crossover(
            work.make(lambda tree: jax.lax.pmean(tree, "batch")), axes="batch", donate_argnums=0
        )
        states = [jax.tree.map(np.asarray, work.state(n)) for n in range(number)]
        batches = [
            jax.tree.map(np.asarray, work.batch(100 * n + world.rank)) for n in range(number)
        ]
        steps, repeats = (6, 1) if args.smoke else (args.steps, args.repeats)
        raw: dict[str, list[float]] = {way: [] for way in WAYS}
        first: dict[str, float] = {}
        for repeat in range(-1, repeats):
            ends = {}
            for way in WAYS:
                seconds, whole, ends[way] = once(way, step, states, batches, steps)
                first.setdefault(way, whole)
                if repeat >= 0:
                    raw[way].append(seconds)
            for way in WAYS[1:]:
                for one, other in zip(
                    jax.tree.leaves(ends[WAYS[0]]), jax.tree.leaves(ends[way]), strict=True
                ):
                    assert np.array_equal(one, other), f"{case}, {way}: not the bits of a job alone"
        chosen = jaxcross.fuse(
            [
                jaxcross.Job(f"job-{n}", step, states[n], itertools.repeat(batches[n]))
                for n in range(number)
            ]
        )
        medians = {way: statistics.median(values) for way, values in raw.items()}
        return {
            "case": case,
            "jobs": number,
            **{way: spread(values) for way, values in raw.items()},
            "first_s": first,
            "over_crossover": medians["crossover"] / medians["fused"],
            "over_one_by_one": medians["one by one"] / medians["fused"],
            "chosen": str(chosen),
        }

    every = cases(args.smoke)
    wanted = args.cases.split(",") if args.cases else list(every)
    if unknown := set(wanted) - set(every):
        raise SystemExit(
            f"no such cases: {', '.join(sorted(unknown))}; there are {', '.join(every)}"
        )
    rows = []
    for number, case in enumerate(wanted, 1):
        if world.rank == 0:
            print(f"{number} of {len(wanted)}: {case}", flush=True)
        rows.append(measure(case, every[case][0], every[case][1]()))
    if world.rank == 0:
        Path(args.worker).write_text(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
