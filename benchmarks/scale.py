"""What do many jobs and many segments cost the host?

    python benchmarks/scale.py [--json FILE] [--smoke]

There are two measurements:
  decision  The time that the interleaver takes to handle one event, in a simulation of two ranks.
            We increase the number of jobs, with 30 segments each and with 3, which is what an uncut
            step has. We also increase the number of segments, with two jobs.
  run       k jobs go through the whole runner on a single rank, so no other rank waits for them.
            Each step consists of small matrix products and their means. We report the wall time per
            segment and the peak memory of the process. Each size is measured in a separate process.
`slope` is the exponent p if the total time grows as n^p, fitted to the upper half of the sizes. A
value of 1 means that it grows linearly.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
from rivals.serving import status_bytes
from workloads import parser, spread, write_json

from jaxcross.interleave.messages import Event
from jaxcross.interleave.policy import RoundRobin
from jaxcross.interleave.simulator import Call, Simulation
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.program import stages

JOBS = (1, 2, 4, 8, 16, 32, 64)
SEGMENTS = (3, 10, 30, 100, 300, 1000)
RUN_SEGMENTS = (3, 11, 31, 101, 301, 1001)


def graph(segments: int) -> StepGraph:
    """Returns a step like a backward pass that is cut into many segments, followed by an update."""
    kinds = tuple("collective" if n % 2 else "compute" for n in range(segments - 1))
    needs = tuple((n - 1,) if n % 2 else ((n - 2,) if n else ()) for n in range(segments - 1))
    last = segments - 1
    return StepGraph(
        kinds=(*kinds, "compute"),
        needs=(*needs, tuple(range(last))),
        after_commit=frozenset({last}),
        signature=1,
    )


def decisions(jobs: int, segments: int, steps: int, repeats: int) -> dict[str, Any]:
    """Returns the microseconds per event that one rank's interleaver handles."""
    raw = [decided(jobs, segments, steps) for _ in range(repeats)]
    found = {
        f"{name}_us": spread([float(of(took)) for took in raw])
        for name, of in (
            ("median", np.median),
            ("mean", np.mean),
            ("p99", lambda took: np.percentile(took, 99)),
        )
    }
    return {"jobs": jobs, "segments": segments, "events": len(raw[0]), **found}


def decided(jobs: int, segments: int, steps: int) -> list[float]:
    """Simulates two ranks once, and returns how long rank 0's interleaver took for each event."""
    plan = graph(segments)

    def loop() -> Any:
        for _ in range(steps):
            yield Call(plan, (1e-3,) * segments)

    simulation = Simulation(
        [[loop() for _ in range(jobs)] for _ in range(2)],
        policy=RoundRobin(),
        check=False,
        exchange_s=lambda *slot: 1e-3,
    )
    handle, took = simulation._ranks[0].interleaver.handle, []

    def timed(event: Event) -> Any:
        begin = time.perf_counter_ns()
        result = handle(event)
        took.append((time.perf_counter_ns() - begin) / 1e3)
        return result

    simulation._ranks[0].interleaver.handle = timed  # type: ignore[method-assign]
    simulation.run(10**9)
    return took


def run_here(jobs: int, segments: int, steps: int, repeats: int) -> dict[str, Any]:
    """Runs k jobs through the whole runner, in this process."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    import jaxcross

    world = jaxcross.initialize()

    def tiny(state: Any, batch: Any) -> Any:
        for _ in range((segments - 1) // 2):
            # A product gets its own segment. A sum would be fused into a neighbouring one.
            state = lax.pmean(state @ batch, "batch")
        return state + 1, {}

    step = jaxcross.crossover(tiny, axes="batch")
    first, batch = jnp.ones((8, 8)), jnp.eye(8)
    made = len(stages.cut(step.trace(first, batch)).segments)
    if made != segments:
        raise AssertionError(f"the step was to have {segments} segments and has {made}")

    def run(steps: int) -> float:
        each = [
            jaxcross.Job(f"job{n}", step, first, itertools.repeat(batch, steps))
            for n in range(jobs)
        ]
        begin = time.perf_counter()
        jaxcross.run(each, world=world)
        return time.perf_counter() - begin

    begin = time.perf_counter()
    jax.block_until_ready(step(first, batch))
    first_s = time.perf_counter() - begin
    run(2)
    # We subtract a short run from a long one, which removes the costs that occur once per run.
    raw = [(run(2 * steps) - run(steps)) / (steps * jobs * segments) * 1e6 for _ in range(repeats)]
    # We can't use `ru_maxrss`, because a process inherits it from the process that started it.
    return {
        "jobs": jobs,
        "segments": segments,
        "us_per_segment": spread(raw),
        "first_step_s": first_s,
        "peak_rss_bytes": status_bytes("VmHWM"),
    }


@functools.cache  # some sizes are in both tables
def run(jobs: int, segments: int, steps: int, repeats: int) -> dict[str, Any]:
    """Does the same in a separate process, whose peak memory is that of this size only."""
    line = [sys.executable, __file__, "--here", f"{jobs},{segments},{steps},{repeats}"]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def slope(sizes: list[int], values: list[float]) -> float:
    """Fits the exponent p of a growth as n^p to the upper half of the sizes."""
    upper = slice(len(sizes) // 2 - 1, None)
    return float(np.polyfit(np.log(sizes[upper]), np.log(values[upper]), 1)[0])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--here", help="(internal) one run")
    args = options.parse_args()
    if args.here:
        print(json.dumps(run_here(*map(int, args.here.split(",")))))
        return
    jobs, segments, compiled = (
        (JOBS, SEGMENTS, RUN_SEGMENTS) if not args.smoke else ((1, 2), (3, 11), (3, 5))
    )
    events, repeats = (20_000, 5) if not args.smoke else (500, 1)
    sizes = {
        "jobs": [(k, 30) for k in jobs],
        "jobs_of_3": [(k, 3) for k in jobs],
        "segments": [(2, n) for n in segments],
    }
    result: dict[str, Any] = {}
    for name, pairs in sizes.items():
        rows = [decisions(k, n, max(2, events // (k * n)), repeats) for k, n in pairs]
        grown = [row[name.removesuffix("_of_3")] for row in rows]
        result[f"decision_by_{name}"] = {
            "rows": rows,
            "slope_of_total": 1 + slope(grown, [row["mean_us"]["median"] for row in rows]),
        }
    sizes = {"jobs": [(k, 3) for k in jobs], "segments": [(2, n) for n in compiled]}
    for name, pairs in sizes.items():
        rows = [run(k, n, max(3, events // 20 // (k * n)), repeats) for k, n in pairs]
        times = [row["us_per_segment"]["median"] for row in rows]
        result[f"run_by_{name}"] = {
            "rows": rows,
            "slope_of_total": 1 + slope([row[name] for row in rows], times),
        }
    for name, part in result.items():
        print(f"{name}: total time grows as n^{part['slope_of_total']:.2f}")
        for row in part["rows"]:
            shown = {k: v["median"] if isinstance(v, dict) else v for k, v in row.items()}
            print(
                "  ",
                {k: round(v, 2) if isinstance(v, float) else v for k, v in shown.items()},
                flush=True,
            )
    write_json(args.json, __doc__, result)


if __name__ == "__main__":
    main()
