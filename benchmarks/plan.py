"""Can we predict the time of several jobs running together from runs of each job alone?

    python benchmarks/plan.py [--only contention,equal,...] [--cases A,B]
        [--rates 25,100,200,500,1000,2000] [--repeats 3] [--minutes 18] [--json FILE] [--png FILE]
        [--draw] [--smoke]

There are two hosts with one core each and a real link. In each repeat, every kind of job first runs
alone, and then all cases of a part run, in a different order each time.

The predictions are made by the twin (`jaxcross.plan.predict`), which simulates a run. Its inputs
are the profiles of the solo runs, averaged over all repeats, and the contention at the rate of the
link: what the part `contention` has measured, if FILE has it, or else what
`jaxcross.plan.machine_contention` keeps for two-core hosts. Predictions don't use anything that was
measured while several jobs were running.

T is the seconds per job-step. It's measured from the moment when all jobs have made their first
step, because a first step has to get its memory from the kernel, until the end of the last span. If
a step is in progress at that moment, only the fraction of its time that comes afterwards is
counted. `whole_s` has the predicted and measured seconds including the first steps. The parts are:
  contention by how much a ResNet-50 step and exchanges slow each other down at 25, 100, 200, 500
             and 1000 Mbit/s, which take turns
  equal      two and three equal jobs, and two different ones, at three rates; for the equal ones
             also `jaxcross.estimate`
  unequal    a large job and a small one, run in three ways: with whole steps, in pieces, and in
             pieces with equal shares
  pair       the same two jobs, with the pieces and shares that `jaxcross.plan.rates` chooses from
             solo runs
  variants   two jobs with bfloat16 on the wire, and two jobs cut in four
  ResNet-50  two ResNet-50 jobs
  slow       two equal jobs at 25, 100 and 200 Mbit/s, whose steps exchange for about twice as long
             as they compute; also `jaxcross.estimate`
  unlike     two equal jobs on ranks of which one has to compute twice as much per step, and on
             ranks that are equally fast
We report:
  ratio        the predicted T over the achieved T, where the latter is the median of the repeats
  interval     from 5% below to 10% above the prediction, widened on both sides by half of the
               difference between solo runs
  attribution  by how much the round took longer than predicted, by cause, relative to the predicted
               round
A part that would start after `--minutes` is skipped. FILE is written after each part, and keeps
those rows of earlier runs that aren't measured again. `--draw` draws the rows of FILE without
measuring anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import plan_show
from ended import ends_on_signals
from parts import in_order, is_too_late, parse_options, words
from plan_cases import ALL_RATES, CASES, CONTENTION_RATES, ESTIMATED, PARTS, PIECES
from rivals.teams import Stage, Team, lab_or_exit
from workloads import kept, parser, write_json

from jaxcross.interleave.contention import Contention
from jaxcross.interleave.policy import Policy, RoundRobin, Weighted
from jaxcross.plan.machine_contention import TWO_CORES, MachineContention
from jaxcross.plan.rates import choose_rates
from jaxcross.plan.twin import Prediction, predict
from jaxcross.report import Report
from jaxcross.step.profile import Profile

PAIR_RATE = 500
LEAST = 6
"""Steps that the slowest job of a run makes at least."""
WINDOW = 0.3
"""How long one part of a round of contention takes, as a share of `--seconds`."""
RACE = Path(__file__).parent / "results" / "race.json"


def main() -> int:
    args = options()
    result = earlier(args.json)
    if args.draw:
        plan_show.draw(result, args.png)
        return 0
    rate = f"{args.rates[0]}mbit"
    with (
        ends_on_signals(),
        tempfile.TemporaryDirectory(prefix="plan-") as folder,
        lab_or_exit(hosts=2, rate=rate) as lab,
        Stage(lab, Path(folder)) as stage,
    ):
        bench = Bench(
            args=args, stage=stage, team=stage.start("planned", "two", job=None, smoke=args.smoke)
        )
        bench.use_contention(result["contention"])
        for part in args.only:
            for rate in args.rates:
                if bench.is_too_late(part, rate):
                    continue
                if part == "contention":
                    made = bench.measure_contention()
                    bench.use_contention(made["contention"])
                elif part == "pair":
                    made = bench.pair()
                else:
                    made = bench.cases(part, rate)
                plan_show.keep(result, made)
                result["verdict"] = plan_show.verdict(result)
                write_json(args.json, __doc__, result)
    print(json.dumps(result.get("verdict"), indent=1))
    if args.png:
        plan_show.draw(result, args.png)
    return 0


@dataclass(kw_only=True)
class Bench:
    """The ranks, and the runs that we request from them."""

    args: argparse.Namespace
    stage: Stage
    team: Team
    begin: float = field(default_factory=time.monotonic)
    rate: int = 0
    runs: int = 0
    machine: MachineContention = TWO_CORES

    def is_too_late(self, part: str, rate: int) -> bool:
        """Returns whether there's nothing to do for a part at a rate, or no time left."""
        wanted = bool(self._cases(part, rate))
        if part == "pair":
            wanted = rate == PAIR_RATE
        elif part == "contention":  # measures all rates at once
            wanted = rate == self._contention_rates[0] if self._contention_rates else False
        return not wanted or is_too_late(part, rate, begin=self.begin, minutes=self.args.minutes)

    def _cases(self, part: str, rate: int) -> list[str]:
        every = [name for name, case in CASES.items() if case.part == part and rate in case.rates]
        return [name for name in every if not self.args.cases or name in self.args.cases]

    def cases(self, part: str, rate: int) -> dict[str, list[dict[str, Any]]]:
        """Runs a part's cases at a rate, along with solo runs of their kinds."""
        self._set_rate(rate)
        names = self._cases(part, rate)
        kinds = list(dict.fromkeys(kind for name in names for kind in CASES[name].kinds))
        solo: dict[str, list[Profile]] = {kind: [] for kind in kinds}
        first = {kind: self._first(kind) for kind in kinds}
        plans = {name: self._plan(name, first) for name in names}
        raw: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for repeat in range(self.args.repeats):
            for kind in kinds:
                solo[kind].append(self._solo(kind, self._steps(first[kind])))
            for name in in_order(names, repeat):
                raw[name].append(self._run(CASES[name].kinds, plans[name], CASES[name].shares))
        rows = [self._row(name, solo, plans[name], raw[name]) for name in names]
        for row in rows:
            print(plan_show.say(row), flush=True)
        alone = [self._solo_row(kind, profiles) for kind, profiles in solo.items()]
        return {"rows": rows, "solo": alone, "estimates": self._estimates(rows, alone)}

    def pair(self) -> dict[str, list[dict[str, Any]]]:
        """Runs the unequal pair with the pieces and shares that `choose_rates` chooses."""
        self._set_rate(PAIR_RATE)
        cuts: list[dict[int, str]] = [
            {1: "large", **{n: f"large cut in {n}" for n in PIECES}},
            {1: "small"},
        ]
        kinds = [kind for each in cuts for kind in each.values()]
        solo = {kind: self._solo(kind, self._steps(self._first(kind))) for kind in kinds}
        named = [
            {n: plan_show.pooled([solo[k]], str(i)) for n, k in each.items()}
            for i, each in enumerate(cuts)
        ]
        chosen = choose_rates(named, contention=self._contention)
        shares = chosen.policy.shares if isinstance(chosen.policy, Weighted) else ()
        together = [cut[pieces] for cut, pieces in zip(cuts, chosen.pieces, strict=True)]
        alone: dict[str, list[float]] = {"large": [], "small": []}
        raw: list[dict[str, float]] = []
        for _ in range(self.args.repeats):
            for name, rates in alone.items():
                steps = [self._steps(solo[name])]
                rates.append(
                    next(iter(plan_show.rates(self._run((name,), steps, ())["ends"]).values()))
                )
            own = [statistics.median(rates) for rates in alone.values()]
            seconds = 2 * self.args.seconds
            per_s = [
                speed / each for speed, each in zip(chosen.speeds, chosen.alone_s, strict=True)
            ]
            seconds = max(seconds, 6 / min(per_s))
            steps = [max(4, round(seconds * rate)) for rate in per_s]
            found = plan_show.rates(self._run(together, steps, shares)["ends"])
            raw.append(
                {name: rate / a for name, rate, a in zip(alone, found.values(), own, strict=True)}
            )
        speeds = {name: statistics.median(each[name] for each in raw) for name in alone}
        row = {
            "rate": PAIR_RATE,
            "pieces": list(chosen.pieces),
            "policy": chosen.policy.name,
            "shares": list(shares),
            "refusal": chosen.refusal,
            "predicted_speeds": list(chosen.speeds),
            "speeds": speeds,
            "progress": sum(speeds.values()),
            "predicted_progress": chosen.progress,
            "raw": raw,
        }
        each = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
        print(
            (
                f"pair in {row['pieces']} pieces, shares {row['shares']}: {each} of the speed "
                f"alone, progress {row['progress']:.2f}; predicted {chosen.progress:.2f}"
            ),
            flush=True,
        )
        return {"pair": [row]}

    def measure_contention(self) -> dict[str, list[dict[str, Any]]]:
        """Measures the contention at all rates, which take turns."""
        rates = self._contention_rates
        raw: dict[int, list[dict[str, Any]]] = {rate: [] for rate in rates}
        window_s = self.args.seconds * WINDOW
        for repeat in range(self.args.repeats):
            for rate in in_order(rates, repeat):
                self._set_rate(rate)
                (found, *_) = self.stage.ask(
                    self.team, "contention", kind="ResNet-50", mbps=rate, window_s=window_s
                )
                raw[rate].append(found)
        rows = [plan_show.contention_row(rate, rounds) for rate, rounds in raw.items()]
        for row in rows:  # as in `jaxcross.plan.machine_contention`
            factors = f"compute={row['compute']:.2f}, exchange={row['exchange']:.2f}"
            print(f"({row['rate']:.1f}, Contention({factors})),", flush=True)
        return {"contention": rows}

    def use_contention(self, rows: Sequence[dict[str, Any]]) -> None:
        """Predicts with measured contention at the rates that were measured."""
        for row in rows:
            there = Contention(compute=row["compute"], exchange=row["exchange"])
            self.machine = self.machine.with_point(row["rate"], there)

    @property
    def _contention_rates(self) -> list[int]:
        return [rate for rate in CONTENTION_RATES if rate in self.args.rates]

    @property
    def _contention(self) -> Contention:
        return self.machine.at(self.rate)

    def _set_rate(self, rate: int) -> None:
        self.stage.lab.set_rate(f"{rate}mbit")
        self.rate = rate

    def _first(self, kind: str) -> Profile:
        """Makes a kind's first run, which compiles and allocates memory."""
        begin = time.perf_counter()
        profile = self._solo(kind, 5)
        print(
            (
                f"{kind} at {self.rate} Mbit/s: c {profile.compute_s:.3f} s, m "
                f"{profile.exchange_s:.3f} s, after {time.perf_counter() - begin:.0f} s"
            ),
            flush=True,
        )
        return profile

    def _steps(self, profile: Profile, jobs: int = 1) -> int:
        return max(
            5, min(80, round(self.args.seconds / jobs / (profile.compute_s + profile.exchange_s)))
        )

    def _solo(self, kind: str, steps: int) -> Profile:
        return Profile.from_data(self._run((kind,), [steps], ())["profile"])

    def _run(
        self, kinds: Sequence[str], steps: Sequence[int], shares: Sequence[float]
    ) -> dict[str, Any]:
        jobs = [
            {"name": f"job{n}", "kind": kind, "number": n, "steps": count}
            for n, (kind, count) in enumerate(zip(kinds, steps, strict=True))
        ]
        self.runs += 1
        out = str(self.stage.folder / f"{self.runs}.json")
        facts: dict[str, Any] = {"shares": list(shares), "mbps": self.rate, "out": out}
        return {**self.stage.ask(self.team, "run", jobs=jobs, **facts)[0], "report": out}

    def _plan(self, name: str, first: Mapping[str, Profile]) -> list[int]:
        """Returns the steps of each job, so that all jobs end at about the same time."""
        case = CASES[name]
        profiles = [plan_show.pooled([first[kind]], f"job{n}") for n, kind in enumerate(case.kinds)]
        twin = predict(profiles, policy=_policy(case.shares), contention=self._contention)
        periods = [job.period_s for job in twin.rounds.jobs]
        seconds = max(self.args.seconds, (2 if self.args.smoke else LEAST) * max(periods))
        return [max(4, round(seconds / period)) for period in periods]

    def _row(
        self,
        name: str,
        solo: Mapping[str, Sequence[Profile]],
        steps: Sequence[int],
        raw: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        case = CASES[name]
        profiles = [plan_show.pooled(solo[kind], f"job{n}") for n, kind in enumerate(case.kinds)]
        twin: Prediction = predict(
            profiles, policy=_policy(case.shares), contention=self._contention, steps=tuple(steps)
        )
        reports = [Report.load(run["report"]) for run in raw]
        took = [plan_show.s_per_step(report.spans) for report in reports]
        achieved, predicted = statistics.median(took), plan_show.s_per_step(twin.spans)
        middle = min(range(len(took)), key=lambda n: abs(took[n] - achieved))
        apart = max(
            plan_show.spread([p.compute_s + p.exchange_s for p in solo[kind]])
            for kind in case.kinds
        )
        low, high = plan_show.interval_s(predicted, apart)
        return {
            "case": name,
            "rate": self.rate,
            "steps": list(steps),
            "predicted_s": predicted,
            "achieved_s": achieved,
            "ratio": predicted / achieved,
            "spread": plan_show.spread(took),
            "slow_rank": None if twin.slow_rank is None else asdict(twin.slow_rank),
            "reported_slow_rank": raw[middle]["summary"]["slow_rank"],
            "interval_s": [low, high],
            "covered": low <= achieved <= high,
            "raw_s": took,
            "attribution": plan_show.attribution(twin, reports[middle]),
            "predicted": plan_show.breakdown(twin),
            "achieved": raw[middle]["summary"],
            "whole_s": [
                twin.s_per_step,
                statistics.median(run["wall_s"] / sum(steps) for run in raw),
            ],
        }

    def _solo_row(self, kind: str, profiles: Sequence[Profile]) -> dict[str, Any]:
        mean = plan_show.pooled(profiles, kind)
        return {
            "kind": kind,
            "rate": self.rate,
            "c_s": mean.compute_s,
            "m_s": mean.exchange_s,
            "host_s": mean.host_s,
            "spread": plan_show.spread([p.compute_s + p.exchange_s for p in profiles]),
            "profiles": [p.as_data() for p in profiles],
        }

    def _estimates(
        self, rows: Sequence[dict[str, Any]], solo: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Compares `jaxcross.estimate` of equal jobs with what they gained over their solo runs."""
        found = []
        for kind in dict.fromkeys(
            ESTIMATED[row["case"]] for row in rows if row["case"] in ESTIMATED
        ):
            (answer, *_) = self.stage.ask(
                self.team, "estimate", kind=kind, jobs=2, contention=self.machine.to_json()
            )
            (alone,) = (row for row in solo if row["kind"] == kind)
            gains = {gain["jobs"]: gain["expected"] for gain in answer["estimate"]["gains"]}
            for row in rows:
                jobs = len(CASES[row["case"]].kinds)
                if ESTIMATED.get(row["case"]) != kind or gains[jobs] is None:
                    continue
                achieved = (alone["c_s"] + alone["m_s"]) / row["achieved_s"]
                found.append(
                    {
                        "case": row["case"],
                        "rate": self.rate,
                        "predicted": gains[jobs],
                        "achieved": achieved,
                        "ratio": gains[jobs] / achieved,
                        "basis": answer["estimate"]["basis"],
                        "cost": answer["estimate"]["cost"],
                    }
                )
                print(
                    (
                        f"estimate of {row['case']} at {self.rate} Mbit/s: {gains[jobs]:.2f} "
                        f"times as fast, achieved {achieved:.2f}"
                    ),
                    flush=True,
                )
        return found


def _policy(shares: Sequence[float]) -> Policy:
    return Weighted(tuple(shares)) if shares else RoundRobin()


def earlier(path: Path | None) -> dict[str, Any]:
    """Returns the file's contents, and predictions for the kept rows of the race."""
    result = kept(path, {"rows": [], "solo": [], "estimates": [], "pair": [], "contention": []})
    result["race"] = plan_show.race_rows(json.loads(RACE.read_text()))
    return result


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--cases", type=words, default=[], metavar="CASE,...", help="of these parts")
    made.add_argument(
        "--seconds", type=float, default=10.0, help="of a run, or so (default %(default)s)"
    )
    args = parse_options(
        made, PARTS, ALL_RATES, minutes=18.0, png_help="draw predicted and measured times"
    )
    if args.smoke:
        args.repeats, args.seconds = 2, 0.3
    return args


if __name__ == "__main__":
    raise SystemExit(main())
