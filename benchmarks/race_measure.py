"""Commands the teams of a race: calibrates them at a rate, and runs one rival after another."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from race_bounds import Cost, bits_a_second, needed_bytes, rate_for, wait_free_s
from rivals.cases import RANKS, Rival, Spec, jobs_of, parameters, takes_all_jobs
from rivals.teams import Stage, Team, TeamError

WIRES = ("float32", "bfloat16")
INSIDE = ("steady_s_per_job_step", "hidden_share_from_trace", "account")
"""Numbers from jaxcross's report, which other rivals don't have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What computing and exchanging cost at one rate, with one number per job of the case.

    Attributes:
        compute_s: c under JAX, i.e. the step without its exchange.
        exchange_s: Maps a wire to m.
        tax_s: Maps a wire to the CPU time that an exchange takes from the core that computes, at
            most.
        beside_s: Maps a wire to the time of a step without its exchange while exchanges run
            alongside it.
        rate_bits_per_s: The link's rate during the calibration.
        sent_bytes: Bytes of the float32 exchange in one direction, including headers.
        raw: All measurements, per distinct job.
    """

    compute_s: list[float]
    exchange_s: dict[str, list[float]]
    tax_s: dict[str, list[float]]
    beside_s: dict[str, list[float]]
    rate_bits_per_s: float
    sent_bytes: list[float]
    raw: dict[Spec, dict[str, Any]]

    @classmethod
    def of(
        cls, jobs: Sequence[Spec], measured: Sequence[dict[Spec, dict[str, Any]]], rate: str
    ) -> Calibration:
        """Combines one or more measurements: each rank's median, averaged over the ranks."""
        raw = {spec: _joined([once[spec] for once in measured]) for spec in measured[0]}
        per_job = [raw[spec] for spec in jobs]

        def by_wire(name: str) -> dict[str, list[float]]:
            wires = [wire for wire in WIRES if f"{name}_{wire}" in per_job[0]]
            return {wire: [_middle(raw[f"{name}_{wire}"]) for raw in per_job] for wire in wires}

        return cls(
            compute_s=[_middle(raw["c"]) for raw in per_job],
            exchange_s=by_wire("m"),
            tax_s=by_wire("tax"),
            beside_s=by_wire("taxed_c"),
            rate_bits_per_s=bits_a_second(rate),
            sent_bytes=[statistics.fmean(raw["sent_bytes"]) for raw in per_job],
            raw=raw,
        )

    @property
    def ratio(self) -> float:
        """Sum m over sum c, the ratio by which named rates are defined."""
        return sum(self.exchange_s["float32"]) / sum(self.compute_s)

    def slow_down(self, wire: str) -> list[float]:
        """Returns the factor by which a JAX step slows down while exchanges run alongside it.

        Both times were measured within a few seconds of each other.
        """
        return [
            beside / alone
            for beside, alone in zip(self.beside_s[wire], self.compute_s, strict=True)
        ]

    def costs(self, wire: str, compute_s: Sequence[float] | None = None) -> list[Cost]:
        """Returns each job's cost. `compute_s` replaces the c that JAX had in the calibration."""
        compute_s = self.compute_s if compute_s is None else compute_s
        tax_s = self.tax_s.get(wire, [0.0] * len(compute_s))
        each = zip(compute_s, self.exchange_s[wire], tax_s, strict=True)
        return [Cost(compute_s=c, exchange_s=m, tax_s=tax) for c, m, tax in each]


@dataclass
class Entrants:
    """A case's teams on a stage, and what it costs to start them.

    Of the kinds in `apart`, only one runs at a time.
    """

    stage: Stage
    case: str
    smoke: bool
    rivals: list[Rival]
    teams: dict[str, list[Team]] = field(default_factory=dict)
    start_up: dict[str, Any] = field(default_factory=dict)
    image_size: int | None = None
    apart: Sequence[str] = ()
    _warm: tuple[str, str] | None = None
    _computed: dict[Spec, list[list[float]]] = field(default_factory=dict)

    @property
    def jobs(self) -> tuple[Spec, ...]:
        return jobs_of(self.case, self.smoke, self.image_size)

    def start(self, kind: str, *, rests: bool = True) -> None:
        """Starts the processes of one kind of team, one after the other, and compiles their steps.

        Then they rest, i.e. they return the memory that they no longer need, so that other teams
        can use it.
        """
        numbers: list[int | None] = [None] if takes_all_jobs(kind) else list(range(len(self.jobs)))
        begin = time.perf_counter()
        sizes: dict[str, Any] = {"smoke": self.smoke, "image_size": self.image_size}
        teams = [self.stage.start(kind, self.case, job=n, **sizes) for n in numbers]
        started = time.perf_counter()
        variants = dict.fromkeys(r.variant for r in self.rivals if r.team == kind)
        answers: list[dict[str, Any]] = []
        for variant in variants or {"sequential": None}:
            answers = [
                a for team in teams for a in self.stage.ask(team, "prepare", variant=variant)
            ]
        idle = self.stage.ask(teams, "rest") if rests else []
        self.teams[kind] = teams
        self.start_up[kind] = {
            "start_s": started - begin,
            "prepare_s": time.perf_counter() - started,
            "idle_rss_bytes": sum(a["idle_rss_bytes"] for a in idle),
            **{
                key: sum(a.get(key, 0) for a in answers) / RANKS
                for key in ("compilations", "compile_s")
            },
        }

    def make_room(self, kind: str) -> None:
        """Prepares for starting a kind: the processes that ran last return memory, and the kinds
        that may not run alongside this one are ended.
        """
        self.rest()
        if kind in self.apart:
            for other in [other for other in self.teams if other in self.apart]:
                self.end(other)

    def end(self, kind: str) -> None:
        """Ends a kind's processes, even if only some of them could be started."""
        self.stage.end(kind)
        self.teams.pop(kind, None)

    def measure(self, *, times: int, tax: bool = True) -> dict[Spec, dict[str, Any]]:
        """Measures c, m and the tax of each distinct job, one job at a time, at the link's current
        rate.
        """
        self.rest()
        (crossed,) = self.teams["crossed"]
        wires = [w for w in WIRES if w == "float32" or any(r.wire == w for r in self.rivals)]
        measured: dict[Spec, dict[str, Any]] = {}
        for spec, number in self._distinct().items():
            raw = measured[spec] = {
                "c": _raw(self.stage.ask(crossed, "compute", job=number, steps=times))
            }
            before = self.stage.lab.bytes_crossed()
            raw["m_float32"] = _raw(
                self.stage.ask(crossed, "exchange", job=number, times=times, wire="float32")
            )
            sent = self.stage.lab.bytes_crossed() - before
            raw["sent_bytes"] = [sent / RANKS / (times + 1)]
            for wire in wires[1:]:
                raw[f"m_{wire}"] = _raw(
                    self.stage.ask(crossed, "exchange", job=number, times=times, wire=wire)
                )
            for wire in wires if tax else ():
                exchanges = min(
                    200, max(3, math.ceil(4 * _middle(raw["c"]) / _middle(raw[f"m_{wire}"])))
                )
                answers = self.stage.ask(
                    crossed, "taxed", job=number, exchanges=exchanges, wire=wire
                )
                raw.update(
                    {
                        f"{name}_{wire}": _raw(answers, name)
                        for name in ("taxed_c", "taxed_m", "tax")
                    }
                )
            if tax and self._measures_buckets():
                answers = self.stage.ask(crossed, "buckets")
                raw["first"], raw["last_share"] = (
                    _raw(answers),
                    [answer["last_share"] for answer in answers],
                )
        self.stage.ask(crossed, "rest")
        return measured

    def _measures_buckets(self) -> bool:
        return any(rival.variant.startswith("wait-free") for rival in self.rivals)

    def _distinct(self) -> dict[Spec, int]:
        """The number of the first job of each kind."""
        return {spec: self.jobs.index(spec) for spec in dict.fromkeys(self.jobs)}

    def wait_free(self, calibration: Calibration, own_c: Sequence[float]) -> dict[str, Any]:
        """Returns the best time of a single job whose exchange overlaps with its own computation.

        See `wait_free_s`. The sizes of the first and the last bucket are those of the finest cut
        that `cut="auto"` considers, whatever it chose. `pieces` is the number of exchange segments
        that it did choose at this rate.
        """
        (cost,), (raw,) = calibration.costs("float32", own_c), calibration.raw.values()
        first, share = _middle(raw["first"]), statistics.fmean(raw["last_share"])
        (answer, *_) = self.stage.ask(self.teams["crossed"][0], "pieces")
        return {
            "pieces": answer["pieces"],
            "c_s": cost.compute_s,
            "m_s": cost.exchange_s,
            "first_bucket_s": first,
            "last_bucket_s": share * cost.exchange_s,
            "best_s": wait_free_s(cost, first, share),
        }

    def calibrated(self, times: int) -> Calibration:
        """Measures c and m at the link's current rate."""
        return Calibration.of(
            self.jobs, [self.measure(times=times, tax=False)], self.stage.lab.rate or ""
        )

    def rate(self, factor: float, at: Calibration) -> str:
        """Estimates the rate at which sum m = factor * sum c, and returns it in `tc`'s format."""
        costs = at.costs("float32")
        target = factor * sum(cost.compute_s for cost in costs)
        return f"{rate_for(target, costs, at.sent_bytes, at.rate_bits_per_s) / 1e6:.1f}mbit"

    def turn(self, rival: Rival, steps: int) -> dict[str, Any]:
        """Runs one repeat of one rival, and measures its c right before and right after.

        On a shared machine, c drifts within minutes, so a c from the calibration would be stale.
        `own_c_s` comes from these two measurements only. If the next rival uses the same processes
        in the same variant (e.g. `fused-k` after `fused`), it takes over the last measurement and
        doesn't warm up again. Otherwise, the processes rest first.
        """
        teams = self.teams[rival.team]
        if (rival.team, rival.variant) != self._warm:
            self.rest()
            self.prepare(rival)
            self._warm, self._computed = (rival.team, rival.variant), self._own_compute(teams)
        before = self._computed
        sample = self.run(rival, steps)
        after = self._computed = self._own_compute(teams)
        raw = [
            {"model": spec.model, "before": before[spec], "after": after[spec]} for spec in before
        ]
        sample = {**sample, "c_raw": raw}
        return {**sample, "own_c_s": pooled_c(self.jobs, [sample])}

    def rest(self) -> None:
        """Has the processes that ran last return memory to the kernel for those that run next."""
        if self._warm is not None and self._warm[0] in self.teams:
            self.stage.ask(self.teams[self._warm[0]], "rest")
        self._warm = None

    def _own_compute(self, teams: Sequence[Team]) -> dict[Spec, list[list[float]]]:
        found: dict[Spec, list[list[float]]] = {}
        for spec, number in self._distinct().items():
            # Either one process runs all jobs, or each job has its own process.
            team = teams[0] if len(teams) == 1 else teams[number]
            found[spec] = _raw(self.stage.ask(team, "compute", job=number, steps=3))
        return found

    def prepare(self, rival: Rival) -> None:
        """Runs a few steps, so that the steps after them neither compile nor allocate memory."""
        for team in self.teams[rival.team]:
            self.stage.ask(team, "prepare", variant=rival.variant)

    def run(self, rival: Rival, steps: int) -> dict[str, Any]:
        """Runs `steps` steps of each job, and checks that the expected bytes crossed the link.

        Raises:
            TeamError: Fewer bytes crossed the link than the rival's all-reduces need. So its ranks
                must have communicated in some other way, e.g. through shared memory.
        """
        teams, count = self.teams[rival.team], steps * len(self.jobs)
        together = rival.at_once or takes_all_jobs(rival.team)
        before, begin = self.stage.lab.bytes_crossed(), time.perf_counter()
        groups = [teams] if together else [[team] for team in teams]
        answers = [
            self.stage.ask(group, "run", steps=steps, variant=rival.variant) for group in groups
        ]
        seconds = time.perf_counter() - begin
        crossed = self.stage.lab.bytes_crossed() - before
        needed = steps * sum(
            needed_bytes(parameters(spec), rival.wire, RANKS) for spec in self.jobs
        )
        if crossed < needed:
            raise TeamError(
                f"rival `{rival.name}` sent {crossed / 1e6:.1f} MB over the link, its all-reduces "
                f"need {needed / 1e6:.1f} MB. Its ranks spoke another way, or did not exchange "
                "everything."
            )
        every = [answer for group in answers for answer in group]
        return {
            "s_per_job_step": seconds / count,
            "cpu_s": sum(a["cpu_s"] for a in every) / count,
            "wire_bytes": crossed / count,
            # If groups run one after the other, each could reuse the memory of the previous one, so
            # only the largest group counts. Processes of one group run at once.
            "peak_rss_bytes": max(_host_bytes(group) for group in answers),
            **{key: every[0][key] for key in INSIDE if key in every[0]},
        }


def pooled_c(jobs: Sequence[Spec], samples: Sequence[dict[str, Any]]) -> list[float]:
    """Returns each job's c, pooled over all these samples: the mean over ranks of the medians.

    Rivals of one framework run the same step. If one of their processes happened to compute more
    slowly, that's noise of the machine rather than a property of the rival.
    """
    kinds = list(dict.fromkeys(jobs))
    found = []
    for place in range(len(kinds)):
        each = [
            side
            for sample in samples
            for side in (sample["c_raw"][place][key] for key in ("before", "after"))
        ]
        found.append(
            _middle([[x for side in each for x in side[rank]] for rank in range(len(each[0]))])
        )
    return [found[kinds.index(spec)] for spec in jobs]


def _host_bytes(answers: Sequence[dict[str, Any]]) -> int:
    """Returns the memory of the host that uses more. Each rank has its own host, and the answers
    of a team are sorted by rank.
    """
    return max(sum(a["peak_rss_bytes"] for a in answers[rank::RANKS]) for rank in range(RANKS))


def _raw(answers: Sequence[dict[str, Any]], key: str = "raw") -> list[list[float]]:
    return [answer[key] for answer in answers]


def _joined(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates each rank's numbers from several measurements."""
    first = measured[0]
    return {
        name: [[x for once in measured for x in once[name][rank]] for rank in range(len(values))]
        if isinstance(values[0], list)
        else [x for once in measured for x in once[name]]
        for name, values in first.items()
    }


def _middle(raw: Sequence[Sequence[float]]) -> float:
    """Returns the mean over ranks of each rank's median."""
    return statistics.fmean(statistics.median(values) for values in raw)
