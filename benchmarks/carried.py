"""What does an exchange still cost if it's carried to the next step and overlaps with it?

    uv run --group torch python benchmarks/carried.py [--only alone,work,delayed,rivals,pairs]
        [--rates 500,25,100] [--repeats 3] [--minutes 20] [--json FILE] [--png FILE] [--draw]
        [--smoke]

Streaming DiLoCo exchanges one fragment of the model at a time, and its exchange is carried: it
overlaps with the computation of the following steps. We train ResNet-50 with it on two hosts with
one core each and a real link, and compare it with other ways to train. All numbers are seconds per
step.

All ways are measured in one run, in which they take turns, and each round of turns starts with a
different way. So if a core becomes faster or slower, all ways are affected. In the first two parts,
a turn has four steps, which is the number of steps from one fragment's exchange to the next one's,
and a repeat is a round of four turns. Each turn is a separate run. The parts are:
  alone    One job at each rate. `jit` is the step without exchange in one `jax.jit`, and `compute`
           is the same step under `crossover`. `blocking` and `carried` are streaming DiLoCo with 4
           fragments and 8-bit values on the wire. With `blocking`, the step that needs a fragment
           waits for the whole exchange of that fragment. With `carried`, the exchange is spread
           over the four steps until the next fragment's turn.
  work     The first rate, with `jit`, `compute`, `carried` and `work`. `work` is `carried` on an
           axis of one rank. So it does all of streaming DiLoCo's computation except decoding the
           other rank's part, but it doesn't send anything. We also report the first rank's CPU
           seconds for each way, because they depend less on whether the other rank pauses.
  delayed  The first rate, with `mean`, and with `delayed_mean`, which applies the mean of the
           previous step. We also measure m, the exchange of all gradients, alone and alongside a
           computation.
  rivals   The first rate. The rivals of `carried` are the mean in one `jax.jit` with mpi4jax
           (`fused`), PyTorch's DDP, and PyTorch's post-local SGD, which averages all parameters
           every 16 steps.
  pairs    The first rate. We run two `carried` jobs, one after the other and in crossover, and do
           the same with one `mean` job and one `carried` job.
Peak bytes are exact. They count the arrays plus XLA's temporaries at the fullest point of any step.

A part that would start after `--minutes` is skipped. FILE is written after each part, and keeps
those rows of earlier runs that aren't measured again. `--draw` draws the rows of FILE without
measuring anything.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import carried_show
from ended import ends_on_signals
from parts import in_order, is_too_late, parse_options
from rivals.cases import EVERY
from rivals.teams import Stage, Team, TeamError, lab_or_exit
from workloads import kept, parser, write_json

PARTS = ("alone", "work", "delayed", "rivals", "pairs")
RATES = (500, 25, 100)
RIVALS = {
    "fused": ("fused", "plain"),
    "DDP": ("ddp", "plain"),
    "post-local SGD": ("ddp", "post-local"),
}
"""Rival -> its team and variant."""
TURN = EVERY // 4
"""Steps from one fragment's turn to the next fragment's turn."""
ROUND_AND_TURN = EVERY + TURN
"""Steps until a job has made every kind of step.

Nothing is pending yet in the first fragment's first turn, so a single round isn't enough.
"""
SHORT = 4
"""Steps per turn for ways that exchange everything on each step."""


def main() -> int:
    args = options()
    result = kept(args.json, {"rows": [], "memory": {}})
    if args.draw:
        carried_show.draw(result, args.png)
        return 0
    with (
        ends_on_signals(),
        tempfile.TemporaryDirectory(prefix="carried-") as folder,
        lab_or_exit(hosts=2, rate=f"{args.rates[0]}mbit") as lab,
        Stage(lab, Path(folder)) as stage,
    ):
        sizes: dict[str, Any] = {"smoke": args.smoke, "image_size": args.image_size}
        bench = Bench(
            args=args,
            stage=stage,
            team=stage.start("carried", "one", job=None, **sizes),
            sizes=sizes,
        )
        for part in args.only:
            for rate in args.rates if part == "alone" else args.rates[:1]:
                if is_too_late(part, rate, begin=bench.begin, minutes=args.minutes):
                    continue
                made = bench.measure(part, rate)
                print("\n".join(carried_show.lines(made)), flush=True)
                result["rows"] = [
                    r for r in result["rows"] if (r["part"], r["rate"]) != (part, rate)
                ] + [made]
                result["memory"] |= bench.memory
                result["image_size"] = args.image_size
                write_json(args.json, __doc__, result)
    if args.png:
        carried_show.draw(result, args.png)
    return 0


@dataclass(kw_only=True)
class Bench:
    """The ranks, and the measurements that we request from them."""

    args: argparse.Namespace
    stage: Stage
    team: Team
    sizes: Mapping[str, Any]
    begin: float = field(default_factory=time.monotonic)
    memory: dict[str, Any] = field(default_factory=dict)
    teams: dict[str, Team] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def measure(self, part: str, rate: int) -> dict[str, Any]:
        """Measures a part at a rate, in Mbit/s, and returns its row."""
        self.stage.lab.set_rate(f"{rate}mbit")
        parts = {
            "alone": partial(self._one_job, ("jit", "compute", "blocking", "carried")),
            "work": partial(self._one_job, ("jit", "compute", "work", "carried")),
            "delayed": self._delayed,
            "rivals": self._rivals,
            "pairs": self._pairs,
        }
        return {"part": part, "rate": rate, "tcp_bits_per_s": self._tcp(), **parts[part]()}

    def _tcp(self) -> list[float]:
        return list(self.stage.lab.measure_rate(0.3 if self.args.smoke else 1.0))

    def _one_job(self, ways: Sequence[str]) -> dict[str, Any]:
        for way in ways:
            self._prepare(way, ROUND_AND_TURN)
        used: dict[str, list[float]] = {way: [] for way in ways}
        found = self._in_turn(
            {way: self._way(way, TURN, used=used[way]) for way in ways}, turns=EVERY // TURN
        )
        return {
            **found,
            "turn_steps": TURN,
            "processor_s": {way: _means(each, EVERY // TURN) for way, each in used.items()},
        }

    def _delayed(self) -> dict[str, Any]:
        for way in ("jit", "compute", "mean", "delayed"):
            self._prepare(way, 3)
        return self._in_turn(
            {
                "compute": self._way("compute"),
                "mean": self._way("mean", SHORT),
                "delayed": self._way("delayed", 2 * SHORT),
                "m": lambda: statistics.median(
                    self._ask("exchange", variant="mean", times=3)["raw"]
                ),
                "m next to c": lambda: statistics.median(
                    self._ask("beside", variant="mean", exchanges=3)["taxed_m"]
                ),
            }
        )

    def _rivals(self) -> dict[str, Any]:
        """Measures the rivals. A rival that can't run is left out, and the row says why."""
        self._prepare("carried", ROUND_AND_TURN)
        ways = {"carried": self._way("carried")}
        for rival, (team, variant) in RIVALS.items():
            try:
                self._start(team)
                self.stage.ask(self.teams[team], "prepare", variant=variant)
            except TeamError as error:
                self.left_out[rival] = str(error)
                print(f"{rival} is left out: {error}", flush=True)
                continue
            ways[rival] = self._rival(team, variant)
        found = self._in_turn(ways)
        for team in self.teams.values():
            self.stage.ask(team, "rest")
        return {**found, "left_out": dict(self.left_out)}

    def _start(self, team: str) -> None:
        if team in self.teams:
            return
        if team == "ddp" and importlib.util.find_spec("torch") is None:
            raise TeamError("PyTorch is not installed")
        self.teams[team] = self.stage.start(team, "one", job=0, **self.sizes)

    def _rival(self, team: str, variant: str) -> Callable[[], float]:
        steps = EVERY if variant == "post-local" else SHORT

        def seconds() -> float:
            self.stage.ask(
                self.teams[team], "prepare", variant=variant
            )  # another variant may need a new wrapper; also warms up memory
            if variant == "post-local":  # measure from the start of a round
                self.stage.ask(self.teams[team], "run", steps=EVERY - 2, variant=variant)
            begin = time.perf_counter()
            self.stage.ask(self.teams[team], "run", steps=steps, variant=variant)
            return (time.perf_counter() - begin) / steps

        return seconds

    def _pairs(self) -> dict[str, Any]:
        for way, number in (("carried", 0), ("carried", 1), ("mean", 0)):
            self._prepare(way, ROUND_AND_TURN if way == "carried" else 3, number)
        ratio = self._carried_steps_a_mean()
        mixed = [2 * SHORT, round(2 * SHORT * ratio / EVERY) * EVERY or EVERY]

        def together(ways: Sequence[str], steps: Sequence[int], policy: str) -> Callable[[], float]:
            return lambda: self._ask("run", variants=ways, steps=steps, policy=policy)["wall_s"]

        both, two = ["carried", "carried"], [EVERY, EVERY]
        each = ["mean", "carried"]
        found = self._in_turn(
            {
                "two, one after the other": together(both, two, "sequential"),
                "two, in crossover": together(both, two, "crossover"),
                "mean and carried, one after the other": together(each, mixed, "sequential"),
                "mean and carried, in crossover": together(each, mixed, "crossover"),
            }
        )
        return {**found, "steps": {"two": two, "mean and carried": mixed}}

    def _carried_steps_a_mean(self) -> float:
        """Returns how many steps a carried job makes in the time of one `mean` step, each alone."""
        mean, carried = (self._way(way, SHORT)() for way in ("mean", "carried"))
        return mean / carried

    def _way(
        self, way: str, steps: int = EVERY, *, used: list[float] | None = None
    ) -> Callable[[], float]:
        """Returns a function that measures a way's seconds per step.

        Each call also appends the first rank's CPU seconds per step to `used`.
        """

        def seconds() -> float:
            found = self._ask("run", variants=[way], steps=[steps], policy="crossover")
            if used is not None:
                used.append(found["cpu_s"] / steps)
            return found["wall_s"] / steps

        return seconds

    def _in_turn(
        self, ways: Mapping[str, Callable[[], float]], *, turns: int = 1
    ) -> dict[str, Any]:
        """Measures all ways in each repeat, as the mean of `turns` turns.

        Returns the medians and the seconds of each repeat.
        """
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(self.args.repeats * turns):
            for way in in_order(list(ways), turn):
                found[way].append(ways[way]())
                print(f"  {way}: {found[way][-1]:.3f} s", flush=True)
        raw = {way: _means(each, turns) for way, each in found.items()}
        return {"raw": raw, "s": {way: statistics.median(each) for way, each in raw.items()}}

    def _prepare(self, way: str, steps: int, number: int = 0) -> None:
        """Compiles a way and lets it allocate its memory. No-op if that has been done."""
        key = f"{way} {number}"
        if key in self.memory:
            return
        begin = time.perf_counter()
        found = self.memory[key] = self._ask("prepare", variant=way, number=number, steps=steps)
        print((
            f"{way} is ready after {time.perf_counter() - begin:.0f} s: {found.get('programs', 1)} "
            f"programs, peak {found.get('peak_bytes', 0) / 1e6:.0f} MB"
        ), flush=True)  # fmt: skip

    def _ask(self, do: str, **facts: Any) -> dict[str, Any]:
        return self.stage.ask(self.team, do, **facts)[0]


def _means(numbers: Sequence[float], count: int) -> list[float]:
    """Returns the mean of each group of `count` consecutive numbers."""
    return [statistics.fmean(numbers[n : n + count]) for n in range(0, len(numbers), count)]


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--image-size", type=int, default=160, help="default %(default)s")
    args = parse_options(
        made, PARTS, RATES, minutes=20.0, only_help=f"of {', '.join(PARTS)}, in this order",
        rates_help="the first one is that of the parts with one rate",
        png_help="draw what is left of the speed of computation alone",
    )  # fmt: skip
    if args.smoke:
        args.repeats, args.image_size = 1, 32
    return args


if __name__ == "__main__":
    raise SystemExit(main())
