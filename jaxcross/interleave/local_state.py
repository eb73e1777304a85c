"""The part of the interleaver's state that is local to this rank: calls, and the waits of jobs'
threads.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxcross.errors import InternalError, clause
from jaxcross.interleave import messages as m
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import AtStart, JobBallot, JobRequest, point_hash

PointKind = Literal["step", "batch", "sync", "end"]


class Wait(NamedTuple):
    """A job's wait between two exchanges: for the other ranks or (`own`) for something of this
    rank.

    `moved` changes whenever something moves on during the wait.
    """

    step: int
    what: str
    own: bool = False
    moved: int = 0

    @property
    def point(self) -> tuple[int, str, bool]:
        """Identifies the wait, without its progress."""
        return self.step, self.what, self.own


@dataclass(frozen=True, slots=True)
class Point:
    """Something that a job's thread waits to do on all ranks: call a step with exchanges, take a
    batch, sync, end.
    """

    kind: PointKind
    hash: int
    text: str
    index: int = -1


@dataclass(slots=True)
class LocalCall:
    """One call of a step on this rank."""

    number: int
    graph: StepGraph
    counts: bool = True  # whether it is a step of the job
    issued: set[int] = field(default_factory=set)  # compute segments handed to the lane
    dispatched: set[int] = field(default_factory=set)  # compute segments handed to the device
    exchanged: set[int] = field(default_factory=set)
    admitted: bool = False
    committed: bool = False
    finite: bool = True  # the exchanged values, as far as they were checked
    skipped: bool = False  # the step keeps its state
    broken: bool = False  # a segment of it failed
    _unmet: list[int] = field(
        init=False
    )  # for each segment, the number of its needs neither issued nor exchanged
    # The compute segments without unmet needs that were not issued yet, in order: those that may
    # run before the commit, and those that have to wait for it.
    _ready_before: list[int] = field(init=False)
    _ready_after: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._unmet = [len(set(needs)) for needs in self.graph.needs]
        self._ready_before = []
        self._ready_after = []
        for segment, kind in enumerate(self.graph.kinds):
            if kind == "compute" and not self._unmet[segment]:
                self._ready_list(segment).append(segment)

    def ready(self) -> int | None:
        """Returns the first compute segment that may go to the lane."""
        first = [*self._ready_before[:1], *(self._ready_after[:1] if self.committed else ())]
        return min(first, default=None)

    def issue(self, segment: int) -> None:
        """Notes that the ready segment goes to the lane."""
        del self._ready_list(segment)[0]
        self.issued.add(segment)
        self._provide(segment)

    def may_exchange(self, segment: int) -> bool:
        """Whether all that a collective segment needs was dispatched or exchanged."""
        return all(
            need in self.dispatched or need in self.exchanged for need in self.graph.needs[segment]
        )

    def exchange_done(self, segment: int, *, finite: bool) -> None:
        """Notes that a collective segment was run, and whether its values were finite."""
        self.exchanged.add(segment)
        self.finite &= finite
        self._provide(segment)

    def _provide(self, segment: int) -> None:
        for reader in self.graph.readers[segment]:
            self._unmet[reader] -= 1
            if not self._unmet[reader]:
                insort(self._ready_list(reader), reader)

    def _ready_list(self, segment: int) -> list[int]:
        return self._ready_after if segment in self.graph.after_commit else self._ready_before

    def goes_on(self) -> bool:
        """Whether it is made to its end although its job has failed: it may have overwritten the
        state by now.
        """
        return not self.broken and (
            self.committed or (bool(self.issued) and not self.graph.collectives)
        )

    def complete(self) -> bool:
        """Whether the caller can have its results."""
        return len(self.dispatched) + len(self.exchanged) == len(self.graph.kinds) and (
            self.committed or not self.graph.collectives
        )


@dataclass(slots=True)
class LocalJob:
    """The state of a job that this rank alone knows."""

    thread_started: bool = False
    local_steps: int = (
        0  # steps since the last one that all ranks made together: they exchanged nothing
    )
    other_calls: int = 0  # calls that are made like steps and do not count, such as evaluations
    other_local_calls: int = 0  # those of them that are in `local_steps`
    call: LocalCall | None = None
    calls: int = 0
    is_waiting: bool = False  # the thread waits for an answer
    point: Point | None = None  # the point at which it waits for the other ranks
    failed: str | None = None
    failed_segment: m.SegmentFailed | None = (
        None  # the first one, or the first of a call that has a commit
    )
    ejects: bool = False  # it failed by a rule that ejects it
    returned: bool = False  # its function returned
    request: JobRequest = JobRequest.NONE  # not yet cast in a vote
    stream: int = -1
    syncs: int = 0
    at_start: AtStart = AtStart.COMING
    replayed: int = 0  # batches dropped on the way to the position of a restart
    prepared: dict[int, int] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)

    def begin_call(self, event: m.StepCalled, made: int) -> None:
        """The thread calls a step after it has made `made` of them."""
        if self.call is not None or self.is_waiting:
            raise InternalError(f"job {event.job} called a step before its last call returned")
        graph = event.graph
        self.calls += 1
        self.call = LocalCall(number=self.calls, graph=graph, counts=event.counts)
        if graph.is_step:
            self.at_start = AtStart.HERE
        point = None
        if graph.collectives:
            # The steps since the last common one are part of the point: otherwise ranks whose
            # exchanges look alike at different calls would mix their steps. So is the function:
            # several may make equal exchanges.
            text = (
                f"called step {made + 1}{graph.function and f' by {graph.function}'}\n{graph.text}"
            )
            point = Point(
                "step", point_hash("step", graph.signature, graph.function, self.local_steps), text
            )
        self.wait_at(point)

    def want_sync(self, label: str) -> None:
        """The thread asks for a communication of its own."""
        self.syncs += 1
        self.wait_at(Point("sync", point_hash("sync", label, self.syncs), label))

    def want_batch(self, stream: int, index: int) -> None:
        """The thread asks for a batch."""
        self.stream = stream
        text = f"asked for batch {index + 1} of data {stream + 1}"
        self.wait_at(Point("batch", point_hash("batch", stream, index), text, index))

    def batch_granted(self, prepared: int, limit: int | None) -> bool | None:
        """Returns whether there is the batch that the thread waits for; None if it waits for none,
        or on.

        Args:
            prepared: Batches of its stream that all ranks have prepared.
            limit: Batches until a rank's stream ended, if one did.
        """
        if self.point is None or self.point.kind != "batch" or self.failed is not None:
            return None
        if self.point.index < prepared:
            return True
        return False if limit is not None and self.point.index >= limit else None

    def fail(self, text: str, *, ejects: bool = False) -> None:
        """The job fails on this rank; its first failure counts."""
        if self.failed is None:
            self.failed = text
            self.ejects = ejects

    def segment_failed(self, event: m.SegmentFailed) -> None:
        """The job fails on this rank by a segment."""
        if self.failed_segment is None or not self.failed_segment.commits:
            self.failed_segment = event
        call = self.current(event.call)
        if call is not None:
            call.broken = True
        self.fail(_told(event), ejects=event.ejects)

    def position(self, call: LocalCall, made: int) -> tuple[int, int]:
        """Returns the step that a call makes or follows, and the number of calls by then that are
        not steps.

        Args:
            call: The call.
            made: Steps that the job has made here.
        """
        if (
            call.committed or not call.graph.is_step
        ):  # work without exchanges happens between two steps
            return made, self.other_calls
        return (made + 1, self.other_calls) if call.counts else (made, self.other_calls + 1)

    def count(self, call: LocalCall) -> None:
        """Counts a call that is complete, if it exchanged nothing."""
        local = call.graph.local_step
        self.local_steps += local
        self.other_calls += local and not call.counts
        self.other_local_calls += local and not call.counts

    def wait_at(self, point: Point | None) -> None:
        """The thread waits: for all ranks at `point`, or for its own segments alone."""
        self.is_waiting = True
        self.point = point

    def note(self, event: m.Event) -> None:
        """Notes an event that changes nothing but this job's local state."""
        match event:
            case m.SegmentDispatched(_, call, segment):
                current = self.current(call)
                if current is not None:
                    current.dispatched.add(segment)
            case m.BatchDropped():
                self.replayed += 1
            case m.BatchPrepared(_, stream, count):
                self.prepared[stream] = count
            case m.StreamEnded(_, stream, count):
                self.limits[stream] = count
            case m.JobReturned():
                self.returned = True
            case m.FirstStepMade():
                self.at_start = AtStart.HERE
            case m.StartExcused(_, late):
                if self.at_start is AtStart.COMING:
                    self.at_start = AtStart.LATE if late else AtStart.EXCUSED

    def current(self, call: int) -> LocalCall | None:
        """Returns the call of that number, unless it is over."""
        return self.call if self.call is not None and self.call.number == call else None

    def add_request(self, request: JobRequest) -> None:
        """Takes a request on this rank: the last one counts, but a stop is final."""
        if self.request is not JobRequest.STOP:
            self.request = request

    def ready(self, *, may_begin: bool) -> int | None:
        """Returns the compute segment that may go to the lane next, of a call that has begun or may
        begin.
        """
        call = self.call
        if call is None or not (call.admitted or call.issued or may_begin):
            return None
        return call.ready() if self.failed is None or call.goes_on() else None

    def goes_on(self) -> bool:
        """Whether a call is under way that is made to its end even if the job has failed."""
        return self.call is not None and self.call.goes_on()

    def open_call(self) -> int:
        """Returns the number of the call whose results are neither returned nor committed; 0 if
        there is none.
        """
        return 0 if self.call is None or self.call.committed else self.call.number

    def received_commit(self) -> bool:
        """Whether this rank has received the results of its last committed step, or never will."""
        return self.call is None or not self.call.committed or self.call.broken

    def called(self) -> tuple[int, ...] | str:
        """Returns the collective segments of the step that it called, or the kind of any other
        point.
        """
        assert self.point is not None
        if self.point.kind != "step":
            return self.point.kind
        assert self.call is not None
        return self.call.graph.collectives

    def has_update(self) -> bool:
        """Whether a vote could change something for the job, as far as this rank knows."""
        if self.failed is not None:
            return self.received_commit()
        if self.point is None or self.point.kind != "batch":
            return self.point is not None
        prepared = self.prepared.get(self.stream, 0)
        limit = self.limits.get(self.stream)
        return prepared > self.point.index or (limit is not None and limit <= self.point.index)

    def pending_wait(self, committed: int, progress: int) -> Wait | None:
        """Returns the wait between two exchanges that the job is in, if any.

        Args:
            committed: Number of committed steps.
            progress: A number that changes whenever any job moves on: the job's end may wait for
                that.
        """
        step = committed + 1
        if self.failed is not None:
            return Wait(step, "other ranks, to leave")
        if self.call is not None and self.call.committed:
            return Wait(committed, "end of the step", own=True, moved=len(self.call.dispatched))
        if self.point is None:
            return None
        if self.point.kind == "batch":
            what = f"batch {self.point.index + 1} of data {self.stream + 1}"
            if self.has_update():
                return Wait(step, what)
            return Wait(step, what, own=True, moved=self.replayed)
        if self.point.kind == "sync":
            return Wait(step, self.point.text.partition("\n")[0], moved=self.syncs)
        if self.point.kind == "end":
            return Wait(step, "end of the job", moved=progress)
        return Wait(step, "call of the step", moved=self.calls)

    def ballot(self) -> JobBallot:
        """Returns this rank's ballot on the job."""
        return JobBallot(
            point=self.point.hash if self.point is not None else None,
            good=self.failed is None,
            stream=self.stream,
            prepared=self.prepared.get(self.stream, 0),
            limit=self.limits.get(self.stream),
            request=self.request,
            finite=self.call is None or self.call.finite,
            received_commit=self.received_commit(),
            at_start=self.at_start,
        )

    def text(self) -> str:
        """Returns this rank's text for a comparison: the failure, or the point at which the job
        waits.
        """
        if self.failed is not None:
            text = self.failed
            of = self.failed_segment
            call = self.call
            # Not known when it failed: the vote may have been under way, and a call may end before
            # its last segment.
            if (
                of is not None
                and of.commits
                and (call is None or call.number != of.call or call.committed)
            ):
                lost = _told(of, ", after the commit, so this rank lacks the step's results")
                text = lost if text == _told(of) else f"{clause(text)}; then {lost}"
            return f"{'ejected' if self.ejects else 'failed'}\n{text}"
        return f"{self.point.kind}\n{self.point.text}" if self.point is not None else ""


def _told(failed: m.SegmentFailed, when: str = "") -> str:
    return f"{failed.where}{when}: {failed.error}"
