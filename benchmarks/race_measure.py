"""What a race asks of its teams: calibration at a rate, and runs of rivals in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from race_bounds import Cost, bits_a_second, needed_bytes, rate_for
from rivals.cases import RANKS, Rival, Spec, jobs_of, parameters
from rivals.teams import Stage, Team

NARROW = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs of the case's jobs at one rate.

    Attributes:
        costs: Framework and wire -> one cost a job.
        sent_bytes: One direction of each job's float32 exchange, headers included.
        taxed_exchange_s: m beside a computing step.
        raw: All that was measured.
    """

    costs: dict[tuple[str, str], list[Cost]]
    sent_bytes: list[float]
    taxed_exchange_s: list[float]
    raw: dict[str, Any]


@dataclass
class Entrants:
    """A case's teams on a stage, and what it costs them to get ready."""

    stage: Stage
    case: str
    smoke: bool
    rivals: list[Rival]
    teams: dict[str, list[Team]] = field(default_factory=dict)
    start_up: dict[str, Any] = field(default_factory=dict)

    @property
    def jobs(self) -> tuple[Spec, ...]:
        return jobs_of(self.case, self.smoke)

    def start(self, kind: str) -> None:
        """Starts the processes of one kind of team, one after the other, and compiles what their rivals run."""
        numbers: list[int | None] = [None] if kind == "crossed" else list(range(len(self.jobs)))
        begin = time.perf_counter()
        teams = [self.stage.start(kind, self.case, job=n, smoke=self.smoke) for n in numbers]
        started = time.perf_counter()
        variants = dict.fromkeys(r.variant for r in self.rivals if r.team == kind)
        answers: list[dict[str, Any]] = []
        for variant in variants or {"plain" if kind == "fused" else "sequential": None}:
            answers = [a for team in teams for a in self.stage.ask(team, "prepare", variant=variant)]
        self.teams[kind] = teams
        self.start_up[kind] = {
            "start_s": started - begin, "prepare_s": time.perf_counter() - started,
            "idle_rss_bytes": sum(a["idle_rss_bytes"] for a in answers),
            **{key: sum(a.get(key, 0) for a in answers) / RANKS for key in ("compilations", "compile_s")},
        }  # fmt: skip

    def calibrate(self, *, times: int, tax: bool = True) -> Calibration:
        """Measures c, m and the tax of each distinct job, one at a time. The link keeps its rate."""
        ask, jobs = self.stage.ask, self.jobs
        crossed = self.teams["crossed"][0]
        ask(crossed, "forget_cuts")
        narrow = any(r.wire == NARROW for r in self.rivals)
        known: dict[Spec, dict[str, Any]] = {}
        for number, spec in enumerate(jobs):
            if spec in known:
                continue
            raw: dict[str, Any] = known.setdefault(spec, {"model": spec.model})
            raw["c_jax"] = _raw(ask(self.teams["fused"][number], "compute", steps=times))
            if "ddp" in self.teams:
                raw["c_torch"] = _raw(ask(self.teams["ddp"][number], "compute", steps=times))
            before = self.stage.lab.bytes_crossed()
            raw["m_float32"] = _raw(ask(crossed, "exchange", job=number, times=times, wire="float32"))
            sent = self.stage.lab.bytes_crossed() - before
            raw["sent_bytes"] = sent / RANKS / (times + 1)
            if narrow:
                raw[f"m_{NARROW}"] = _raw(ask(crossed, "exchange", job=number, times=times, wire=NARROW))
            if tax:
                c, m = _middle(raw["c_jax"]), _middle(raw["m_float32"])
                exchanges = max(3, math.ceil(4 * c / m))
                answers = ask(crossed, "taxed", job=number, exchanges=min(exchanges, 200))
                raw.update({name: _raw(answers, name) for name in ("taxed_c", "taxed_m", "tax")})
        per_job = [known[spec] for spec in jobs]
        costs = {
            (framework, wire): [
                Cost(compute_s=_middle(raw[f"c_{framework}"]), exchange_s=_middle(raw[f"m_{wire}"]),
                     tax_s=_middle(raw["tax"]) if tax else 0.0)
                for raw in per_job
            ]
            for framework in ("jax", "torch") if f"c_{framework}" in per_job[0]
            for wire in ("float32", NARROW) if f"m_{wire}" in per_job[0]
        }  # fmt: skip
        return Calibration(
            costs=costs,
            sent_bytes=[raw["sent_bytes"] for raw in per_job],
            taxed_exchange_s=[_middle(raw["taxed_m"]) for raw in per_job] if tax else [],
            raw={str(number): raw for number, raw in enumerate(known.values())},
        )

    def wait_free(self, cost: Cost) -> dict[str, Any]:
        """What a job that overlaps with itself could reach: its first bucket, then the wire; or c, then its last one.

        The number of exchange segments is the one that `cut="auto"` found at this rate.
        """
        answers = self.stage.ask(self.teams["crossed"][0], "buckets", wire="float32")
        first, sent = _middle(_raw(answers, "first_raw")), answers[0]["sent"]
        last = cost.exchange_s * sent[-1] / sum(sent)
        return {
            "pieces": len(sent), "first_bucket_s": first, "last_bucket_s": last,
            "best_s": max(first + cost.exchange_s, cost.compute_s + last),
        }  # fmt: skip

    def rate(self, factor: float, calibration: Calibration) -> str:
        """The rate at which sum m = factor * sum c, as `tc` spells it."""
        costs = calibration.costs["jax", "float32"]
        reference = bits_a_second(self.stage.lab.rate or "")
        target = factor * sum(cost.compute_s for cost in costs)
        return f"{rate_for(target, costs, calibration.sent_bytes, reference) / 1e6:.1f}mbit"

    def run(self, rival: Rival, steps: int) -> dict[str, Any]:
        """One repeat of one rival: `steps` steps of each job, by one command. Checks that its bytes crossed the link.

        Raises:
            RuntimeError: Fewer bytes crossed than the rival's all-reduces need: it did not use the link.
        """
        teams, count = self.teams[rival.team], steps * len(self.jobs)
        for team in teams:
            self.stage.ask(team, "prepare", variant=rival.variant)
        together = rival.at_once or rival.team == "crossed"
        before, begin = self.stage.lab.bytes_crossed(), time.perf_counter()
        groups = [teams] if together else [[team] for team in teams]
        answers = [self.stage.ask(group, "run", steps=steps, variant=rival.variant) for group in groups]
        seconds = time.perf_counter() - begin
        crossed = self.stage.lab.bytes_crossed() - before
        needed = steps * sum(needed_bytes(parameters(spec), rival.wire, RANKS) for spec in self.jobs)
        if crossed < needed:
            raise RuntimeError(
                f"rival `{rival.name}` sent {crossed / 1e6:.1f} MB over the link, its all-reduces need "
                f"{needed / 1e6:.1f} MB. Its ranks spoke another way, or did not exchange everything."
            )
        every = [answer for group in answers for answer in group]
        return {
            "s_per_job_step": seconds / count,
            "cpu_s": sum(a["cpu_s"] for a in every) / count,
            "wire_bytes": crossed / count,
            # one after the other, a process could hand its memory to the next; at once, all of them have theirs
            "peak_rss_bytes": max(_host_bytes(group) for group in answers),
            **{key: every[0][key] for key in ("steady_s_per_job_step", "hidden_share", "account") if key in every[0]},
        }


def _host_bytes(answers: Sequence[dict[str, Any]]) -> int:
    """The fuller host's processes: answers come rank by rank, and each rank has its own host."""
    return max(sum(a["peak_rss_bytes"] for a in answers[rank::RANKS]) for rank in range(RANKS))


def _raw(answers: Sequence[dict[str, Any]], key: str = "raw") -> list[list[float]]:
    return [answer[key] for answer in answers]


def _middle(raw: Sequence[Sequence[float]]) -> float:
    """Mean over ranks of each rank's median."""
    return statistics.fmean(statistics.median(values) for values in raw)
