"""The numbers of a run: facts about each job, its timing, and the breakdown of the whole time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxcross.interleave.instrument import Span
from jaxcross.interleave.step_graph import StepGraph

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
"""Share of a run below which what is measured needs a warning, and of a set of jobs' time together,
another set's.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """Facts about a job that the runner knows in addition to its spans.

    Attributes:
        name: The job's name.
        steps: Steps that it did in this run.
        examples_per_step: Examples that all ranks together use in a step; None if unknown.
        final_loss: The last loss that it logged.
        metrics: Last values of everything else that it logged.
        how: Its final status: `ended`, `stopped early`, `stopped`, `failed` or `ejected`, on all
            ranks after step `last_step`.
        why: The reason, if it stopped early, failed or was ejected.
        skipped: Steps among `steps` that kept the state, because what they exchanged was not
            finite.
        replicas: Whether all ranks ended with the same state: `equal`, `differ ...` with the first
            leaf, `not compared: ...` with the reason; empty for one rank, and for jobs without a
            state.
        first_step: Steps that earlier runs did, which this one resumed from.
        unit: The unit of examples: `images` or `examples`.
        program: The program that most of the steps ran: `graph` (its segments), `steps` that ran
            it, and its `memory` on rank 0 by XLA's figures (`jaxcross.plan.JobMemory`). None
            without steps.
        left_over: Ranks that had a batch ready when a loop ended with another rank's data; the
            batch was not used.
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
    first_step: int = 0
    unit: str = "examples"
    program: Mapping[str, Any] | None = field(default=None, repr=False)
    left_over: tuple[int, ...] = ()

    @property
    def is_carried(self) -> bool:
        """Whether the program carries an exchange: it exchanges what the step before has left,
        while it computes.
        """
        return self.program is not None and bool(StepGraph.from_data(self.program["graph"]).carried)

    @property
    def last_step(self) -> int:
        """The job's last step, those of earlier runs counted."""
        return self.first_step + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTiming:
    """One job's share of a run. Seconds are per step, over the steps that the round is measured on;
    where there is no round, or the job has no part in it, over the job's own steady state.

    Attributes:
        facts: The facts from the runner.
        period_s: From the end of one step to the end of its next; 0 if it did not make two.
        compute_s: Compute time of a step, mean over ranks.
        exchange_s: Exchange time of a step without waiting for other ranks.
        hidden_share: Share of its exchange time (waiting included) during which some job computed
            on the same rank.
        bytes_per_step: Bytes that one rank hands to the wire in a step, over the whole run; none of
            evaluations.
        steps_per_round: Steps of it in a round: 1 where all jobs made equally many, 0 if it has no
            part in the round.
        other_calls: Number of its calls that exchange and are not steps, such as evaluations.
        bytes_per_other_call: Bytes that one rank hands to the wire in one of those.
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
        """None if it did not make two steps."""
        return 1 / self.period_s if self.period_s else None

    @property
    def examples_per_s(self) -> float | None:
        """None also where the number in a step is not known."""
        per_step = self.facts.examples_per_step
        return per_step / self.period_s if self.period_s and per_step is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """The whole run. Where the jobs were never in steady state together there is no round:
    `period_s`, `bound_s` and what follows from them are None, and nothing is lost.

    Attributes:
        jobs: The timing of each job.
        period_s: T, the measured length of a round on the rank that decides it. A round is one step
            of every job; of jobs that go at unequal rates, as many steps in all, in the proportion
            in which they made them.
        bound_s: max(sum c, sum m, max(c + m)) of the measured means: no order of the same work is
            faster. What a job overlaps with itself (a backward pass cut into several exchanges)
            shortens its c + m. None also where a job of the round trains by a parameter server: its
            step is its own bound.
        bottleneck: The term that is the bound: `compute`, `exchange` or `chain` (a critical path);
            "" without a round.
        lost_s: `period_s - bound_s` by cause; keys of `LOST_TIME`, none negative, and the values
            sum to the difference.
        input_share: Share of the jobs' waiting for batches, by the level of storage that held them
            up; the rest is preparing them.
        hidden_share: Share of all jobs' exchange time that compute covered.
        rounds: Number of rounds that were measured, on that rank.
        in_turn: Whether the round is made of jobs that ran one after the other, because their
            policy was to.
        steady_share: Share of the run that was measured.
        shared_share: Share of the run in which at least two jobs were at work, compiling included.
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
        """The jobs that have a part in the round."""
        return tuple(job for job in self.jobs if job.steps_per_round)

    @property
    def efficiency(self) -> float | None:
        return self.bound_s / self.period_s if self.period_s and self.bound_s is not None else None

    @property
    def s_per_step(self) -> float | None:
        """Seconds a job-step: the round divided by its steps."""
        return self.period_s / len(self.crossed) if self.period_s is not None else None

    @property
    def compute_s(self) -> float:
        """Compute time of a round."""
        return sum(job.compute_s * job.steps_per_round for job in self.jobs)

    @property
    def exchange_s(self) -> float:
        """Exchange time of a round."""
        return sum(job.exchange_s * job.steps_per_round for job in self.jobs)

    @property
    def examples_per_s(self) -> float | None:
        """Examples of all jobs together; None if not known for each of them, or if their units
        differ.
        """
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


class RunData(Protocol):
    """The data of a finished run, as the renderers read them. `Report` is the implementation."""

    @property
    def spans(self) -> tuple[Span, ...]: ...
    @property
    def jobs(self) -> tuple[JobSummary, ...]: ...
    @property
    def wall_ns(self) -> Mapping[int, tuple[int, int]]: ...
    @property
    def policy(self) -> str: ...
    @property
    def placement(self) -> str: ...
    @property
    def link(self) -> str: ...
    @property
    def dropped(self) -> int: ...
    @property
    def fusion(self) -> tuple[str, ...]: ...
    @property
    def rounds(self) -> TimeBreakdown: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
