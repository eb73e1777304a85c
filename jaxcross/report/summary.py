"""A run's numbers: facts about each job, each job's timing, and the breakdown of the whole time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxcross._endings import JobStatus
from jaxcross.interleave import StepGraph
from jaxcross.report.slow_rank import SlowRank

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
"""The causes to which `period - bound` is attributed, in the order in which they're shown."""

BRIEF = 0.1
"""If we measured over less than this share of the run, we print a warning. Similarly, a set of jobs
that was together for less than this share of the time of another set is passed over in favour of
the other set.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What the runner knows about a job, apart from its spans.

    Attributes:
        name: The job's name.
        steps: Number of steps made in this run.
        examples_per_step: Number of examples per step, summed over all ranks; None if unknown.
        final_loss: The last loss that it logged.
        metrics: The last value of each other metric that it logged.
        how: Its final status: `ended`, `stopped early`, `stopped`, `failed` or `ejected`. Identical
            across ranks, and reached after step `last_step`.
        why: The reason, if it stopped early, failed or was ejected.
        skipped: How many of the `steps` left the state unchanged because they exchanged values that
            weren't finite.
        replicas: Whether all ranks ended with the same state: `equal`, `differ ...` with the first
            leaf that differs, or `not compared: ...` with the reason. Empty if there's only one
            rank, or if the job has no state.
        first_step: Number of steps made by earlier runs, if this run resumed from their checkpoint.
        unit: The unit of examples: `images` or `examples`.
        program: The program that most steps ran: `graph` (its segments), `steps` (how many steps
            ran it) and `memory` (how much memory it needs on rank 0 according to XLA, as
            `jaxcross.plan.JobMemory`). None if the job made no steps.
        left_over: Ranks with an unused batch. A loop ends on all ranks as soon as any rank runs out
            of data; by that time, these ranks had their next batch ready.
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
        """Whether the job's step exchanges values from the previous step.

        In a carried exchange, values are carried over from one step to the next and exchanged while
        that step computes. That way, the exchange can be hidden behind the job's own computation.
        """
        return self.program is not None and bool(StepGraph.from_data(self.program["graph"]).carried)

    @property
    def last_step(self) -> int:
        """The number of the job's last step, counting the steps of earlier runs."""
        return self.first_step + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTiming:
    """The timing of one job.

    All times are in seconds per step. If the job takes part in the round (one step of every job,
    measured while all of them are in steady state), they're averaged over the same part of the run
    as the round, which makes the jobs' times add up to the round's. Otherwise they're averaged over
    the job's own steady state.

    Attributes:
        facts: The facts from the runner.
        period_s: Time from the end of one step to the end of the next; 0 if the job made fewer than
            two steps.
        compute_s: Compute time per step, averaged over ranks.
        exchange_s: Exchange time per step, averaged over ranks, excluding waits for other ranks.
        hidden_share: Share of the job's exchange time (including waits) during which any job was
            computing on the same rank.
        bytes_per_step: Number of bytes that a rank hands to the wire per step, averaged over the
            whole run, not counting evaluations.
        steps_per_round: How many steps the job makes per round: 1 if all jobs made the same number
            of steps, 0 if this job takes no part in the round.
        other_calls: Number of calls that exchanged data but aren't steps, such as evaluations.
        bytes_per_other_call: Number of bytes that a rank hands to the wire per such call.
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
        """The job's steps per second; None if it made fewer than two steps."""
        return 1 / self.period_s if self.period_s else None

    @property
    def examples_per_s(self) -> float | None:
        """The job's examples per second.

        None if the job made fewer than two steps, or if the number of examples per step is unknown.
        """
        per_step = self.facts.examples_per_step
        return per_step / self.period_s if self.period_s and per_step is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """Where the time of a whole run went.

    A round is one step of every job, measured while all of them are in steady state at the same
    time. (If the policy runs the jobs one after the other, we add up their individual steps
    instead.) Some runs never get there, and then there's no round: `period_s`, `bound_s` and
    everything derived from them are None, and `lost_s` is empty.

    Attributes:
        jobs: The timing of each job.
        period_s: The measured length of a round on the slowest rank, i.e. the rank with the highest
            bound. Normally a round is one step of every job; when some jobs run faster than others,
            it's as many steps as there are jobs, in the proportion in which the jobs made them.
        bound_s: The shortest round that any ordering of the same work could achieve. It's max(sum
            c, sum m, max(c + m)), where c and m are each job's compute and exchange time per round,
            averaged over ranks. A job that overlaps with itself (e.g. because its backward pass is
            cut into several exchanges) has a correspondingly shorter c + m. None if there's no
            round, or if a job in the round trains with a parameter server: we only see each of its
            steps as a whole, so the bound would equal the round.
        bottleneck: The largest of the three terms, which sets the bound: `compute`, `exchange` or
            `chain` (the longest critical path of a job). "" if there's no bound.
        lost_s: The time `period_s - bound_s`, broken down by the causes in `LOST_TIME`. The values
            are never negative, and add up to the difference.
        input_share: For each storage level, the share of the jobs' waiting for batches that it
            caused. The rest was spent waiting for batches to be prepared.
        hidden_share: Share of all jobs' exchange time during which any job was computing on the
            same rank.
        rounds: Number of rounds measured on the slowest rank.
        in_turn: Whether the policy ran the jobs one after the other.
        steady_share: Share of the run over which the round was measured.
        shared_share: Share of the run during which at least two jobs were at work or compiling.
        start_up_s: Seconds of the run during which no job was in steady state, because jobs were
            still compiling, making their first steps or winding up.
        wall_s: Seconds of the whole run on the rank that took longest.
        slow_rank: The rank or ranks that hold up the others. None if there are none: all ranks are
            about equally fast, or a different rank is late from one exchange to the next, or they
            cost less than a twentieth of the time.
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
    slow_rank: SlowRank | None = None

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
        """Examples per second of all jobs together; None if any is unknown or the units differ."""
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
