"""The numbers of a run: what the runner says of a job, what the spans say of it, and the account of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOSSES = {
    "dispatch": "work was ready, its lane idle",
    "peer": "exchange waited for another rank",
    "imbalance": "one rank computes longer than the mean",
    "votes": "agreeing on the next steps",
    "order": "the lane's next work hung on the other lane or on another job",
    "input": "a job waited for its next batch",
    "other": "not explained by the spans",
}
"""The named parts of `period - bound`, in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the runner knows of a job beside its spans.

    Attributes:
        name: The job's name.
        steps: Steps that it did in this run.
        examples_per_step: Examples that all ranks together use in a step; None if unknown.
        final_loss: The last loss that it logged.
        metrics: Last values of whatever else it logged.
        how: How it left: `ended`, `stopped`, `failed` or `ejected`, on all ranks after `steps` steps.
        why: The reason, if it failed or was ejected.
        skipped: Steps among `steps` that kept the state, because what they exchanged was not finite.
        replicas: Whether all ranks ended with the same state: `equal`, `differ ...` with the first leaf, `not compared:
            ...` with the reason; empty for one rank, and for jobs without a state.
    """

    name: str
    steps: int
    examples_per_step: float | None = None
    final_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    how: str = "ended"
    why: str = ""
    skipped: int = 0
    replicas: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAccount:
    """One job's share of a run. Seconds are a step's, in the steady state.

    Attributes:
        facts: What the runner said of it.
        period_s: From the end of one step to the end of its next, while it ran.
        compute_s: Compute time of a step, mean over ranks.
        exchange_s: Exchange time of a step without waiting for peers.
        hidden_share: Share of its exchange time (waiting included) during which some job computed on the same rank.
        bytes_per_step: Bytes that one rank hands to the wire in a step.
    """

    facts: JobFacts
    period_s: float
    compute_s: float
    exchange_s: float
    hidden_share: float
    bytes_per_step: float

    @property
    def steps_per_s(self) -> float:
        return 1 / self.period_s if self.period_s else 0.0

    @property
    def examples_per_s(self) -> float | None:
        return None if self.facts.examples_per_step is None else self.facts.examples_per_step * self.steps_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The whole run.

    Attributes:
        jobs: One account a job.
        period_s: T, the measured length of a round on the rank that decides it.
        bound_s: max(sum c, sum m, max(c + m)) of the measured means: no order of the same work is faster. What a
            job overlaps with itself (a backward pass cut into several exchanges) shortens its c + m.
        limit: Which of the three terms it is: `compute`, `exchange` or `chain`.
        lost_s: `period_s - bound_s` by cause; keys of `LOSSES`, and the values sum to the difference.
        start_up_s: Seconds of the run outside the steady state: compiling, first steps, winding up.
        wall_s: Seconds of the whole run on the rank that took longest.
    """

    jobs: tuple[JobAccount, ...]
    period_s: float
    bound_s: float
    limit: str
    lost_s: Mapping[str, float]
    start_up_s: float
    wall_s: float

    @property
    def efficiency(self) -> float:
        return self.bound_s / self.period_s if self.period_s else 0.0

    @property
    def s_per_step(self) -> float:
        """Seconds a job-step: the round divided by its jobs."""
        return self.period_s / len(self.jobs) if self.jobs else 0.0

    @property
    def hidden_share(self) -> float:
        """Share of all jobs' exchange time that compute covered."""
        weights = [job.exchange_s * job.facts.steps for job in self.jobs]
        return sum(w * job.hidden_share for w, job in zip(weights, self.jobs, strict=True)) / (sum(weights) or 1)

    @property
    def examples_per_s(self) -> float | None:
        per_step = [job.facts.examples_per_step for job in self.jobs]
        known = [n for n in per_step if n is not None]
        return sum(known) / self.period_s if known and len(known) == len(per_step) and self.period_s else None
