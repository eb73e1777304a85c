"""Does what the interleaver decides: one thread a lane, one that waits for the device, one a job.

Every event passes through `Driver.post`, under one lock, and its instructions are queued for their threads under the
same lock: their order is the interleaver's. Nothing else is shared but those queues.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from jaxcross.errors import InternalError, JobError
from jaxcross.health.abort import INTERRUPTED, TERMINATED, Terminated
from jaxcross.interleave import messages as m
from jaxcross.interleave.instrument import Listeners
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import Policy
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest
from jaxcross.runtime.chaos import Chaos, LateQueue
from jaxcross.runtime.emulated_link import Link
from jaxcross.runtime.failure_text import describe, explain
from jaxcross.runtime.job_record import MOST_REFUSALS, Call, Execution, JobRecord, NonFinite, RunWorld, Stopped
from jaxcross.runtime.lanes import ComputeLane, ExchangeLane
from jaxcross.runtime.stall_watch import JobWaits


class Driver:
    """One run of several jobs on this rank.

    Args:
        world: Rank, size, control messages, watchdog.
        jobs: Name of each job and how to make its thread, which must call `job_returned` or `job_raised` at its end.
        policy: Whose turn it is.
        depth: Compute segments on the device at once.
        listeners: Told of every span.
        link: An emulated link, if any.
        chaos: Makes all threads late now and then, for tests.
        on_text: Called on every rank, in one order, with each text that some rank submitted. May call `join`.
        clock_ns: `time.monotonic_ns`, or a test's.

    Attributes:
        seats: Of the jobs that joined and whose threads have not ended.
        left_out: After the run: names of the jobs that were added here and never joined.
        interrupt: What a signal's handler raised first on this rank, if any did. Nobody has heard of it where the run
            was not stopped.
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
        chaos: Chaos | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.world, self.clock_ns, self.link = world, clock_ns, link
        self._chaos = chaos
        self.listeners = listeners or Listeners()
        self.seats = {
            number: JobRecord(number, name, thread, self.queue()) for number, (name, thread) in enumerate(jobs)
        }
        self.left_out: tuple[str, ...] = ()
        self._joining: dict[str, JobRecord] = {}
        self._threads: list[threading.Thread] = []  # of jobs; some have ended
        self._left_behind: set[threading.Thread] = set()
        self._on_text = on_text
        self._heard: list[str] = []
        self._early: list[m.Event] | None = []  # what came before the run began
        self._interleaver = Interleaver(len(jobs), policy, depth)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._fatal: BaseException | None = None
        self._held: deque[BaseException] = deque()  # what signals raised, and nobody has asked for yet
        self.interrupt: BaseException | None = None
        self.terminated = False  # by SIGTERM, on this rank
        self._compute = ComputeLane(self)
        self._exchange = ExchangeLane(self)
        self._job_waits = JobWaits(world)

    def stopping(self, job: int) -> bool:
        """Whether all ranks know that somebody asked the job, or all jobs, to stop."""
        agreed = self._interleaver.shared
        shared = agreed.jobs.get(job)
        return agreed.stopping or (shared is not None and shared.stop)

    def run(self, held: deque[BaseException]) -> bool:
        """Runs all jobs to their end. Waits; communicates; ends on every rank after the same vote.

        Args:
            held: What handlers of signals raise meanwhile: see `jaxcross.health.deferred_signals.held_back`.

        Returns:
            On every rank whether a signal on any of them stopped the run.

        Raises:
            InternalError: A lane broke; only where no other rank waits (else all ranks are aborted).
        """
        self._held = held
        self._run()
        if self._fatal is not None:
            raise self._fatal
        return self._interleaver.shared.stopping

    def _run(self) -> None:
        self._compute.start()
        self._exchange.start()
        with self._lock:  # who posts meanwhile comes behind: a wish for a job must not overtake its being added
            early, self._early = self._early or [], None
            for event in (m.RunStarted(), *early):  # of none of which a text is heard: nobody is called from in here
                self.post(event)
        self._wait_for(self._over.is_set, self._over.wait)
        if self._fatal is None:
            for thread in self._threads:
                self._wait_for(lambda t=thread: not t.is_alive() or t in self._left_behind, thread.join)
        self._job_waits.look({})
        self._exchange.close()
        self._compute.close()

    def _wait_for(self, over: Callable[[], bool], wait: Callable[[float], Any]) -> None:
        while not over():
            wait(0.2)  # comes back now and then, for interrupts and for jobs that wait long
            self._look_at_waits()
            while self._held:
                self._interrupted(self._held.popleft())

    def _look_at_waits(self) -> None:
        with self._lock:
            found = {} if self._fatal is not None else self._interleaver.pending_waits()
            waits = {self.seats[job].name: wait for job, wait in found.items() if job in self.seats}
        self._job_waits.look(waits)

    def _interrupted(self, interrupt: BaseException) -> None:
        self.terminated |= isinstance(interrupt, Terminated)
        if self.interrupt is not None:
            self.world.abort("interrupted twice", code=TERMINATED if self.terminated else INTERRUPTED)
        self.interrupt = interrupt
        for seat in tuple(self.seats.values()):
            if seat.how is None:  # not one that another rank's interrupt has stopped already
                self.listeners.note(job=seat.name, kind="status", value="stopping after this step")
        self.post(m.StopRequested())

    # Events and instructions.

    def queue(self) -> SimpleQueue[Any]:
        """A queue for one of the run's threads."""
        return SimpleQueue() if self._chaos is None else LateQueue(self._chaos)

    def post(self, event: m.Event) -> None:
        """Hands an event to the interleaver and its instructions to their threads. Never waits for work."""
        if self._chaos is not None:
            self._chaos.pause()
        try:
            with self._lock:
                heard = self._follow(event)
            for text in heard:
                self._on_text(text)
        except Exception as error:
            self.die(error)

    def _follow(self, event: m.Event) -> list[str]:
        if self._early is not None:
            self._early.append(event)
            return []
        if self._fatal is not None:
            return []  # no job begins in a run that broke
        for instruction in self._interleaver.handle(event):
            self._route(instruction)
        if not self._heard:
            return self._heard
        heard, self._heard = self._heard, []
        return heard

    def _route(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.Dispatch(job, number, _, _):
                self._compute.put(instruction, self._call(job, number))
            case m.RunExchange(job, number, _, _, _):
                self._exchange.put(instruction, self._call(job, number))
            case m.CastVote() | m.CompareTexts() | m.GatherAnnouncements() | m.RunSync() | m.Backoff():
                self._exchange.put(instruction, None)
            case m.StepReturned(job) | m.BatchGranted(job) | m.SyncReturned(job) | m.Raised(job):
                self.seats[job].answers.put(instruction)
            case m.JobFinished(job, how, step, texts, asked):
                seat = self.seats[job]
                seat.how = how
                seat.tell_left(how, asked)
                if texts:
                    seat.error = explain(seat.name, step, texts)
                    seat.error.__cause__ = seat.cause
                seat.left.set()
                if seat.thread is None:
                    del self.seats[job]
                if how != "ended":  # the job itself notes its end, after its last metrics
                    self.listeners.note(job=seat.name, kind="status", step=step, value=str(seat.error or how))
            case m.StartJob(job):
                seat = self.seats[job]
                seat.thread = seat.make_thread()
                self._threads = [*(t for t in self._threads if t.is_alive()), seat.thread]
                seat.thread.start()
            case m.SkipStep(job, number):
                self._call(job, number).execution.skip()
            case m.JobJoined(job, name):
                seat = self.seats[job] = self._joining.pop(name)
                seat.number = job
                self.listeners.note(job=name, kind="status", value="joined")
            case m.JobPaused(job, paused):
                seat = self.seats[job]
                seat.paused = paused
                seat.tell_paused(paused)
                self.listeners.note(job=seat.name, kind="status", value="paused" if paused else "goes on")
            case m.TextDelivered(text):
                self._heard.append(text)
            case m.Finish(left_out):
                self.left_out = left_out
                self._exchange.put(instruction, None)
            case _:
                raise InternalError(f"the driver cannot follow {instruction!r}")

    def _call(self, job: int, number: int) -> Call:
        call = self.seats[job].call
        if call is None or call.number != number:
            raise InternalError(f"job `{self.seats[job].name}` has no call {number}")
        return call

    # For the runner, and whoever holds a job: in any thread.

    def join(
        self, name: str, thread: Callable[[], threading.Thread], attach: Callable[[Driver, JobRecord], None]
    ) -> JobRecord | None:
        """Adds a job while the run goes on; None if it is over. Does not wait: it joins once all ranks have added it.

        Args:
            name: Of the job.
            thread: How to make its thread.
            attach: Told of its seat before it joins.
        """
        seat = JobRecord(-1, name, thread, self.queue())
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return None
            self._joining[name] = seat
            attach(self, seat)
            self.post(m.JobAdded(name))
        return seat

    def submit(self, text: str) -> bool:
        """Lets all ranks hear the text; false if the run is over. Does not wait."""
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return False
            self.post(m.TextSubmitted(text))
        return True

    def request(self, seat: JobRecord, request: JobRequest) -> None:
        """Tells all ranks, in the next vote, what somebody wishes for a job. Does not wait."""
        with self._lock:
            self.post(m.JobRequested(seat.number, seat.name, request))

    # For job threads.

    def call(
        self,
        job: int,
        graph: StepGraph,
        execution: Execution,
        nonfinite: NonFinite = "ignore",
        *,
        in_step: bool = True,
    ) -> Any:
        """Runs one step, or a call that reports do not count as one: its results, perhaps not computed yet. Waits until
        its last segment was dispatched.
        """
        seat = self.seats[job]
        seat.calls += 1
        seat.call = Call(seat.name, seat.calls, graph, execution, self.clock_ns(), nonfinite, in_step)
        try:
            answer = self._ask(seat, m.StepCalled(job, graph, in_step))
        finally:
            seat.call = None
        assert isinstance(answer, m.StepReturned)
        seat.skipped += answer.skipped and in_step
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
        answer = self._ask(seat, m.SyncWanted(job, label))
        assert isinstance(answer, m.SyncReturned)
        seat.is_only_job = answer.is_only_job
        result, error = seat.sync_result
        seat.sync, seat.sync_result = None, (None, None)
        if error is not None:
            raise error
        return result

    def _ask(self, seat: JobRecord, event: m.Event) -> m.Instruction:
        self.post(event)
        answer = seat.answers.get() if self._fatal is None else m.Raised(seat.number)
        if not isinstance(answer, m.Raised):
            return answer
        seat.refusals += 1
        if seat.refusals > MOST_REFUSALS:
            seat.abandon()
        if seat.error is not None:
            raise seat.error
        raise Stopped

    def resumed(self, job: int, step: int) -> None:
        """The job goes on after `step` steps of another run: spans and errors count from there."""
        self.post(m.StepsRestored(job, step))

    def job_returned(self, job: int) -> None:
        """The job's function returned."""
        self.post(m.JobReturned(job))

    def job_raised(self, job: int, error: BaseException, where: str) -> None:
        """The job's function, or its data, raised."""
        seat = self.seats.get(job)
        if seat is not None and seat.how is None and seat.cause is None:
            seat.cause = error
        self.post(m.JobRaised(job, f"{where}: {describe(error)}"))

    def leave_behind(self, thread: threading.Thread) -> None:
        """Nobody needs to wait for the end of this thread: it will not end."""
        self._left_behind.add(thread)

    def vacate(self, job: int) -> None:
        """The job is over on all ranks, and its thread ends."""
        with self._lock:  # who is told that it has left runs on at once, before that instruction is followed to its end
            seat = self.seats.pop(job, None)
            if seat is not None:
                seat.thread = None  # the job's context keeps the seat

    # For lanes.

    def segment_failed(
        self, instruction: m.Dispatch | m.RunExchange, call: Call, error: Exception, *, ejects: bool = False
    ) -> m.SegmentFailed:
        """What to post of a segment that raised: the job learns it once all ranks have agreed what to do about it."""
        job, segment = instruction.job, instruction.segment
        seat = self.seats.get(job)
        if seat is not None and seat.cause is None:
            seat.cause = error
        what: str = call.graph.kinds[segment]
        if segment in call.graph.after_commit:
            what += f", after the commit: this rank lacks state {instruction.step}"
        where = "in step" if call.in_step else "in a call after step"
        text = f"{where} {instruction.step}, segment {segment} ({what}): {describe(error)}"
        return m.SegmentFailed(job, instruction.call, segment, text, ejects)

    def announcement(self) -> str:
        """What this rank tells all of them about jobs that may join."""
        with self._lock:
            return self._interleaver.announcement()

    def over(self) -> None:
        """The exchange lane is through."""
        self._over.set()

    def die(self, error: BaseException) -> None:
        """A lane broke: nobody can be served any more. Aborts all ranks where there are others."""
        with self._lock:  # what is followed now is followed to its end, and nothing after it
            if self._fatal is None:
                self._fatal = error
                if self.world.size > 1:
                    text = "".join(traceback.format_exception(error))
                    self.world.abort(f"a lane of the runner broke\n{text}")
                for seat in (*self.seats.values(), *self._joining.values()):
                    if seat.how is None:
                        seat.how = "failed"
                        seat.error = JobError(f"Job `{seat.name}` cannot go on: the run broke.")
                        seat.error.__cause__ = error
                    seat.answers.put(m.Raised(seat.number))
                    seat.left.set()
        self._over.set()
