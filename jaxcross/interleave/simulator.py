"""Runs the real `Interleaver` of each rank on a virtual clock, without threads, arrays or waiting.

Each job is a script: a generator that yields what the job's thread does (think, call a step, wait
for a batch). A segment takes as many virtual seconds as its script says. As in a real run, an
exchange begins when the last rank enters it. Ranks that enter different slots would deadlock in a
real run; here, that raises an error.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.compute_queue import DEFAULT_DEPTH
from jaxcross.interleave.contention import Contention, Work
from jaxcross.interleave.instrument import Span, SpanKind
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import Policy
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest, tally


@dataclass(frozen=True, slots=True)
class Think:
    """The job's thread is busy with its own work."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a step. `fails` maps a compute segment to when it fails, "dispatch" or "complete"."""

    graph: StepGraph
    seconds: tuple[float, ...]
    fails: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepare:
    """Starts preparing batch number `count` of a stream, which takes `seconds`. Doesn't wait.

    A stream is a sequence of batches that a job reads. Preparing the first batch opens the stream,
    and the `last` flag marks the final batch. A job may have several streams open at once, because
    earlier streams stay open until the job has reached their ends.
    """

    seconds: float
    stream: int
    count: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Waits for a batch. The `yield` returns whether the stream goes that far."""

    stream: int
    index: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Waits for the job's own communication."""

    label: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Makes the job's function raise."""

    text: str


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a job on this rank. It joins once all ranks have added that name. Doesn't wait."""

    name: str
    script: Generator[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Await:
    """Waits until another job has ended on this rank, like user code that needs its result.

    If that takes too long, the rank excuses the waiting job from the joint start.
    """

    job: int


Action = Think | Await | Call | Prepare | Batch | Sync | Fail | Add
Script = Generator[Action, Any, None]


@dataclass(slots=True)
class RankResult:
    """What happened on one rank.

    Attributes:
        slots: The slots that the exchange lane has entered, in order: `("exchange", job, step,
            segment)`, `("vote",)` ...
        segments: The compute segments in the order of their dispatch: `(job, call, segment)`.
        finished: Each job's final status, and the texts that the ranks compared.
        steps: Each job's committed steps, in order of job numbers.
        returned: For each job, the last step whose results it received.
        names: Names of the jobs that joined, by number.
        left_out: Names of jobs that never joined.
        paused: For each pause or resumption, the job, whether it was paused, and how many slots had
            been entered by then.
        spans: The spans of both lanes. The name of job `i` is `str(i)`.
        end_s: The virtual time at which the exchange lane finished.
    """

    slots: list[tuple[Any, ...]] = field(default_factory=list)
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    finished: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    returned: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    paused: list[tuple[int, bool, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    end_s: float = -1.0


class _Rank:
    def __init__(self, number: int, scripts: Sequence[Script], policy: Policy, depth: int) -> None:
        self.number = number
        self.scripts = dict(enumerate(scripts))
        self.joining: dict[str, Script] = {}
        self.steps: dict[int, int] = {}
        self.interleaver = Interleaver(len(scripts), policy, depth)
        self.result = RankResult()
        self.device: deque[Work] = deque()  # the first one is running
        self.calls: dict[int, Call] = {}
        # For each job, the streams that it has opened, and whether each still has batches.
        self.streams: dict[int, dict[int, bool]] = {}
        self.reading: dict[int, int] = {}  # the stream of each job's last `Batch`
        self.ends: dict[
            tuple[int, int, int], float
        ] = {}  # when each finished compute segment ended
        self.arriving: Callable[[], None] | None = (
            None  # the exchange that waits for its input segments
        )
        self.awaiting: list[tuple[int, int]] = []  # pairs of a job and a job that waits for its end
        self.slot = 0


class Simulation:
    """A run of several jobs on several ranks, on a virtual clock.

    Args:
        scripts: `scripts[rank][job]`.
        policy: Chooses the next job on each lane.
        depth: Maximum number of compute segments on the device at once.
        exchange_s: Returns how many seconds the exchange of a given job, step and segment takes
            once all ranks have entered it.
        vote_s: How many seconds a vote, a comparison, a gathering or a sync takes.
        contention: How much computations and exchanges slow each other down.
        backoff_s: Returns how many seconds a driver waits at each backoff level.
        stop_at_s: When rank 0 is interrupted. None if never.
        requests: Requests about jobs: (seconds, rank, job's number, request).
        adds: Jobs that are added from outside any job's script: (seconds, rank, name, script).
        submits: Jobs that are submitted on rank 0, and thereby added on all ranks: (seconds, name).
        submitted: Returns the script of a submitted job, given (rank, name).
        together: Whether the run begins with a joint start.
        excuse_s: Seconds after which a rank excuses a job that's waiting for another job.
        check: Whether the interleavers check their invariants after every event.
    """

    def __init__(
        self,
        scripts: Sequence[Sequence[Script]],
        *,
        policy: Policy,
        depth: int = DEFAULT_DEPTH,
        exchange_s: Callable[[int, int, int], float] = lambda job, step, segment: 1.0,
        vote_s: float = 0.0,
        contention: Contention | None = None,
        backoff_s: Callable[[int], float] = lambda level: min(0.002 * 2**level, 0.05),
        stop_at_s: float | None = None,
        requests: Sequence[tuple[float, int, int, JobRequest]] = (),
        adds: Sequence[tuple[float, int, str, Script]] = (),
        submits: Sequence[tuple[float, str]] = (),
        submitted: Callable[[int, str], Script] | None = None,
        together: bool = False,
        excuse_s: float = 1.0,
        check: bool = True,
    ) -> None:
        self._ranks = [_Rank(number, jobs, policy, depth) for number, jobs in enumerate(scripts)]
        self._exchange_s = exchange_s
        self._vote_s = vote_s
        self._backoff_s = backoff_s
        self._contention = contention or Contention()
        self._transfer: Work | None = None  # the exchange that occupies the link
        self._check = check
        self._excuse_s = excuse_s
        self._script_of = submitted
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._now = 0.0
        # For each slot, what each rank entered, with what, and when.
        self._meetings: list[dict[int, tuple[tuple[Any, ...], Any, float]]] = []
        for rank in self._ranks:
            self._post(0.0, rank, m.RunStarted(together))
        if stop_at_s is not None:
            self._post(stop_at_s, self._ranks[0], m.StopRequested())
        for at_s, number, job, request in requests:
            self._post(at_s, self._ranks[number], m.JobRequested(job, "", request))
        for at_s, name in submits:
            self._at(at_s, lambda name=name: self._submit(self._ranks[0], name))
        for at_s, number, name, script in adds:
            self._at(
                at_s,
                lambda rank=self._ranks[number], name=name, script=script: self._add(
                    rank, name, script
                ),
            )

    def run(self, events: int = 1_000_000, *, until_s: float = math.inf) -> list[RankResult]:
        """Runs the simulation to its end, or until the virtual time `until_s`.

        Raises:
            InternalError: The ranks deadlock, enter different slots, or need more than `events`
                events.
        """
        for _ in range(events):
            if not self._heap:
                break
            if self._heap[0][0] > until_s:
                return [rank.result for rank in self._ranks]
            self._now, _, action = heapq.heappop(self._heap)
            action()
        stuck = [rank.number for rank in self._ranks if not rank.interleaver.finished]
        if stuck:
            state = "still run" if self._heap else "hang"
            slots = {rank.number: rank.result.slots[-3:] for rank in self._ranks}
            raise InternalError(
                f"ranks {stuck} {state} at {self._now} s; the last slots of each rank are {slots}"
            )
        for rank in self._ranks:
            rank.result.steps = [steps for _, steps in sorted(rank.steps.items())]
        return [rank.result for rank in self._ranks]

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._count), action))

    def _post(self, time_s: float, rank: _Rank, event: m.Event) -> None:
        self._at(time_s, lambda: self._handle(rank, event))

    def _add(self, rank: _Rank, name: str, script: Script) -> None:
        if not rank.interleaver.finished:
            rank.joining[name] = script
            self._handle(rank, m.JobAdded(name))

    def _submit(self, rank: _Rank, name: str) -> None:
        if not rank.interleaver.finished:
            self._handle(rank, m.TextSubmitted(name))

    def _submitted(self, rank: int, name: str) -> Script:
        if self._script_of is None:
            raise InternalError(
                f"rank {rank} has no script for the submitted job `{name}`: pass `submitted`"
            )
        return self._script_of(rank, name)

    def _handle(self, rank: _Rank, event: m.Event) -> None:
        instructions = rank.interleaver.handle(event)
        if self._check:
            rank.interleaver.check()
        for instruction in instructions:
            self._follow(rank, instruction)

    def _follow(self, rank: _Rank, instruction: m.Instruction) -> None:
        now = self._now
        match instruction:
            case m.StepReturned(job, step):
                rank.result.returned[job] = step
                self._at(now, lambda: self._resume(rank, job, None))
            case m.StartJob(job) | m.SyncReturned(job):
                self._at(now, lambda: self._resume(rank, job, None))
            case m.BatchGranted(job, more):
                rank.streams.setdefault(job, {})[rank.reading[job]] = more
                self._at(now, lambda: self._resume(rank, job, more))
            case m.Raised(job):
                rank.scripts[job].close()
            case m.Dispatch():
                self._dispatch(rank, instruction)
            case m.RunExchange(job, call, step, segment, zero):
                graph = rank.calls[job].graph
                needs = [
                    (job, call, need)
                    for need in graph.needs[segment]
                    if graph.kinds[need] == "compute"
                ]
                self._arrive(rank, ("exchange", job, step, segment), () if zero else needs)
            case m.CastVote(ballot):
                self._meet(rank, ("vote",), ballot)
            case m.CompareTexts(job, text):
                self._meet(rank, ("compare", job), text)
            case m.GatherAnnouncements():
                self._meet(rank, ("gather",), rank.interleaver.announcement())
            case m.TextDelivered(text):
                self._add(rank, text, self._submitted(rank.number, text))
            case m.RunSync(job):
                self._meet(rank, ("sync", job), None)
            case m.JobJoined(job, name):
                rank.scripts[job] = rank.joining.pop(name)
                rank.result.names[job] = name
            case m.JobPaused(job, paused):
                rank.result.paused.append((job, paused, len(rank.result.slots)))
            case m.JobAtStart():
                pass
            case m.Backoff(level):
                self._post(now + self._backoff_s(level), rank, m.BackoffElapsed())
            case m.JobFinished(job, how, step, texts):
                rank.result.finished[job] = (how, texts)
                rank.steps[job] = step
                for other, waiter in rank.awaiting:
                    if other == job:
                        self._at(now, lambda waiter=waiter: self._resume(rank, waiter, None))
            case m.Finish(left_out):
                rank.result.end_s = now
                rank.result.left_out = left_out
            case _:
                raise InternalError(f"the simulator does not know the instruction {instruction!r}")

    def _resume(self, rank: _Rank, job: int, value: object) -> None:
        try:
            action = rank.scripts[job].send(value)
        except StopIteration:
            self._handle(rank, m.JobReturned(job))
            return
        match action:
            case Await(other):
                if other in rank.result.finished:
                    self._at(self._now, lambda: self._resume(rank, job, None))
                else:
                    rank.awaiting.append((other, job))
                    self._post(self._now + self._excuse_s, rank, m.StartExcused(job))
            case Think(seconds):
                self._at(self._now + seconds, lambda: self._resume(rank, job, None))
            case Call():
                rank.calls[job] = action
                self._handle(rank, m.StepCalled(job, action.graph))
            case Prepare(seconds, stream, count, last):
                streams = rank.streams.setdefault(job, {})
                if stream not in streams:
                    self._handle(
                        rank, m.StreamBegun(job, tuple(n for n, open_ in streams.items() if open_))
                    )
                    streams[stream] = True
                self._post(self._now + seconds, rank, m.BatchPrepared(job, stream, count))
                if last:
                    self._post(self._now + seconds, rank, m.StreamEnded(job, stream, count))
                self._resume(rank, job, None)
            case Batch(stream, index):
                rank.reading[job] = stream
                self._handle(rank, m.BatchWanted(job, stream, index))
            case Sync(label):
                self._handle(rank, m.SyncWanted(job, label))
            case Add(name, added):
                self._add(rank, name, added)
                self._resume(rank, job, None)
            case Fail(text):
                rank.scripts[job].close()
                self._handle(rank, m.JobRaised(job, text))

    def _dispatch(self, rank: _Rank, d: m.Dispatch) -> None:
        key = (d.job, d.call, d.segment)
        action = rank.calls[d.job]
        rank.result.segments.append(key)
        fails = action.fails.get(d.segment)
        if fails == "dispatch":
            self._post(self._now, rank, m.SegmentFailed(*key, "at dispatch", "failed"))
            return
        ready_s = self._now
        work = Work(action.seconds[d.segment], self._at, lambda: ended())

        def ended() -> None:
            rank.device.popleft()
            rank.ends[key] = self._now
            span = _span(
                rank, d.job, d.step, d.segment, "compute", work.start_s, self._now, ready_s
            )
            rank.result.spans.append(span)
            if rank.device:
                rank.device[0].start(self._now, self._compute_factor)
            self._pace_transfer()
            ns = round((self._now - work.start_s) * 1e9)
            failed = m.SegmentFailed(*key, "on the device", "failed")
            self._handle(rank, failed if fails else m.SegmentCompleted(*key, ns))
            if rank.arriving is not None:
                rank.arriving()

        self._post(self._now, rank, m.SegmentDispatched(*key))
        rank.device.append(work)
        if len(rank.device) == 1:
            work.start(self._now, self._compute_factor)
            self._pace_transfer()

    @property
    def _compute_factor(self) -> float:
        return 1.0 if self._transfer is None else self._contention.compute

    def _pace_transfer(self) -> None:
        if self._transfer is not None:
            factor = self._contention.exchange if any(rank.device for rank in self._ranks) else 1.0
            self._transfer.change_pace(self._now, factor)

    def _set_transfer(self, work: Work | None) -> None:
        """Sets or clears the exchange on the link, which changes the speed of all computations."""
        self._transfer = work
        for rank in self._ranks:
            if rank.device:
                rank.device[0].change_pace(self._now, self._compute_factor)

    def _arrive(
        self, rank: _Rank, slot: tuple[Any, ...], needs: Sequence[tuple[int, int, int]]
    ) -> None:
        """Enters an exchange as soon as the segments that it needs have finished."""
        asked_s = self._now

        def try_now() -> None:
            rank.arriving = try_now
            if all(need in rank.ends for need in needs):
                rank.arriving = None
                own = max((rank.ends[need] for need in needs), default=asked_s)
                self._at(self._now, lambda: self._meet(rank, slot, own))

        try_now()

    def _meet(self, rank: _Rank, slot: tuple[Any, ...], payload: object) -> None:
        rank.result.slots.append(slot)
        if rank.slot == len(self._meetings):
            self._meetings.append({})
        meeting = self._meetings[rank.slot]
        meeting[rank.number] = (slot, payload, self._now)
        rank.slot += 1
        if len({there for there, _, _ in meeting.values()}) > 1:
            raise InternalError(f"ranks have entered different slots at the same time: {meeting}")
        if len(meeting) < len(self._ranks):
            return
        payloads = [meeting[number][1] for number in range(len(self._ranks))]
        if slot[0] == "exchange":
            entered = [meeting[number][2] for number in range(len(self._ranks))]
            work = Work(
                self._exchange_s(*slot[1:]),
                self._at,
                lambda: self._exchanged(slot, entered, payloads),
            )
            computing = any(other.device for other in self._ranks)
            work.start(self._now, self._contention.exchange if computing else 1.0)
            self._set_transfer(work)
            return
        end = self._now + self._vote_s
        verdict = tally(payloads) if slot[0] == "vote" else None
        for other in self._ranks:
            event: m.Event
            if verdict is not None:
                event = m.VoteDone(verdict)
            elif slot[0] == "compare":
                event = m.TextsCompared(slot[1], tuple(payloads))
            elif slot[0] == "gather":
                event = m.AnnouncementsGathered(tuple(payloads))
            else:
                event = m.SyncDone(slot[1])
            self._post(end, other, event)

    def _exchanged(
        self, slot: tuple[Any, ...], entered_s: Sequence[float], ready_s: Sequence[float]
    ) -> None:
        self._set_transfer(None)
        _, job, step, segment = slot
        for rank in self._ranks:
            # As in a real run, the span begins when this rank enters, and includes its wait for the
            # others.
            begin_s = entered_s[rank.number]
            span = _span(
                rank, job, step, segment, "collective", begin_s, self._now, ready_s[rank.number]
            )
            rank.result.spans.append(span)
            self._post(self._now, rank, m.ExchangeDone(job, segment))


def _span(
    rank: _Rank,
    job: int,
    step: int,
    segment: int,
    kind: SpanKind,
    start: float,
    end: float,
    ready: float,
) -> Span:
    ns = [round(t * 1e9) for t in (start, end, ready)]
    return Span(
        rank=rank.number,
        job=str(job),
        step=step,
        segment=segment,
        kind=kind,
        lane=0,
        start_ns=ns[0],
        end_ns=ns[1],
        ready_ns=ns[2],
    )
