"""The interleaver's rank-local state: calls in progress, and what job threads are waiting for."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxcross._endings import JobStatus
from jaxcross.errors import InternalError, clause
from jaxcross.interleave import messages as m
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import AtStart, JobBallot, JobRequest, point_hash

PointKind = Literal["step", "batch", "sync", "end"]


class Wait(NamedTuple):
    """A job's wait between two exchanges, either for other ranks or, if `own`, for something local.

    The `moved` counter distinguishes a slow wait from a stuck one: it changes whenever the job gets
    any further during the wait, e.g. when the prefetcher skips a batch because the job resumes from
    a later position in its data.
    """

    step: int
    what: str
    own: bool = False
    moved: int = 0

    @property
    def point(self) -> tuple[int, str, bool]:
        """Identifies the wait: two waits of a job with equal points are the same wait."""
        return self.step, self.what, self.own


@dataclass(frozen=True, slots=True)
class Point:
    """What a job's thread wants to do together with all ranks, e.g. call a step with exchanges."""

    kind: PointKind
    hash: int
    text: str
    index: int = -1


@dataclass(slots=True)
class LocalCall:
    """One call of a step on this rank, and its progress."""

    number: int
    graph: StepGraph
    counts: bool = True  # whether the call is a step of the job
    issued: set[int] = field(default_factory=set)  # compute segments handed to the lane
    dispatched: set[int] = field(default_factory=set)  # compute segments handed to the device
    exchanged: set[int] = field(default_factory=set)
    admitted: bool = False
    committed: bool = False
    finite: bool = True  # whether the exchanged values are finite, as far as they were checked
    skipped: bool = False  # the step leaves its state unchanged
    broken: bool = False  # one of its segments failed
    # The number of unmet dependencies of each segment, i.e. of segments it needs that have been
    # neither issued nor exchanged.
    _unmet: list[int] = field(init=False)
    # The step's compute segments that are ready to run but haven't been passed to the compute lane
    # yet, in order. Those in the second list overwrite the step's input state, so they also have to
    # wait until all ranks have committed the step.
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
        """Returns the first compute segment that may be passed to the lane, or None."""
        first = [*self._ready_before[:1], *(self._ready_after[:1] if self.committed else ())]
        return min(first, default=None)

    def issue(self, segment: int) -> None:
        """Records that a ready segment has been passed to the lane."""
        del self._ready_list(segment)[0]
        self.issued.add(segment)
        self._provide(segment)

    def may_exchange(self, segment: int) -> bool:
        """Whether everything that a collective segment needs has been dispatched or exchanged."""
        return all(
            need in self.dispatched or need in self.exchanged for need in self.graph.needs[segment]
        )

    def exchange_done(self, segment: int, *, finite: bool) -> None:
        """Records that a collective segment has run, and whether its values were finite."""
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

    def must_complete(self) -> bool:
        """Whether the call runs to completion even if its job has failed.

        A step may overwrite its input state in place. Once a call may have started doing that, it
        has to run to completion. Stopping halfway would leave a state that mixes values from before
        and after the step.
        """
        return not self.broken and (
            self.committed or (bool(self.issued) and not self.graph.collectives)
        )

    def complete(self) -> bool:
        """Whether the call can return to the job's function.

        That's the case once all of its segments have been dispatched or exchanged and, if it
        exchanges anything, it has been committed.
        """
        return len(self.dispatched) + len(self.exchanged) == len(self.graph.kinds) and (
            self.committed or not self.graph.collectives
        )


@dataclass(slots=True)
class LocalJob:
    """A job's rank-local state."""

    thread_started: bool = False
    # The number of steps without exchanges since the last step that all ranks made together. Each
    # rank makes them at its own pace, so the numbers may differ between ranks until the next
    # exchange.
    local_steps: int = 0
    other_calls: int = 0  # calls that don't count as steps, e.g. evaluations
    other_local_calls: int = 0  # how many of them are in `local_steps`
    call: LocalCall | None = None
    calls: int = 0
    is_waiting: bool = False  # the thread is waiting for an answer
    point: Point | None = None  # where the thread is waiting for the other ranks
    failed: str | None = None
    # The first segment failure, unless its call has no commit (i.e. no vote on whether the step
    # takes effect). In that case, a later failure replaces it, because only a failure in a call
    # with a commit can leave this rank without the results of a step that the other ranks have.
    failed_segment: m.SegmentFailed | None = None
    ejects: bool = False  # the failure is one that ejects the job
    returned: bool = False  # its function returned
    request: JobRequest = JobRequest.NONE  # not yet cast in a vote
    stream: int = -1
    syncs: int = 0
    at_start: AtStart = AtStart.COMING
    replayed: int = 0  # batches skipped so far to get to a restart's position
    prepared: dict[int, int] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)

    def begin_call(self, event: m.StepCalled, made: int) -> None:
        """Records that the job's thread calls a step, having made `made` steps so far."""
        if self.call is not None or self.is_waiting:
            raise InternalError(f"job {event.job} called a step before its last call returned")
        graph = event.graph
        self.calls += 1
        self.call = LocalCall(number=self.calls, graph=graph, counts=event.counts)
        if graph.is_step:
            self.at_start = AtStart.HERE
        point = None
        if graph.collectives:
            # The point has to identify the call, and matching exchanges alone aren't enough for
            # that: if one rank has made an extra step without exchanges, or calls a different
            # function that happens to have the same exchanges, the ranks would sum up values from
            # different steps. So the point also includes the function's name and the number of
            # local steps since the last common step.
            text = (
                f"called step {made + 1}{graph.function and f' by {graph.function}'}\n{graph.text}"
            )
            point = Point(
                "step", point_hash("step", graph.signature, graph.function, self.local_steps), text
            )
        self.wait_at(point)

    def want_sync(self, label: str, text: str) -> None:
        """Records that the thread requests a slot on the exchange lanes to communicate in."""
        self.syncs += 1
        self.wait_at(Point("sync", point_hash("sync", label, self.syncs), text or label))

    def want_batch(self, stream: int, index: int) -> None:
        """Records that the thread requests a batch."""
        self.stream = stream
        text = f"asked for batch {index + 1} of data {stream + 1}"
        self.wait_at(Point("batch", point_hash("batch", stream, index), text, index))

    def batch_granted(self, prepared: int, limit: int | None) -> bool | None:
        """Returns whether the thread gets its batch, or None if it has to keep waiting.

        Also returns None if the thread isn't waiting for a batch, or if the job has failed on this
        rank.

        Args:
            prepared: How many of the stream's batches are ready on all ranks.
            limit: The length of the shortest stream on any rank, or None if none of them has ended
                yet.
        """
        if self.point is None or self.point.kind != "batch" or self.failed is not None:
            return None
        if self.point.index < prepared:
            return True
        return False if limit is not None and self.point.index >= limit else None

    def fail(self, text: str, *, ejects: bool = False) -> None:
        """Records that the job failed on this rank. Only the first failure is kept."""
        if self.failed is None:
            self.failed = text
            self.ejects = ejects

    def segment_failed(self, event: m.SegmentFailed) -> None:
        """Records that the job failed on this rank because a segment failed."""
        if self.failed_segment is None or not self.failed_segment.commits:
            self.failed_segment = event
        call = self.current(event.call)
        if call is not None:
            call.broken = True
        self.fail(_failure_text(event), ejects=event.ejects)

    def position(self, call: LocalCall, made: int) -> tuple[int, int]:
        """Returns the step that a call makes or follows, and the number of non-step calls by then.

        Args:
            call: The call.
            made: How many steps the job has made on this rank.
        """
        if call.committed or not call.graph.is_step:
            # A call that isn't a step counts as work after the latest step.
            return made, self.other_calls
        return (made + 1, self.other_calls) if call.counts else (made, self.other_calls + 1)

    def count(self, call: LocalCall) -> None:
        """Counts a completed call without exchanges. Calls with exchanges are counted on commit."""
        local = call.graph.local_step
        self.local_steps += local
        self.other_calls += local and not call.counts
        self.other_local_calls += local and not call.counts

    def wait_at(self, point: Point | None) -> None:
        """Records that the thread is waiting, for all ranks at `point` or for its own segments."""
        self.is_waiting = True
        self.point = point

    def note(self, event: m.Event) -> None:
        """Applies an event that changes only this job's local state."""
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
        """Returns the call with this number if it's still in progress, or None."""
        return self.call if self.call is not None and self.call.number == call else None

    def add_request(self, request: JobRequest) -> None:
        """Stores a request made on this rank, which replaces any earlier request but a stop."""
        if self.request is not JobRequest.STOP:
            self.request = request

    def ready(self, *, may_begin: bool) -> int | None:
        """Returns the job's next compute segment, or None if no segment may be dispatched now."""
        call = self.call
        if call is None or not (call.admitted or call.issued or may_begin):
            return None
        return call.ready() if self.failed is None or call.must_complete() else None

    def must_complete(self) -> bool:
        """Whether a call is in progress that runs to completion even if the job has failed."""
        return self.call is not None and self.call.must_complete()

    def open_call(self) -> int:
        """Returns the number of the call in progress, unless it's committed; 0 if there's none."""
        return 0 if self.call is None or self.call.committed else self.call.number

    def received_commit(self) -> bool:
        """Whether this rank has received the results of its last committed step, or never will."""
        return self.call is None or not self.call.committed or self.call.broken

    def called(self) -> tuple[int, ...] | str:
        """Returns the collective segments of the step that the job has called.

        If the job is waiting for something other than a step, returns the kind of its point
        instead.
        """
        assert self.point is not None
        if self.point.kind != "step":
            return self.point.kind
        assert self.call is not None
        return self.call.graph.collectives

    def has_update(self) -> bool:
        """Whether this rank has something to report that could let the job continue or end."""
        if self.failed is not None:
            return self.received_commit()
        if self.point is None or self.point.kind != "batch":
            return self.point is not None
        prepared = self.prepared.get(self.stream, 0)
        limit = self.limits.get(self.stream)
        return prepared > self.point.index or (limit is not None and limit <= self.point.index)

    def pending_wait(self, committed: int, progress: int) -> Wait | None:
        """Returns the job's current wait between two exchanges, or None.

        Args:
            committed: The job's number of committed steps.
            progress: A number that changes whenever any job makes progress. Used while waiting for
                the job's end, which may depend on the progress of other jobs.
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
        """Returns this rank's text for a comparison: its failure, or what the thread waits for."""
        if self.failed is not None:
            text = self.failed
            of = self.failed_segment
            call = self.call
            # If the failed segment's step was committed, the other ranks have results that this
            # rank lacks, and the text has to say so. We couldn't have known any earlier: the commit
            # vote may still have been in flight when the segment failed, and a call may return
            # before its last segment completes.
            if (
                of is not None
                and of.commits
                and (call is None or call.number != of.call or call.committed)
            ):
                lost = _failure_text(
                    of, ", after the commit, so this rank lacks the step's results"
                )
                text = lost if text == _failure_text(of) else f"{clause(text)}; then {lost}"
            return f"{JobStatus.EJECTED if self.ejects else JobStatus.FAILED}\n{text}"
        return f"{self.point.kind}\n{self.point.text}" if self.point is not None else ""


def _failure_text(failed: m.SegmentFailed, when: str = "") -> str:
    return f"{failed.where}{when}: {failed.error}"
