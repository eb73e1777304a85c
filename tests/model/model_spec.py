"""What must hold on one rank of a model, in words of its own: it hears events and instructions,
never the interleaver.

`check_lanes` states what the interleaver believes of itself; a belief can be consistent and wrong.
Here is written down once more, from outside, what a job may count on: every step's exchanges in
their order, nothing before its inputs, nothing that overwrites a step's input state before all
ranks have said that the step is good, nothing after the end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.step_graph import StepGraph


@dataclass(slots=True)
class SpecCall:
    """One call of a step, as seen from outside."""

    graph: StepGraph
    issued: set[int] = field(default_factory=set)
    exchanged: list[int] = field(default_factory=list)
    infinite: bool = False  # this rank has found values that are not finite, and keeps the state
    doomed: bool = False  # some rank had failed when the vote on it was cast
    committed: bool = False
    skipped: bool = False  # by whichever rank's finding
    told: bool = False  # that it is skipped
    number: int = 0
    broken: bool = False  # a segment of it failed

    @property
    def done(self) -> set[int]:
        return self.issued | set(self.exchanged)

    @property
    def overwrites(self) -> bool:
        """Whether the state before it may be gone, and the one after it is still to come."""
        return not self.broken and (
            self.committed or (bool(self.issued) and not self.graph.collectives)
        )


class Spec:
    """The rules for one rank.

    Attributes:
        names: Of the jobs that joined during the run.
        steps: Committed steps of each job, of those that have left, too.
        ahead: Steps of each job since, which exchanged nothing.
        finished: How each job that has left did so, with what the ranks said of it.
        failed: Jobs of which something failed on this rank before they left.
        behind: Jobs without which no other may make a step: they have called none, and are not
            over.
    """

    __slots__ = (
        "ahead",
        "behind",
        "calls",
        "failed",
        "finished",
        "names",
        "paused",
        "prepared",
        "steps",
    )

    def __init__(self, jobs: int, *, together: bool = False) -> None:
        self.behind = set(range(jobs)) if together else set[int]()
        self.names: dict[int, str] = {}
        self.steps = dict.fromkeys(range(jobs), 0)
        self.ahead: dict[int, int] = {}
        self.finished: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.failed: set[int] = set()
        self.calls: dict[int, SpecCall] = {}
        self.paused: dict[
            int, int
        ] = {}  # jobs that are, and how many steps they may have made at most
        self.prepared: dict[tuple[int, int], int] = {}

    @property
    def shared(self) -> tuple[object, ...]:
        """What all ranks must agree on wherever they meet, and at the end."""
        jobs = [
            (self.names.get(job, job), n, self.finished.get(job)) for job, n in self.steps.items()
        ]
        return tuple(jobs), tuple(self.paused)

    def happened(self, event: m.Event) -> None:
        """To be told of every event before the interleaver is."""
        match event:
            case m.StepCalled(job, graph):
                self.calls[job] = SpecCall(graph)
                if graph.is_step:
                    self.behind.discard(job)
            case m.StartExcused(job):
                self.behind.clear()  # the other ranks may know of it before this one does
            case m.SegmentFailed(job) | m.JobRaised(job) if job not in self.finished:
                self.failed.add(job)
                if isinstance(event, m.SegmentFailed) and (call := self.calls.get(job)) is not None:
                    call.broken |= call.number == event.call
            case m.BatchPrepared(job, stream, count):
                self.prepared[job, stream] = count
            case m.ExchangeDone(job, segment, finite):
                call = self.call(job)
                call.exchanged.append(segment)
                call.infinite |= not finite
            case _:
                pass

    @property
    def infinite(self) -> frozenset[int]:
        """Jobs in whose step this rank has found values that are not finite."""
        return frozenset(job for job, call in self.calls.items() if call.infinite)

    def voted(self, failed: Collection[int], infinite: Collection[int]) -> None:
        """A vote is over that decides on the steps that are through.

        Args:
            failed: Jobs that some rank had seen fail when it cast its ballot.
            infinite: Jobs in whose step some rank had found values that are not finite.
        """
        self.behind -= {*failed}
        for job, call in self.calls.items():
            if call.committed or call.doomed or job in self.finished:
                continue
            if call.graph.collectives and len(call.exchanged) == len(call.graph.collectives):
                call.doomed = job in failed
                call.committed = not call.doomed
                call.skipped = job in infinite
                if call.committed:
                    self.steps[job] += self.ahead.pop(job, 0) + 1
            if self.steps[job] > self.paused.get(job, self.steps[job]):
                raise InternalError(f"job {job} makes steps while it is paused")

    def told(self, instruction: m.Instruction) -> None:
        """To be told of every instruction.

        Raises:
            InternalError: It breaks a rule.
        """
        match instruction:
            case m.Dispatch(job, number, _, segment):
                call = self.call(job)
                self._must(
                    job not in self.failed or call.overwrites,
                    instruction,
                    "its job has failed here",
                )
                call.number = number
                self._must(segment not in call.issued, instruction, "it was dispatched before")
                early = call.graph.is_step and bool(self.behind)
                self._must(
                    not early,
                    instruction,
                    f"it is of a step, and jobs {self.behind} have not come to theirs",
                )
                self._must(call.graph.kinds[segment] == "compute", instruction, "it is an exchange")
                self._must(
                    set(call.graph.needs[segment]) <= call.done,
                    instruction,
                    "its inputs are not there",
                )
                early = segment in call.graph.after_commit and not call.committed
                self._must(
                    not early,
                    instruction,
                    "it overwrites the state of a step that is not committed",
                )
                kept = segment in call.graph.after_commit and call.skipped != call.told
                self._must(
                    not kept,
                    instruction,
                    f"its step is skipped: {call.skipped}, but told so: {call.told}",
                )
                call.issued.add(segment)
            case m.RunExchange(job, _, step, segment, zero):
                call = self.call(job)
                order = call.graph.collectives
                at = len(call.exchanged)
                self._must(
                    at < len(order) and segment == order[at],
                    instruction,
                    f"exchange {at} of {order} is next",
                )
                made = self.steps[job] + self.ahead.get(job, 0)
                self._must(step == made + 1, instruction, f"{made} steps are made")
                self._must(
                    zero == (job in self.failed),
                    instruction,
                    "zeros are for a job that has failed here",
                )
                ready = zero or set(call.graph.needs[segment]) <= call.done
                self._must(ready, instruction, "its inputs are not there")
            case m.SkipStep(job):
                self.call(job).told = True
            case m.StepReturned(job, step, skipped):
                call = self.call(job)
                self._must(
                    skipped == call.skipped, instruction, f"its step is skipped: {call.skipped}"
                )
                self._must(
                    len(call.done) == len(call.graph.kinds), instruction, "segments are missing"
                )
                self._must(
                    call.committed or not call.graph.collectives, instruction, "it is not committed"
                )
                self.ahead[job] = self.ahead.get(job, 0) + call.graph.local_step
                made = self.steps[job] + self.ahead[job]
                self._must(step == made, instruction, f"{made} steps are made")
                del self.calls[job]
            case m.JobFinished(job, how, step, texts):
                self._must(job not in self.finished, instruction, "it was over before")
                common = self.steps[job] + (
                    self.ahead.get(job, 0) if how in ("ended", "stopped") else 0
                )
                self._must(step == common, instruction, f"{common} steps are common to all ranks")
                self.steps[job] = common
                self.ahead.pop(job, None)
                call = self.calls.get(job)
                self._must(
                    call is None or not call.overwrites,
                    instruction,
                    "its state is being overwritten here",
                )
                self.finished[job] = (how, texts)
                self.behind.discard(job)
                self.failed.discard(job)
                self.paused.pop(job, None)
            case m.Raised(job):
                self._must(job in self.finished, instruction, "its job goes on")
                self.calls.pop(job, None)
            case m.JobJoined(job, name):
                self._must(job not in self.steps, instruction, "that job was there before")
                self._must(
                    name not in self.names.values(), instruction, "that job has joined before"
                )
                self.names[job], self.steps[job] = name, 0
            case m.JobPaused(job, paused):
                self._must(paused != (job in self.paused), instruction, "so it was before")
                if paused:
                    self.paused[job] = self.steps[job] + 1  # what was admitted is made
                else:
                    del self.paused[job]
            case _:
                pass

    def granted(self, job: int, stream: int, index: int) -> None:
        """A batch was granted to the job's thread."""
        have = self.prepared.get((job, stream), 0)
        if index >= have:
            raise InternalError(
                f"batch {index} of job {job} was granted, but this rank has prepared {have}"
            )

    def call(self, job: int) -> SpecCall:
        """The call that the job is in."""
        call = self.calls.get(job)
        if job in self.finished:
            raise InternalError(f"something was asked of job {job}, which is over")
        if call is None:
            raise InternalError(f"something was asked of job {job}, which has called no step")
        return call

    @staticmethod
    def _must(holds: bool, instruction: m.Instruction, why: str) -> None:
        if not holds:
            raise InternalError(f"{instruction!r} breaks a rule: {why}")
