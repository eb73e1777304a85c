"""Runs the jobs of one rank: carries out in threads what the interleaver decides.

The interleaver makes all the decisions, but as a pure state machine, it can't start a thread or
wait. The driver connects it to the real world. Every thread of a run (two for the compute lane, one
for the exchange lane, and one per job) posts what has happened as an event to `Driver.post`. The
driver passes the event on to the interleaver, and hands the resulting instructions to the threads
that carry them out.

`post` takes a lock, and holds it until the instructions are in the threads' queues. This matters
for the exchange lane, because the interleaver returns its instructions in the same order on all
ranks. If we released the lock between decision and queueing, two threads could queue their
instructions in the wrong order on one rank, and the ranks would deadlock. Apart from these queues,
the threads share next to nothing, so this one lock is enough.

To avoid deadlocks, the driver never waits for anything while it holds the lock, and it releases the
lock before passing a text to the runner's callback, which may take other locks.

In this module, a job is a `JobRecord`. The interleaver's job numbers only appear in events and
instructions.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, final

from jaxcross._link import Link
from jaxcross._pytree import PyTree
from jaxcross.health import INTERRUPTED, TERMINATED, Terminated
from jaxcross.interleave import (
    Instrument,
    Interleaver,
    JobRequest,
    Listeners,
    Policy,
    Start,
    StepGraph,
)
from jaxcross.interleave import messages as m
from jaxcross.runtime.chaos import Chaos, LateQueue
from jaxcross.runtime.collective_call import CollectiveCall
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.job_record import (
    MAX_REFUSALS,
    JobRecord,
    StepCall,
    Stopped,
)
from jaxcross.runtime.lanes import ComputeLane, ExchangeLane
from jaxcross.runtime.router import Router
from jaxcross.runtime.stall_watch import JobWaits
from jaxcross.runtime.start_gate import StartGate, StartLimit
from jaxcross.runtime.step_host import T
from jaxcross.world import Control, World

if TYPE_CHECKING:
    from jaxcross.health import FlightRecorder
    from jaxcross.program import Execution


class Driver:
    """One run of several jobs on this rank.

    Args:
        world: Provides the rank, the number of ranks, control messages and the watchdog.
        jobs: For each job, its name and a function that creates its thread. The thread must end by
            calling `job_returned` or `job_raised`.
        policy: Chooses the next job on each lane.
        depth: Maximum number of compute segments on the device at once.
        listeners: Receive all spans and notes of the run.
        link: An emulated link, if any.
        chaos: Delays all threads at random, for tests.
        start: Whether the jobs make their first steps only once all of them are ready to.
        on_text: Called with each text that any rank has submitted, in the same order on all ranks.
            May call `join`.
        clock_ns: `time.monotonic_ns`, or a test's clock.

    Attributes:
        records: The jobs with which the run began, in the order of `jobs`.
        router: Holds the jobs by number, and carries out instructions on them.
        start_gate: Keeps the jobs in order at a joint start.
        interrupt: The first exception that a signal handler has raised on this rank. All that the
            other ranks get to see is that the run stops.
        terminated: Whether this rank has received SIGTERM.
    """

    def __init__(
        self,
        *,
        world: World,
        jobs: Sequence[tuple[str, Callable[[], threading.Thread]]],
        policy: Policy,
        depth: int,
        listeners: Listeners | None = None,
        link: Link | None = None,
        chaos: Chaos | None = None,
        start: Start = "as_ready",
        on_text: Callable[[str], None] = lambda text: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.world = world
        self.clock_ns = clock_ns
        self.link = link
        self.listeners = listeners or Listeners()
        self._chaos = chaos
        self._start: Start = start
        self._start_limit = StartLimit()
        self.records = tuple(
            JobRecord(number, name, thread, self.queue())
            for number, (name, thread) in enumerate(jobs)
        )
        self._abandoned: set[threading.Thread] = set()
        self._on_text = on_text
        self._early: list[m.Event] | None = []  # events that were posted before the run began
        self._interleaver = Interleaver(len(jobs), policy, depth)
        self._lock = threading.RLock()
        self.start_gate = StartGate(self._lock, self._interleaver.coming)
        self._over = threading.Event()
        self._fatal: BaseException | None = None
        # Exceptions from signal handlers that the main thread hasn't processed yet.
        self._held: deque[BaseException] = deque()
        self.interrupt: BaseException | None = None
        self.terminated = False
        self._compute = ComputeLane(self)
        self._exchange = ExchangeLane(self)
        self.router = Router(
            self.records,
            self._compute.put,
            self._exchange.put,
            listeners=self.listeners,
            rank=world.rank,
            ranks=world.size,
        )
        self._job_waits = JobWaits(world)

    def stopping(self, job: JobRecord) -> bool:
        """Whether all ranks know about a request to stop the job, or to stop all jobs."""
        shared = self._interleaver.shared
        mine = shared.jobs.get(job.number)
        return shared.stopping or (mine is not None and mine.stop)

    def run(self, held: deque[BaseException]) -> bool:
        """Runs all jobs to their end. Waits and communicates. All ranks return after the same vote.

        Args:
            held: The deque that receives the exceptions of signal handlers during the run; see
                `jaxcross.health.signals.defer_signals`.

        Returns:
            Whether the run was stopped by a signal on any rank. Identical across ranks.

        Raises:
            InternalError: A lane broke, and this is the only rank. With several ranks, a broken
                lane aborts all of them instead.
        """
        self._held = held
        self._run()
        if self._fatal is not None:
            raise self._fatal
        return self._interleaver.shared.stopping

    def _run(self) -> None:
        # Start the lanes first, because the very first event may already result in instructions for
        # them.
        self._compute.start()
        self._exchange.start()
        # Jobs and requests may have been added before the run began. Process these early events
        # with the lock held, so that events from other threads come after them. Otherwise a request
        # to stop a job could overtake the event that adds the job. None of the early events
        # delivers a text, so no callback is called with the lock held.
        with self._lock:
            early = self._early or []
            self._early = None
            for event in (m.RunStarted(together=self._start == "together"), *early):
                self.post(event)
        self._wait_for(self._over.is_set, self._over.wait)
        # All jobs have ended by now, but their threads may still be busy, e.g. reading back the
        # last metrics, so wait for them. Skip this if the run broke, because some of the threads
        # may never end.
        if self._fatal is None:
            for thread in self.router.threads:
                self._wait_for(
                    lambda t=thread: not t.is_alive() or t in self._abandoned, thread.join
                )
        self._job_waits.look({})
        self._exchange.close()
        self._compute.close()

    def _wait_for(self, over: Callable[[], bool], wait: Callable[[float], object]) -> None:
        # This is the main thread, which has to handle interrupts, so it must never wait without a
        # timeout. It wakes up five times per second, and while it's at it, checks whether any job
        # has been waiting for too long.
        while not over():
            wait(0.2)
            self._look_at_waits()
            while self._held:
                self._interrupted(self._held.popleft())

    def _look_at_waits(self) -> None:
        jobs = self.router.jobs
        with self._lock:
            found = {} if self._fatal is not None else self._interleaver.pending_waits()
            waits = {jobs[number].name: wait for number, wait in found.items() if number in jobs}
            coming = {number: jobs[number].preparing > 0 for number in self._interleaver.coming()}
            late = [
                jobs[number] for number in self._start_limit.look(self.clock_ns() / 1e9, coming)
            ]
            paused = [] if self._fatal is not None else self._interleaver.all_paused()
            names = [jobs[number].name for number in paused if number in jobs]
            text = self.router.paused_run.look(self.clock_ns() / 1e9, names)
        if text is not None:
            self.submit(text)
        self._job_waits.look(waits)
        for job in late:
            self.excuse_start(job, late=True)

    def _interrupted(self, interrupt: BaseException) -> None:
        self.terminated |= isinstance(interrupt, Terminated)
        # The first interrupt stops the run gracefully, as soon as its jobs are between two steps,
        # which may take a while. A second interrupt aborts the run on the spot.
        if self.interrupt is not None:
            self.world.abort(
                "interrupted twice", code=TERMINATED if self.terminated else INTERRUPTED
            )
        self.interrupt = interrupt
        for job in tuple(self.router.jobs.values()):
            if job.status is None:  # skip jobs that another rank's interrupt has already stopped
                self.listeners.note(job=job.name, kind="status", value="stopping after this step")
        self.post(m.StopRequested())

    # Events and instructions.

    def queue(self) -> SimpleQueue[Any]:
        """Returns a queue for one of the run's threads, with random delays if requested."""
        return SimpleQueue() if self._chaos is None else LateQueue(self._chaos)

    def post(self, event: m.Event) -> None:
        """Passes an event to the interleaver, and the resulting instructions to their threads.

        May wait for the lock, but not for anything that an instruction does.
        """
        if self._chaos is not None:
            self._chaos.pause()
        try:
            with self._lock:
                texts = self._follow(event)
                stops = self.router.paused_run.take_end()
            # Release the lock before calling back, to avoid a deadlock: the callback may take
            # another lock, e.g. the runner's, and whoever holds it may be waiting for ours.
            for text in texts:
                self._on_text(text)
            if stops:
                self.post(m.StopRequested())
        except Exception as error:
            # We may be in any thread, even a job's. The error concerns the whole run, so don't
            # raise it here.
            self.fail(error)

    def _follow(self, event: m.Event) -> list[str]:
        """Carries out the interleaver's instructions for an event. Returns the texts to deliver.

        The caller must hold the lock.
        """
        if self._early is not None:
            self._early.append(event)
            return []
        if self._fatal is not None:
            return []  # in a broken run, no job begins
        # Queue the instructions before the lock is released, so that all queues are in the
        # interleaver's order.
        for instruction in self._interleaver.handle(event):
            self.router.route(instruction)
        self.start_gate.look()
        texts = self.router.texts
        self.router.texts = []
        return texts

    # For the runner and for code that holds a job. Callable from any thread.

    def join(
        self,
        name: str,
        thread: Callable[[], threading.Thread],
        attach: Callable[[Driver, JobRecord], None],
    ) -> JobRecord | None:
        """Adds a job during the run. Doesn't wait; the job joins once all ranks have added it.

        Args:
            name: The job's name.
            thread: Makes the job's thread.
            attach: Called with this driver and the job's record, before the job can join.

        Returns:
            The job's record, or None if the run has ended.
        """
        job = JobRecord(-1, name, thread, self.queue())
        # Check that the run is in progress and post the event under a single lock. Otherwise the
        # run could end in between, and the job would never join.
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return None
            self.router.joining[name] = job
            attach(self, job)
            self.post(m.JobAdded(name))
        return job

    def submit(self, text: str) -> bool:
        """Submits a text to all ranks. Doesn't wait. Returns whether the run is in progress."""
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return False
            self.post(m.TextSubmitted(text))
        return True

    def request(self, job: JobRecord, request: JobRequest) -> None:
        """Sends a request about a job to all ranks with the next vote. Doesn't wait."""
        with self._lock:
            self.post(m.JobRequested(job.number, job.name, request))

    # For job threads.

    def call(
        self,
        job: JobRecord,
        graph: StepGraph,
        execution: Execution,
        *,
        in_step: bool = True,
    ) -> PyTree:
        """Runs one call of a step. Waits until the call's last segment has been dispatched.

        Args:
            job: The job that calls.
            graph: The dependences between the step's segments.
            execution: Holds the call's values and runs its segments.
            in_step: Whether reports count the call as one of the job's steps.

        Returns:
            The step's results. Some of them may not be computed yet.
        """
        # Set `job.call` before posting the event. As soon as the event is posted, the lanes'
        # threads may start on the call's first segment, and this is where they look up the call.
        job.calls += 1
        job.call = StepCall(job.name, job.calls, graph, execution, self.clock_ns(), in_step)
        try:
            answer = self._ask(job, m.StepCalled(job.number, graph, in_step))
        finally:
            job.call = None
        assert isinstance(answer, m.StepReturned)
        job.skipped += answer.skipped and in_step
        return execution.outputs()

    def stream_begun(self, job: JobRecord, still_open: Sequence[int]) -> None:
        """Records that the job has opened another stream of batches.

        `still_open` are earlier streams that the job may still read.
        """
        self.post(m.StreamBegun(job.number, tuple(still_open)))

    def batches_ready(self, job: JobRecord, stream: int, count: int) -> None:
        """Records that this rank has prepared `count` batches of a stream so far."""
        self.post(m.BatchPrepared(job.number, stream, count))

    def batch_dropped(self, job: JobRecord) -> None:
        """Records that a batch was skipped on the way to the position of a restart."""
        self.post(m.BatchDropped(job.number))

    def stream_ended(self, job: JobRecord, stream: int, count: int) -> None:
        """Records that a stream has `count` batches in total on this rank."""
        self.post(m.StreamEnded(job.number, stream, count))

    def want_batch(self, job: JobRecord, stream: int, index: int) -> bool:
        """Waits until either all ranks have this batch, or a rank's data has ended before it.

        Returns whether all ranks have the batch.
        """
        answer = self._ask(job, m.BatchWanted(job.number, stream, index))
        assert isinstance(answer, m.BatchGranted)
        return answer.more

    def run_on_all_ranks(
        self, job: JobRecord, label: str, work: Callable[[Control], T], text: str = ""
    ) -> T:
        """Runs `work(control)` on the exchange lanes of all ranks at once. Waits for all ranks.

        Returns what the work returns and raises what it raises.

        Args:
            job: The job.
            label: See `SyncWanted`.
            work: The work.
            text: See `SyncWanted`.
        """
        collective = CollectiveCall(label, work)
        job.collective = collective
        answer = self._ask(job, m.SyncWanted(job.number, label, text))
        assert isinstance(answer, m.SyncReturned)
        job.is_only_job = answer.is_only_job
        job.collective = None
        return collective.result()

    def _ask(self, job: JobRecord, event: m.Event) -> m.Instruction:
        """Posts an event of a job's thread, and waits for the interleaver's answer.

        Raises:
            Stopped: The job was stopped, without an error.
            JobError, ExchangeError: The job has failed with this error.
        """
        self.post(event)
        # When a run breaks, each job's thread gets one last answer. An earlier call may already
        # have taken it from the queue, and there won't be another, so don't wait for it.
        answer = job.answers.get() if self._fatal is None else m.Raised(job.number)
        if not isinstance(answer, m.Raised):
            return answer
        # The job's function may catch every exception. After the job has ended, it would keep
        # calling its step and getting the same exception, and `Runner.run` would wait for its
        # thread forever. So after a certain number of such calls, we give up on the thread.
        job.refusals += 1
        if job.refusals > MAX_REFUSALS:
            job.abandon()
        if job.error is not None:
            raise job.error
        raise Stopped

    def resumed(self, job: JobRecord, step: int) -> None:
        """Sets how many steps an earlier run has made, so spans and errors count from there."""
        self.post(m.StepsRestored(job.number, step))

    def excuse_start(self, job: JobRecord, *, late: bool = False) -> None:
        """Lets the other jobs begin without this job at a joint start. Doesn't wait.

        With `late`, that's because the job is taking too long.
        """
        if not job.excused:
            job.excused = True
            self.post(m.StartExcused(job.number, late))

    def first_step_made(self, job: JobRecord) -> None:
        """Records that the job has made its first step without using the lanes."""
        self.post(m.FirstStepMade(job.number))

    def job_returned(self, job: JobRecord) -> None:
        """Records that the job's function has returned."""
        self.post(m.JobReturned(job.number))

    def job_raised(self, job: JobRecord, error: BaseException, where: str) -> None:
        """Records that the job's function, or the iterator of its data, has raised an exception."""
        if job.status is None and job.cause is None:
            job.cause = error
        self.post(m.JobRaised(job.number, f"{where}: {describe(error)}"))

    def abandon(self, thread: threading.Thread) -> None:
        """Lets the run end without waiting for this thread, which would never end."""
        self._abandoned.add(thread)

    def release(self, job: JobRecord) -> None:
        """Drops a job's record. The job has ended on all ranks, and its thread is ending."""
        # The job's thread calls this as soon as the job's `done` event is set. At that point, the
        # method that set the event may not have returned yet. It holds the lock, so taking the lock
        # waits for it.
        with self._lock:
            if self.router.jobs.pop(job.number, None) is not None:
                job.thread = None  # the job's context keeps the record alive

    # For lanes.

    def announcement(self) -> str:
        """Returns this rank's announcement of pending jobs and texts, for all ranks."""
        with self._lock:
            return self._interleaver.announcement()

    def finished(self) -> None:
        """Ends the run, after the exchange lane has carried out its last instruction."""
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Ends the run because a lane is broken, so no job can continue.

        If there are other ranks, aborts all ranks.
        """
        # While we hold the lock, no other thread can carry out instructions.
        with self._lock:
            if self._fatal is None:
                if self.world.size > 1:
                    text = "".join(traceback.format_exception(error))
                    self.world.abort(f"a lane of the runner broke\n{text}")
                self.router.break_off(error)
                self.start_gate.open()
                # Set `_fatal` last. A job's thread may read it without the lock and, if it's set,
                # raise the error in the job's record, which therefore has to be there already.
                self._fatal = error
        self._over.set()


@final
class FlightNotes(Instrument):
    """Writes job statuses to the event file, so that a post-mortem shows what was running.

    Leaves out losses, because there's one on every step.
    """

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        if kind != "loss":
            self._flight.note(f"{kind}: {value}", job=job, step=step)
