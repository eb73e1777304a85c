"""What do k jobs in one process need, compared with k processes: memory and compilations?

    python benchmarks/memory.py [--jobs 1,2,4] [--image-size 224] [--json FILE] [--smoke]
    python benchmarks/memory.py --booked [--workload mlp] [--jobs 1,2,3,4] [--json FILE] [--smoke]

There are two hosts with a shaped link, as in `race.py`. `crossover` runs all jobs in one process
per host. `fused-k` runs one process per job, all at the same time. We also run `fused-k` without
the setting by which `jaxcross launch` keeps memory in large pages.

Peak memory is the largest resident set while steps run that have already been compiled, summed over
the processes of a host. Compilations and their seconds are also counted per host. Identical jobs in
one process compile only once.

Before its first step, each job reserves the memory that it will need (`Runner(memory=...)`), which
we call booking. `--booked` compares what the jobs of one process book with what they need, uncut
and cut in four. The ratio should be 0.98 to 1.15.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import memory_booked
from race_measure import Entrants
from rivals.cases import RIVALS
from rivals.teams import Stage, lab_or_exit
from workloads import parser, write_json

CASES = {1: "one", 2: "two", 3: "three", 4: "four"}
WAYS = {
    "one process": ("crossover", True), "k processes": ("fused-k", True),
    "k processes, memory as it comes": ("fused-k", False),
}  # fmt: skip


def measure(k: int, way: str, *, rate: str, smoke: bool, image_size: int | None) -> dict[str, Any]:
    """Measures k jobs in one of the ways, in a separate lab."""
    name, keeps_memory = WAYS[way]
    rival = RIVALS[name]
    with (
        tempfile.TemporaryDirectory(prefix="memory-") as folder,
        lab_or_exit(hosts=2, rate=rate) as lab,
        Stage(lab, Path(folder), keeps_memory=keeps_memory) as stage,
    ):
        entrants = Entrants(stage, CASES[k], smoke, [rival], image_size=image_size)
        entrants.start(
            rival.team, rests=False
        )  # after a rest, a process takes all memory back at once, needed or not
        run = entrants.run(rival, 2)
        facts = entrants.start_up[rival.team]
    return {
        "jobs": k, "way": way, "image_size": entrants.jobs[0].sizes()["image_size"],
        "peak_rss_bytes": run["peak_rss_bytes"],
        **{key: facts[key] for key in ("compilations", "compile_s", "start_s", "prepare_s")},
    }  # fmt: skip


def numbers(words: str) -> list[int]:
    """For `argparse`: numbers of jobs, each of which must have a case."""
    known = {str(k): k for k in CASES}
    if unknown := [word for word in words.split(",") if word not in known]:
        raise argparse.ArgumentTypeError(
            f"there is no case of `{unknown[0]}` jobs; there are {', '.join(known)}."
        )
    return [known[word] for word in words.split(",")]


def booked(args: argparse.Namespace) -> int:
    """Compares what jobs book with what they need."""
    result: dict[str, Any] = {"booked": []}
    for jobs in [1, 2] if args.smoke else args.jobs:
        for cut in memory_booked.CUTS:
            row = memory_booked.measure(args.workload, jobs, cut, smoke=args.smoke)
            result["booked"].append(row)
            print(memory_booked.shown(row), flush=True)
            write_json(args.json, __doc__, result)
    return 0


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--jobs", type=numbers, default="1,2,4", metavar="A,B", help="default %(default)s"
    )
    options.add_argument(
        "--booked", action="store_true", help="compare what jobs book with what they need"
    )
    options.add_argument(
        "--workload", choices=memory_booked.WORKLOADS, default="mlp", help="default %(default)s"
    )
    options.add_argument("--rate", default="1gbit", help="of the link (default %(default)s)")
    options.add_argument(
        "--image-size", type=int, help="for all numbers of jobs, so that the most fit (default 224)"
    )
    args = options.parse_args()
    if args.booked:
        return booked(args)
    result: dict[str, Any] = {"rows": []}
    for k in [1, 2] if args.smoke else args.jobs:
        for way in WAYS:
            row = measure(k, way, rate=args.rate, smoke=args.smoke, image_size=args.image_size)
            result["rows"].append(row)
            print((
                f"{k} jobs, {way:31}: {row['peak_rss_bytes'] / 1e9:.2f} GB a host, "
                f"{row['compilations']:.0f} programs compiled in {row['compile_s']:.1f} s"
            ), flush=True)  # fmt: skip
            write_json(args.json, __doc__, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
