"""The rules that must hold on one rank of a model, stated independently of the interleaver.

`Spec` receives events and instructions, and never looks into the interleaver. `check_lanes` checks
that the interleaver's own state is consistent, but a consistent state can still be wrong. So this
module states once more, from outside, what a job may rely on: each step's exchanges come in order,
nothing runs before its inputs exist, nothing overwrites a step's input state before all ranks have
voted that the step is good, and nothing happens to a job after its end.
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
    infinite: bool = False  # this rank found non-finite values, and will skip the step
    doomed: bool = False  # some rank had failed when the vote on this call was cast
    committed: bool = False
    skipped: bool = False  # some rank found non-finite values
    must_skip: bool = False  # this rank was instructed to skip it
    number: int = 0
    broken: bool = False  # one of its segments failed on this rank

    @property
    def done(self) -> set[int]:
        return self.issued | set(self.exchanged)

    @property
    def overwrites(self) -> bool:
        """Whether the input state may already be overwritten while the new state is incomplete."""
        return not self.broken and (
            self.committed or (bool(self.issued) and not self.graph.collectives)
        )


class Spec:
    """The rules for one rank.

    Attributes:
        names: Names of the jobs that joined during the run.
        steps: Each job's committed steps, including jobs that have left.
        ahead: Each job's steps since its last commit. These steps exchanged nothing.
        finished: For each job that has left, how it ended and the texts that the ranks compared.
        failed: Jobs that have failed on this rank but haven't left yet.
        behind: Jobs that have neither called a step nor ended. While there are any, no job may make
            a step.
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
        # By paused job: the largest number of steps that it may have made.
        self.paused: dict[int, int] = {}
        self.prepared: dict[tuple[int, int], int] = {}

    @property
    def shared(self) -> tuple[object, ...]:
        """The state that must be identical on all ranks whenever they meet, and at the end."""
        jobs = [
            (self.names.get(job, job), n, self.finished.get(job)) for job, n in self.steps.items()
        ]
        return tuple(jobs), tuple(self.paused)

    def happened(self, event: m.Event) -> None:
        """Records an event. Must be called before the interleaver handles the event."""
        match event:
            case m.StepCalled(job, graph):
                self.calls[job] = SpecCall(graph)
                if graph.is_step:
                    self.behind.discard(job)
            case m.StartExcused(job):
                self.behind.clear()  # the other ranks may learn of it before this one does
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
        """Jobs in whose step this rank found non-finite values."""
        return frozenset(job for job, call in self.calls.items() if call.infinite)

    def voted(self, failed: Collection[int], infinite: Collection[int]) -> None:
        """Records the result of a vote, which decides on all steps whose exchanges are complete.

        Args:
            failed: Jobs that had failed on some rank when it cast its ballot.
            infinite: Jobs in whose step some rank had found non-finite values.
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

    def record(self, instruction: m.Instruction) -> None:
        """Checks an instruction against the rules, and records it.

        Raises:
            InternalError: The instruction breaks a rule.
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
                    f"it is of a step, and jobs {self.behind} have not called theirs",
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
                kept = segment in call.graph.after_commit and call.skipped != call.must_skip
                self._must(
                    not kept,
                    instruction,
                    f"its step is skipped: {call.skipped}, instructed to skip it: {call.must_skip}",
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
                self.call(job).must_skip = True
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
                self._must(job in self.finished, instruction, "its job has not ended")
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
                    self.paused[job] = self.steps[job] + 1  # an admitted step is still made
                else:
                    del self.paused[job]
            case _:
                pass

    def granted(self, job: int, stream: int, index: int) -> None:
        """Checks that this rank had prepared the batch that was granted to the job's thread."""
        have = self.prepared.get((job, stream), 0)
        if index >= have:
            raise InternalError(
                f"batch {index} of job {job} was granted, but this rank has prepared {have}"
            )

    def call(self, job: int) -> SpecCall:
        """Returns the call that the job is in, and raises InternalError if there is none."""
        call = self.calls.get(job)
        if job in self.finished:
            raise InternalError(f"something was asked of job {job}, which has ended")
        if call is None:
            raise InternalError(f"something was asked of job {job}, which has called no step")
        return call

    @staticmethod
    def _must(holds: bool, instruction: m.Instruction, why: str) -> None:
        if not holds:
            raise InternalError(f"{instruction!r} breaks a rule: {why}")
