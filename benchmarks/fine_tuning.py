"""Do k LoRA adapters of one base train faster, and in less memory, in one process than in k?

    python benchmarks/fine_tuning.py [--rate 100mbit] [--adapters 1,2,4,8] [--repeats 5]
                              [--json FILE] [--png FILE] [--smoke]

There are two hosts with one core each and a shaped link, as in `race.py`. The base is a decoder
with 151 million parameters (12 layers, 1024 features), and is never trained. The adapters have LoRA
rank 4 or 8, and different learning rates. We train the first k of them in two ways, by turns in one
run:
  crossover    one process per host, in which k jobs share one copy of the base
  k processes  one process per adapter and host, all at the same time, each with its own base
Both ways use jaxcross and the same steps, so we also check that their losses are equal bit for bit.

Memory is the largest resident set of a host while the steps run, minus that of a process that has
compiled its steps but holds no base. It is given per host, summed over its processes. We make
malloc return freed memory to the kernel at once, so that the figures don't depend on how much of it
malloc would keep.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import fine_tuning_show
from race_file import out_file
from rivals.cases import RANKS
from rivals.teams import Stage, Team, lab_or_exit
from workloads import parser, spread, write_json

RETURN_MEMORY = "glibc.malloc.mmap_threshold=1000000:glibc.malloc.arena_max=1"


def turn(stage: Stage, teams: list[Team], *, steps: int, count: int) -> dict[str, Any]:
    """Trains the adapters of these teams once, all at the same time."""
    loaded = stage.ask(teams, "load", count=count)
    answers = stage.ask(teams, "run", steps=steps)
    stage.ask(teams, "drop")
    losses: list[dict[str, Any]] = [{} for _ in range(RANKS)]
    for n, answer in enumerate(answers):
        losses[n % RANKS] |= answer["losses"]

    def per_host(found: list[dict[str, Any]], key: str) -> int:
        return max(sum(answer[key] for answer in found[rank::RANKS]) for rank in range(RANKS))

    return {
        "s_per_step": max(answer["seconds"] for answer in answers) / steps,
        "cpu_s_per_step": sum(answer["cpu_s"] for answer in answers) / steps,
        "needed_bytes": per_host(answers, "needed_bytes"),
        "base_bytes": per_host(loaded, "base_bytes"),
        "adapters_bytes": per_host(loaded, "adapters_bytes"),
        "losses": losses,
    }


def counts(text: str) -> list[int]:
    """For `argparse`: numbers of adapters."""
    found = [int(word) for word in text.split(",")]
    if not all(1 <= k <= 8 for k in found):
        raise argparse.ArgumentTypeError("there are at most 8 adapters")
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rate", default="100mbit", help="of the link (default %(default)s)")
    options.add_argument("--adapters", type=counts, default="1,2,4,8", help="default %(default)s")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--steps", type=int, default=3, help="per repeat and adapter")
    options.add_argument("--png", metavar="FILE", type=out_file, help="draw time and memory")
    args = options.parse_args()
    ks = [1, 2] if args.smoke else args.adapters
    repeats = 1 if args.smoke else args.repeats
    os.environ["GLIBC_TUNABLES"] = RETURN_MEMORY  # of the ranks
    result: dict[str, Any] = {"rate": args.rate, "steps": args.steps, "rows": []}
    with (
        tempfile.TemporaryDirectory(prefix="fine-tuning-") as folder,
        lab_or_exit(hosts=2, rate=args.rate) as lab,
        Stage(lab, Path(folder), keeps_memory=False) as stage,
    ):
        shared = stage.start("adapters", str(max(ks)), job=None, smoke=args.smoke)
        alone = [
            stage.start("adapters", str(max(ks)), job=n, smoke=args.smoke) for n in range(max(ks))
        ]
        for team in (shared, *alone):
            stage.ask(team, "prepare")
        samples: dict[int, list[list[dict[str, Any]]]] = {k: [] for k in ks}
        for repeat in range(repeats):
            for k in ks:
                ways = [([shared], k), (alone[:k], 1)]
                order = ways if repeat % 2 == 0 else ways[::-1]
                found = [
                    turn(stage, teams, steps=args.steps, count=count) for teams, count in order
                ]
                samples[k].append(found if repeat % 2 == 0 else found[::-1])
                one, other = (sample.pop("losses") for sample in samples[k][-1])
                if one != other:
                    raise SystemExit(f"{k} adapters: losses differ between the two ways")
    for k in ks:
        crossover, processes = (list(way) for way in zip(*samples[k], strict=True))
        ratios = [b["s_per_step"] / a["s_per_step"] for a, b in samples[k]]
        needed = statistics.median(each["needed_bytes"] for each in crossover)
        least = crossover[0]["base_bytes"] + crossover[0]["adapters_bytes"]
        row = {
            "adapters": k,
            "crossover": _summary(crossover),
            "k processes": _summary(processes),
            "times_as_fast": spread(ratios),
            "needed_over_base_and_states": needed / least,
        }
        result["rows"].append(row)
        print(
            f"{k} adapters: {row['crossover']['s']['median']:.2f} s per step of all in crossover, "
            f"{row['k processes']['s']['median']:.2f} s in {k} processes, "
            f"{row['times_as_fast']['median']:.2f} times as fast; "
            f"{needed / 1e9:.2f} GB instead of "
            f"{row['k processes']['needed_bytes'] / 1e9:.2f} GB, "
            f"{needed / least:.2f} of base and states"
        )
    write_json(args.json, __doc__, result)
    if args.png:
        fine_tuning_show.draw(result, args.png)
    return 0


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "s": spread([each["s_per_step"] for each in turns]),
        "cpu_s": spread([each["cpu_s_per_step"] for each in turns]),
        "needed_bytes": statistics.median(each["needed_bytes"] for each in turns),
        "base_bytes": turns[0]["base_bytes"],
        "adapters_bytes": turns[0]["adapters_bytes"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
