"""Does what the interleaver decides: one thread a lane, one that waits for the device, one a job.

Every event passes through `Driver.post`, under one lock, and its instructions are queued for their threads under the
same lock: their order is the interleaver's. Nothing else is shared but those queues.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol

from jaxcross.errors import ExchangeError, InternalError, JobError
from jaxcross.runtime import messages as m
from jaxcross.runtime.events import Listeners
from jaxcross.runtime.explain import describe, explain
from jaxcross.runtime.interleaver import Interleaver
from jaxcross.runtime.lanes import ComputeLane, ExchangeLane
from jaxcross.runtime.link import Link
from jaxcross.runtime.outline import Outline
from jaxcross.runtime.policy import Policy


class Stopped(BaseException):
    """Unwinds a job's function after a person asked all jobs to stop. Never leaves its thread."""


class Execution(Protocol):
    """One step of one job in flight; see `jaxcross.program.execution.Execution`."""

    def run(self, index: int) -> None: ...
    def wait_inputs(self, index: int) -> None: ...
    def wait_outputs(self, index: int) -> None: ...
    def zero_inputs(self, index: int) -> None: ...
    def outputs(self) -> Any: ...


class RunWorld(Protocol):
    """What a run needs of the world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def control(self) -> Any: ...
    def watching(self, *, job: str, step: int, segment: int, what: str) -> AbstractContextManager[None]: ...
    def abort(self, message: str) -> NoReturn: ...


class Call:
    """One call of a step on this rank, with what the lanes note of it.

    Attributes:
        ends_ns: When each finished segment's outputs were there.
    """

    __slots__ = ("called_ns", "ends_ns", "execution", "name", "number", "outline")

    def __init__(self, name: str, number: int, outline: Outline, execution: Execution, called_ns: int) -> None:
        self.name, self.number, self.outline, self.execution = name, number, outline, execution
        self.called_ns = called_ns
        self.ends_ns: dict[int, int] = {}

    def ready_ns(self, segment: int, start_ns: int) -> int:
        """When the inputs of a segment that began at `start_ns` were there. An end that its lane has not noted yet is
        not earlier than that by more than a thread's delay.
        """
        ends = (self.ends_ns.get(n, start_ns) for n in self.outline.needs[segment])
        return min(max(ends, default=self.called_ns), start_ns)


class Seat:
    """What the driver holds for one job."""

    def __init__(self, number: int, name: str, thread: Callable[[], threading.Thread]) -> None:
        self.number, self.name = number, name
        self.make_thread = thread
        self.thread: threading.Thread | None = None
        self.answers: SimpleQueue[m.Instruction] = SimpleQueue()
        self.call: Call | None = None
        self.calls = 0
        self.sync: Callable[[Any], Any] | None = None
        self.sync_result: tuple[Any, BaseException | None] = (None, None)
        self.cause: BaseException | None = None  # the first thing that went wrong on this rank
        self.error: JobError | ExchangeError | None = None
        self.how: str | None = None


class Driver:
    """One run of several jobs on this rank.

    Args:
        world: Rank, size, control messages, watchdog.
        jobs: Name of each job and how to make its thread, which must call `job_returned` or `job_raised` at its end.
        policy: Whose turn it is.
        depth: Compute segments on the device at once.
        listeners: Told of every span.
        link: An emulated link, if any.
        clock_ns: `time.monotonic_ns`, or a test's.
    """

    def __init__(
        self,
        *,
        world: RunWorld,
        jobs: Sequence[tuple[str, Callable[[], threading.Thread]]],
        policy: Policy,
        depth: int = 2,
        listeners: Listeners | None = None,
        link: Link | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.world, self.clock_ns, self.link = world, clock_ns, link
        self.listeners = listeners or Listeners()
        self.seats = [Seat(number, name, thread) for number, (name, thread) in enumerate(jobs)]
        self._interleaver = Interleaver(len(jobs), policy, depth)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._fatal: BaseException | None = None
        self._interrupts = 0
        self._compute = ComputeLane(self)
        self._exchange = ExchangeLane(self)

    @property
    def stopping(self) -> bool:
        """Whether all ranks know that a person asked all jobs to stop."""
        return self._interleaver.agreed.stopping

    def run(self) -> None:
        """Runs all jobs to their end. Waits; communicates; ends on every rank after the same vote.

        Raises:
            KeyboardInterrupt: On every rank, after a clean end, if a person interrupted any of them.
            InternalError: A lane broke; only where no other rank waits (else all ranks are aborted).
        """
        self._compute.start()
        self._exchange.start()
        self.post(m.RunStarted())
        self._wait_for(self._over.is_set, self._over.wait)
        if self._fatal is None:
            for seat in self.seats:
                thread = seat.thread
                if thread is not None:
                    self._wait_for(lambda t=thread: not t.is_alive(), thread.join)
        self._exchange.close()
        self._compute.close()
        if self._fatal is not None:
            raise self._fatal
        if self._interleaver.agreed.stopping:
            raise KeyboardInterrupt

    def _wait_for(self, over: Callable[[], bool], wait: Callable[[float], Any]) -> None:
        while not over():
            try:
                wait(0.2)  # comes back now and then, so that the main thread sees signals
            except KeyboardInterrupt:
                self._interrupts += 1
                if self._interrupts > 1:
                    self.world.abort("interrupted twice")
                for seat in self.seats:
                    self.listeners.note(job=seat.name, kind="status", value="stopping after this step")
                self.post(m.StopRequested())

    # Events and instructions.

    def post(self, event: m.Event) -> None:
        """Hands an event to the interleaver and its instructions to their threads. Never waits for work."""
        try:
            with self._lock:
                for instruction in self._interleaver.handle(event):
                    self._route(instruction)
        except Exception as error:
            self.die(error)

    def _route(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.Dispatch(job, number, _, _):
                self._compute.put(instruction, self._call(job, number))
            case m.RunExchange(job, number, _, _, _):
                self._exchange.put(instruction, self._call(job, number))
            case m.CastVote() | m.CompareTexts() | m.RunSync() | m.BePatient() | m.Finish():
                self._exchange.put(instruction, None)
            case m.StepReturned(job) | m.BatchGranted(job) | m.SyncReturned(job) | m.Raised(job):
                self.seats[job].answers.put(instruction)
            case m.JobFinished(job, how, texts):
                seat = self.seats[job]
                seat.how = how
                if how == "failed":
                    seat.error = explain(seat.name, self._interleaver.step(job), texts)
                    seat.error.__cause__ = seat.cause
                kind, value = ("done", how) if how == "ended" else ("status", str(seat.error or how))
                self.listeners.note(job=seat.name, kind=kind, step=self._interleaver.step(job), value=value)
            case m.StartJob(job):
                seat = self.seats[job]
                seat.thread = seat.make_thread()
                seat.thread.start()
            case _:
                raise InternalError(f"the driver cannot follow {instruction!r}")

    def _call(self, job: int, number: int) -> Call:
        call = self.seats[job].call
        if call is None or call.number != number:
            raise InternalError(f"job `{self.seats[job].name}` has no call {number}")
        return call

    # For job threads.

    def call(self, job: int, outline: Outline, execution: Execution) -> Any:
        """Runs one step: its results, perhaps not computed yet. Waits until its last segment was dispatched."""
        seat = self.seats[job]
        seat.calls += 1
        seat.call = Call(seat.name, seat.calls, outline, execution, self.clock_ns())
        try:
            answer = self._ask(seat, m.StepCalled(job, outline))
        finally:
            seat.call = None
        assert isinstance(answer, m.StepReturned)
        return execution.outputs()

    def want_batch(self, job: int, stream: int, index: int) -> bool:
        """Whether every rank has this batch (or some rank's data ended before it). Waits for the ranks."""
        answer = self._ask(self.seats[job], m.BatchWanted(job, stream, index))
        assert isinstance(answer, m.BatchGranted)
        return answer.more

    def together(self, job: int, label: str, work: Callable[[Any], Any]) -> Any:
        """Runs `work(control)` on the exchange lane of every rank at once, and returns or raises what it does."""
        seat = self.seats[job]
        seat.sync = work
        self._ask(seat, m.SyncWanted(job, label))
        result, error = seat.sync_result
        seat.sync, seat.sync_result = None, (None, None)
        if error is not None:
            raise error
        return result

    def _ask(self, seat: Seat, event: m.Event) -> m.Instruction:
        self.post(event)
        answer = seat.answers.get()
        if not isinstance(answer, m.Raised):
            return answer
        if self._fatal is not None:
            raise JobError(f"Job `{seat.name}` cannot go on: the run broke.") from self._fatal
        if seat.error is not None:
            raise seat.error
        raise Stopped

    def job_returned(self, job: int) -> None:
        """The job's function returned."""
        self.post(m.JobReturned(job))

    def job_raised(self, job: int, error: BaseException, where: str) -> None:
        """The job's function, or its data, raised."""
        seat = self.seats[job]
        if seat.how is None and seat.cause is None:
            seat.cause = error
        self.post(m.JobRaised(job, f"{where}: {describe(error)}"))

    # For lanes.

    def segment_failed(self, instruction: m.Dispatch | m.RunExchange, call: Call, error: Exception) -> None:
        """A segment raised: the job learns it once all ranks have agreed what to do about it."""
        job, segment = instruction.job, instruction.segment
        if self.seats[job].cause is None:
            self.seats[job].cause = error
        what: str = call.outline.kinds[segment]
        if segment in call.outline.after_commit:
            what += f", after the commit: this rank lacks state {instruction.step}"
        text = f"in step {instruction.step}, segment {segment} ({what}): {describe(error)}"
        self.post(m.SegmentFailed(job, instruction.call, segment, text))

    def over(self) -> None:
        """The exchange lane is through."""
        self._over.set()

    def die(self, error: BaseException) -> None:
        """A lane broke: nobody can be served any more. Aborts all ranks where there are others."""
        if self._fatal is None:
            self._fatal = error
            if self.world.size > 1:
                text = "".join(traceback.format_exception(error))
                self.world.abort(f"a lane of the runner broke\n{text}")
            for seat in self.seats:
                seat.answers.put(m.Raised(seat.number))
        self._over.set()
