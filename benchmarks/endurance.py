"""Do memory, threads, files or communicators grow while jobs come and go, or run for long?

    python benchmarks/endurance.py [--ranks 4] [--joins 1000] [--jobs 64] [--steps 100000]
        [--json FILE] [--png FILE] [--elements 8] [--wire mpi4jax|mpi4py] [--only joins|steps]
        [--smoke]

There are two parts:
  joins  One run in which a job adds a few other jobs, waits until they have left, and then adds the
         next ones. Each of these jobs makes two steps. Every fourth one has a different step, which
         must be compiled.
  steps  One run of many jobs that share `--steps` steps of a tiny program. The program averages
         `--elements` numbers. From 16,384 numbers on, mpi4py receives them into a buffer that is
         reused (an arena).
At 21 points of each run, we collect garbage and then count on every rank: resident memory, threads,
open files, the communicators that were created and are still there (`World`), spans, and Python
objects other than spans. The report keeps only the latest 200,000 spans.

`growth` is the slope of a line through the second half of the points, per join or per thousand
job-steps. It's taken from the rank where the slope is largest. The exit code is 1 if any growth
exceeds its bound. The exception is `--smoke`, which ends before the caches are full. With `--only`,
just one part is measured, and the other part is kept from the file that `--json` names, if that
file exists.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ended import ends_on_signals
from ranks import answer
from workloads import parser, write_json

from jaxcross.world.wire_choice import CHOICES

PLACES = 20
AT_ONCE = 8  # jobs that join together
UNLIKE = 4  # every fourth of them has a different step
# How fast each count may grow, per join and per thousand job-steps. A job that has left keeps its
# results in its runner. A span that isn't pushed out of the report's 200,000 yet takes about 150
# bytes, which is about 5 kB per join. The rest is for what compilation leaves in the C library's
# heap, which grows by 2 MB at a time.
BOUNDS = {
    "joins": {"rss_bytes": 2**14, "threads": 0, "files": 0, "communicators": 0, "objects": 64},
    "steps": {"rss_bytes": 2**16, "threads": 0, "files": 0, "communicators": 0, "objects": 100},
}
COUNTS = ("rss_bytes", "threads", "files", "communicators", "objects", "spans")


def counted(world: Any, runner: Any) -> dict[str, int]:
    """Returns the counts of this process."""
    gc.collect()
    # We count objects without holding references to them. `gc.get_objects` would reference tuples
    # that other threads are still filling, which then fail with a SystemError.
    gc.freeze()
    objects = gc.get_freeze_count()
    gc.unfreeze()
    spans = len(runner._recorder.spans())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "communicators": sum(each.comm is not None for each in world._group_comms.values()),
        "objects": objects - spans,
        "spans": spans,
    }


class Places:
    """Takes the counts at equal intervals."""

    def __init__(self, world: Any, runner: Any, total: int) -> None:
        self.world, self.runner, self.every, self.total = (
            world,
            runner,
            max(1, total // PLACES),
            total,
        )
        self.next, self.rows = 0, list[dict[str, int]]()

    def passed(self, done: int) -> None:
        """Takes the counts if they're due after `done` joins or steps on this rank."""
        if done >= self.next:
            self.next = done + self.every
            self.rows.append({"done": done, **counted(self.world, self.runner)})
            if self.world.rank == 0:
                print(
                    f"  {done} of {self.total}: {self.rows[-1]['rss_bytes'] / 1e6:.0f} MB",
                    flush=True,
                )


def tiny(number: int = 1, elements: int = 8) -> Any:
    """Returns a step that does almost nothing, with one exchange.

    Each `number` gives a different step.
    """
    import jax.numpy as jnp
    from jax import lax

    import jaxcross

    step = jaxcross.crossover(
        lambda state, batch: state + number * lax.pmean(state * batch, "batch"), axes="batch"
    )
    return step, jnp.ones(elements), jnp.full(elements, 1e-6)


def joins(world: Any, total: int) -> dict[str, Any]:
    """Jobs come and go alongside one job that stays."""
    import jaxcross

    like, state, batch = tiny()

    def visitor(job: Any, number: int) -> Any:
        mine, step = job.restore(state), like if number % UNLIKE else tiny(2 + number)[0]
        for _ in range(2):
            mine = step(mine, batch)
        return mine

    def host(job: Any) -> None:
        job.restore(state)
        for done in range(0, total, AT_ONCE):
            added = [
                runner.add(f"visitor-{n}", visitor, {"number": n})
                for n in range(done, min(done + AT_ONCE, total))
            ]
            for one in added:
                one.done.wait()
                assert (one.status, one.step) == ("ended", 2), (one.status, one.error)
            places.passed(done + len(added))

    runner = jaxcross.Runner(world)
    places = Places(world, runner, total)
    begin = time.perf_counter()
    runner.add("host", host)
    runner.run()
    return {"rows": places.rows, "s": time.perf_counter() - begin, "total": total}


def steps(world: Any, jobs: int, elements: int, total: int) -> dict[str, Any]:
    """Many jobs, each with its share of the steps."""
    import jaxcross

    step, state, batch = tiny(elements=elements)
    each = -(-total // jobs)

    def fn(job: Any) -> Any:
        mine = job.restore(state)
        for _ in job.batches(range(each)):
            mine = step(mine, batch)
            job.log({"loss": mine[0]}) if job.step % 100 == 0 else None
            if job.name == "job-0":
                places.passed(job.step * jobs)
        return mine

    runner = jaxcross.Runner(world)
    places = Places(world, runner, total)
    begin = time.perf_counter()
    made = [runner.add(f"job-{n}", fn) for n in range(jobs)]
    runner.run()
    assert [job.step for job in made] == [each] * jobs
    return {
        "rows": places.rows,
        "s": time.perf_counter() - begin,
        "total": each * jobs,
        "jobs": jobs,
    }


def work(out: Path, args: Any) -> None:
    """Runs the parts on one rank."""
    import jaxcross

    world = jaxcross.initialize(stall_timeout_s=600, wire=args.wire)
    before = {"threads": threading.active_count()}
    join, step = partial(joins, world), partial(steps, world, args.jobs, args.elements)
    join(2 * AT_ONCE)  # warm-up: creates what is created only once
    step(4 * args.jobs)
    runs = {"joins": lambda: join(args.joins), "steps": lambda: step(args.steps)}
    parts = {part: run() for part, run in runs.items() if args.only in (None, part)}
    after = {"threads": threading.active_count(), "arena_bytes": world.arena.nbytes}
    mine = json.dumps({"wire": world.over, "parts": parts, "before": before, "after": after})
    every = world.control.allgather_text(mine)
    if world.rank == 0:
        out.write_text(json.dumps([json.loads(text) for text in every]))


def growth(rows: list[dict[str, int]], name: str, unit: int) -> float:
    """Returns the slope over the second half of the rows, per `unit` joins or steps."""
    late = rows[len(rows) // 2 :]
    if len(late) < 2:
        return 0.0
    return (
        float(np.polyfit([row["done"] for row in late], [row[name] for row in late], 1)[0]) * unit
    )


def table(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns first value, last value and growth of each count, where it grows most."""
    found: dict[str, Any] = {}
    for part, unit in (("joins", 1), ("steps", 1000)):
        if part not in ranks[0]["parts"]:
            continue
        found[part] = {}
        for name in COUNTS:
            rows = max(
                (rank["parts"][part]["rows"] for rank in ranks),
                key=lambda rows: growth(rows, name, unit),
            )
            found[part][name] = {
                "first": rows[0][name],
                "last": rows[-1][name],
                "growth": growth(rows, name, unit),
            }
            found[part][name]["bound"] = BOUNDS[part].get(name)
    return found


def draw(ranks: list[dict[str, Any]], path: Path) -> None:
    """Plots each count against the joins (upper row) or steps (lower row), one curve per rank."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(COUNTS), figsize=(3.2 * len(COUNTS), 6), layout="constrained", squeeze=False
    )
    for line, (part, what) in zip(
        axes, (("joins", "jobs that came and went"), ("steps", "job-steps")), strict=True
    ):
        for axis, name in zip(line, COUNTS, strict=True):
            for number, rank in enumerate(ranks):
                rows = rank["parts"].get(part, {"rows": []})["rows"]
                values = [row[name] / (1e6 if name == "rss_bytes" else 1) for row in rows]
                axis.plot([row["done"] for row in rows], values, label=f"rank {number}", lw=1.2)
            axis.set(xlabel=what, title="resident memory, MB" if name == "rss_bytes" else name)
            axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def launch(args: Any) -> list[dict[str, Any]]:
    """Starts the ranks and returns the counts of each rank."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("joins", "jobs", "steps", "elements")]
    sizes += [] if args.wire is None else [f"--wire={args.wire}"]
    sizes += [] if args.only is None else [f"--only={args.only}"]
    with ends_on_signals():
        return answer(__file__, [*sizes, "--worker"], args.ranks)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=4, help="default %(default)s")
    options.add_argument(
        "--joins", type=int, default=1000, help="jobs that come and go (default %(default)s)"
    )
    options.add_argument("--jobs", type=int, default=64, help="jobs at once (default %(default)s)")
    options.add_argument(
        "--steps", type=int, default=100_000, help="of all jobs together (default %(default)s)"
    )
    options.add_argument(
        "--elements", type=int, default=8, help="float32 of a step (default %(default)s)"
    )
    options.add_argument("--wire", choices=CHOICES, help="default: jaxcross's choice")
    options.add_argument(
        "--only", choices=tuple(BOUNDS), help="run this part anew, and keep the other one of --json"
    )
    options.add_argument("--png", type=Path, metavar="FILE", help="draw the counts")
    options.add_argument("--worker", type=Path, help="(internal) one rank")
    args = options.parse_args()
    if args.worker:
        work(args.worker, args)
        return 0
    if args.smoke:
        args.ranks, args.joins, args.jobs, args.steps = 2, 40, 8, 240
    ranks = launch(args)
    if args.only is not None and args.json is not None and args.json.exists():
        for rank, kept in zip(ranks, json.loads(args.json.read_text())["raw"], strict=True):
            rank["parts"] = {**kept["parts"], **rank["parts"]}
    result = {
        "ranks": args.ranks,
        "table": table(ranks),
        "raw": ranks,
        "seconds": {part: found["s"] for part, found in ranks[0]["parts"].items()},
    }
    what = {"joins": f"{args.joins} joins", "steps": f"{args.jobs} jobs, {args.steps} steps"}
    summary = "; ".join(
        f"{what[part]} in {seconds:.0f} s" for part, seconds in result["seconds"].items()
    )
    print(f"{args.ranks} ranks over {ranks[0]['wire']}: {summary}")
    beyond = []
    for part, unit in (("joins", "a join"), ("steps", "1,000 job-steps")):
        for name, row in result["table"].get(part, {}).items():
            print(
                f"  {part}: {name:14} {row['first']:>12} -> {row['last']:>12}, "
                f"{row['growth']:+.2f} {unit}"
            )
            if row["bound"] is not None and row["growth"] > row["bound"] + 0.01:
                beyond.append(f"{part}: {name}")
    result["beyond_its_bound"] = beyond
    print(f"beyond its bound: {', '.join(beyond) or 'nothing'}")
    write_json(args.json, __doc__, result)
    if args.png:
        draw(ranks, args.png)
    return 1 if beyond and not args.smoke else 0


if __name__ == "__main__":
    raise SystemExit(main())
