"""The numbers of a run: facts about each job, its timing, and the breakdown of the whole time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxcross._endings import JobStatus
from jaxcross.interleave import StepGraph

LOST_TIME = {
    "dispatch": "work was ready, its lane idle",
    "peer": "an exchange or a vote waited for another rank",
    "imbalance": "one rank computes longer than the mean",
    "votes": "agreeing on the next steps",
    "order": "the lane's next work hung on the other lane or on another job",
    "input": "a job waited for its next batch",
    "host": "a job was compiling, saving, or in other work on the host",
    "other": "not explained by the spans",
}
"""The named parts of `period - bound`, in the order in which they are shown."""

BRIEF = 0.1
"""Share of a run below which a measured part needs a warning, and share of the longest stretch
below which a set of jobs gives way to another set.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """Facts about a job that the runner knows in addition to its spans.

    Attributes:
        name: The job's name.
        steps: Number of steps that it made in this run.
        examples_per_step: Examples that all ranks together use per step; None if unknown.
        final_loss: The last loss that it logged.
        metrics: Last values of everything else that it logged.
        how: Its final status: `ended`, `stopped early`, `stopped`, `failed` or `ejected`, on all
            ranks after step `last_step`.
        why: The reason, if it stopped early, failed or was ejected.
        skipped: How many of `steps` kept the state, because the values that they exchanged weren't
            finite.
        replicas: Whether all ranks ended with the same state: `equal`, `differ ...` with the first
            leaf that differs, or `not compared: ...` with the reason. Empty for a single rank, and
            for jobs without a state.
        first_step: Number of steps of earlier runs that this run resumed from.
        unit: The unit of examples: `images` or `examples`.
        program: The program that most steps ran: `graph` (its segments), `steps` (how many ran it)
            and its `memory` on rank 0 by XLA's figures (`jaxcross.plan.JobMemory`). None without
            steps.
        left_over: Ranks that had a batch ready when a loop ended because another rank's data had
            ended. That batch was not used.
    """

    name: str
    steps: int
    examples_per_step: float | None = None
    final_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    how: str = JobStatus.ENDED
    why: str = ""
    skipped: int = 0
    replicas: str = ""
    first_step: int = 0
    unit: str = "examples"
    program: Mapping[str, Any] | None = field(default=None, repr=False)
    left_over: tuple[int, ...] = ()

    @property
    def is_carried(self) -> bool:
        """Whether the program carries an exchange: it exchanges the previous step's values.

        A step of such a program computes at the same time.
        """
        return self.program is not None and bool(StepGraph.from_data(self.program["graph"]).carried)

    @property
    def last_step(self) -> int:
        """The job's last step, counting those of earlier runs."""
        return self.first_step + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTiming:
    """One job's share of a run.

    Seconds are per step, measured over the same steps as the round. If there is no round, or the
    job takes no part in it, they are measured over the job's own steady state.

    Attributes:
        facts: The facts from the runner.
        period_s: From the end of one step to the end of the next; 0 if the job made fewer than two
            steps.
        compute_s: Compute time per step, averaged over ranks.
        exchange_s: Exchange time per step, without waiting for other ranks.
        hidden_share: Share of its exchange time (including waiting) during which any job computed
            on the same rank.
        bytes_per_step: Bytes that one rank hands to the wire per step, over the whole run, without
            those of evaluations.
        steps_per_round: Number of its steps per round: 1 if all jobs made the same number of steps,
            0 if it takes no part in the round.
        other_calls: Number of its calls that exchange but aren't steps, such as evaluations.
        bytes_per_other_call: Bytes that one rank hands to the wire per such call.
    """

    facts: JobSummary
    period_s: float
    compute_s: float
    exchange_s: float
    hidden_share: float
    bytes_per_step: float
    steps_per_round: float
    other_calls: int = 0
    bytes_per_other_call: float = 0.0

    @property
    def steps_per_s(self) -> float | None:
        """Its steps per second; None if it made fewer than two steps."""
        return 1 / self.period_s if self.period_s else None

    @property
    def examples_per_s(self) -> float | None:
        """Its examples per second; None also if the number of examples per step is unknown."""
        per_step = self.facts.examples_per_step
        return per_step / self.period_s if self.period_s and per_step is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """The breakdown of the time of a whole run.

    If the jobs were never in steady state together, there is no round: `period_s`, `bound_s` and
    everything that follows from them are None, and `lost_s` is empty.

    Attributes:
        jobs: The timing of each job.
        period_s: T, the measured length of a round on the rank that decides it. A round is one step
            of every job. If jobs progress at unequal rates, it has as many steps as there are jobs,
            in the proportion in which the jobs made them.
        bound_s: max(sum c, sum m, max(c + m)) of the measured means: no order of the same work is
            faster. If a job overlaps with itself (a backward pass cut into several exchanges), its
            c + m is shorter accordingly. None also if a job of the round trains with a parameter
            server, because the job's step is its own bound.
        bottleneck: The term that sets the bound: `compute`, `exchange` or `chain` (a critical
            path); "" without a round.
        lost_s: `period_s - bound_s` by cause. Its keys are those of `LOST_TIME`. No value is
            negative, and the values add up to the difference.
        input_share: How the jobs' waiting for batches is divided among the levels of storage that
            caused it. The rest is preparing the batches.
        hidden_share: Share of all jobs' exchange time that was covered by computation.
        rounds: Number of measured rounds on that rank.
        in_turn: Whether the round consists of jobs that ran one after the other because of their
            policy.
        steady_share: Share of the run that was measured.
        shared_share: Share of the run in which at least two jobs were at work, including compiling.
        start_up_s: Seconds of the run in which no job was in its steady state: compiling, first
            steps, winding up.
        wall_s: Seconds of the whole run on the rank that took longest.
    """

    jobs: tuple[JobTiming, ...] = field(repr=False)
    period_s: float | None
    bound_s: float | None
    bottleneck: str
    lost_s: Mapping[str, float]
    input_share: Mapping[str, float]
    hidden_share: float
    rounds: float
    in_turn: bool
    steady_share: float
    shared_share: float
    start_up_s: float
    wall_s: float

    @property
    def crossed(self) -> tuple[JobTiming, ...]:
        """The jobs that take part in the round."""
        return tuple(job for job in self.jobs if job.steps_per_round)

    @property
    def efficiency(self) -> float | None:
        return self.bound_s / self.period_s if self.period_s and self.bound_s is not None else None

    @property
    def s_per_step(self) -> float | None:
        """Seconds per job-step: the length of a round divided by its number of steps."""
        return self.period_s / len(self.crossed) if self.period_s is not None else None

    @property
    def compute_s(self) -> float:
        """Compute time per round."""
        return sum(job.compute_s * job.steps_per_round for job in self.jobs)

    @property
    def exchange_s(self) -> float:
        """Exchange time per round."""
        return sum(job.exchange_s * job.steps_per_round for job in self.jobs)

    @property
    def examples_per_s(self) -> float | None:
        """Examples per second of all jobs; None if one is unknown or their units differ."""
        per_step = [job.facts.examples_per_step for job in self.crossed]
        known = [n for n in per_step if n is not None]
        if (
            not self.period_s
            or len(known) < len(per_step)
            or len({job.facts.unit for job in self.crossed}) != 1
        ):
            return None
        return (
            sum(n * job.steps_per_round for n, job in zip(known, self.crossed, strict=True))
            / self.period_s
        )
