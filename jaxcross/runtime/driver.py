"""Carries out what the interleaver decides.

There is one thread per lane, one that waits for the device, and one per job. Every event passes
through `Driver.post`, which takes one lock. The resulting instructions are queued for their threads
under the same lock, so they are queued in the interleaver's order. The threads share nothing except
these queues.

Here, a job is a `JobRecord`. The interleaver's job numbers appear only in events and instructions.
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
        world: Provides rank, size, control messages and the watchdog.
        jobs: Each job's name, and a function that makes its thread. The thread must call
            `job_returned` or `job_raised` at its end.
        policy: Decides whose turn it is.
        depth: Number of compute segments on the device at once.
        listeners: Receive all spans and notes.
        link: An emulated link, if any.
        chaos: Delays all threads at random, for tests.
        start: Whether the jobs make their first steps only once all of them are ready.
        on_text: Called with each text that some rank submitted, on all ranks in the same order. May
            call `join`.
        clock_ns: `time.monotonic_ns`, or a test's clock.

    Attributes:
        records: The run's initial jobs in the order of `jobs`, without those that were added later.
        router: Holds the jobs by number, and carries out instructions on them.
        start_gate: Holds jobs at a joint start.
        interrupt: The first exception that a signal handler raised on this rank. Other ranks learn
            of it only because the run stops.
        terminated: Whether this rank received SIGTERM.
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
        # Exceptions from signal handlers that haven't been processed yet.
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
        """Whether a request to stop the job, or all jobs, has reached all ranks."""
        shared = self._interleaver.shared
        mine = shared.jobs.get(job.number)
        return shared.stopping or (mine is not None and mine.stop)

    def run(self, held: deque[BaseException]) -> bool:
        """Runs all jobs to their end. Waits and communicates. All ranks return after the same vote.

        Args:
            held: Receives what signal handlers raise during the run; see
                `jaxcross.health.signals.defer_signals`.

        Returns:
            Whether a signal on any rank stopped the run. Identical across ranks.

        Raises:
            InternalError: A lane broke, and there is only one rank. With several ranks, a broken
                lane aborts all of them.
        """
        self._held = held
        self._run()
        if self._fatal is not None:
            raise self._fatal
        return self._interleaver.shared.stopping

    def _run(self) -> None:
        # Start the lanes first, because instructions may follow from the very first event.
        self._compute.start()
        self._exchange.start()
        # While we hold the lock, other threads' events queue up behind these early ones. Otherwise
        # a request could overtake the addition of its job. None of these events delivers a text, so
        # no callback runs while we hold the lock.
        with self._lock:
            early = self._early or []
            self._early = None
            for event in (m.RunStarted(together=self._start == "together"), *early):
                self.post(event)
        self._wait_for(self._over.is_set, self._over.wait)
        # After the last vote, job threads still read back metrics and close their loops, so wait
        # for them. In a broken run, some of them never end.
        if self._fatal is None:
            for thread in self.router.threads:
                self._wait_for(
                    lambda t=thread: not t.is_alive() or t in self._abandoned, thread.join
                )
        self._job_waits.look({})
        self._exchange.close()
        self._compute.close()

    def _wait_for(self, over: Callable[[], bool], wait: Callable[[float], object]) -> None:
        # Wake up five times per second, to handle interrupts and to look for jobs that wait too
        # long.
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
        # A second interrupt means that the user doesn't want to wait for the current step to end.
        if self.interrupt is not None:
            self.world.abort(
                "interrupted twice", code=TERMINATED if self.terminated else INTERRUPTED
            )
        self.interrupt = interrupt
        for job in tuple(self.router.jobs.values()):
            if job.status is None:  # skip jobs that another rank's interrupt has stopped already
                self.listeners.note(job=job.name, kind="status", value="stopping after this step")
        self.post(m.StopRequested())

    # Events and instructions.

    def queue(self) -> SimpleQueue[Any]:
        """Returns a queue for one of the run's threads."""
        return SimpleQueue() if self._chaos is None else LateQueue(self._chaos)

    def post(self, event: m.Event) -> None:
        """Passes an event to the interleaver, and the resulting instructions to their threads.

        Never waits for work.
        """
        if self._chaos is not None:
            self._chaos.pause()
        try:
            with self._lock:
                texts = self._follow(event)
                stops = self.router.paused_run.take_end()
            # Call back without the lock, because the callback may take other locks, e.g. the
            # runner's.
            for text in texts:
                self._on_text(text)
            if stops:
                self.post(m.StopRequested())
        except Exception as error:
            # Any thread may post, so an error here is the run's rather than that thread's.
            self.fail(error)

    def _follow(self, event: m.Event) -> list[str]:
        """Carries out what the interleaver answers to an event, and returns the texts to deliver.

        The caller must hold the lock.
        """
        if self._early is not None:
            self._early.append(event)
            return []
        if self._fatal is not None:
            return []  # in a broken run, no job begins
        # Route the instructions before releasing the lock, so that all queues are in the
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
        """Adds a job during the run. Doesn't wait: the job joins once all ranks have added it.

        Args:
            name: The job's name.
            thread: Makes the job's thread.
            attach: Called with this driver and the job's record before the job joins.

        Returns:
            The job's record, or None if the run has ended.
        """
        job = JobRecord(-1, name, thread, self.queue())
        # Check and post under one lock, so that the run can't end in between.
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return None
            self.router.joining[name] = job
            attach(self, job)
            self.post(m.JobAdded(name))
        return job

    def submit(self, text: str) -> bool:
        """Delivers a text on all ranks. Doesn't wait. Returns whether the run is in progress."""
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return False
            self.post(m.TextSubmitted(text))
        return True

    def request(self, job: JobRecord, request: JobRequest) -> None:
        """Sends a request about a job to all ranks, in the next vote. Doesn't wait."""
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
        """Runs one call of a step. Waits until its last segment has been dispatched.

        Args:
            job: The job that calls.
            graph: The step's segments.
            execution: The call's values.
            in_step: Whether reports count the call as a step of the job.

        Returns:
            The step's results, which may not be computed yet.
        """
        # Set the call before posting the event, because the lanes may get its first segment before
        # `_ask` returns.
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
        """Records that the job opens another stream of batches.

        `still_open` are the earlier streams that it may still read.
        """
        self.post(m.StreamBegun(job.number, tuple(still_open)))

    def batches_ready(self, job: JobRecord, stream: int, count: int) -> None:
        """Records that `count` batches of a stream have been ready on this rank so far."""
        self.post(m.BatchPrepared(job.number, stream, count))

    def batch_dropped(self, job: JobRecord) -> None:
        """Records that a batch was skipped to get to a restart's position."""
        self.post(m.BatchDropped(job.number))

    def stream_ended(self, job: JobRecord, stream: int, count: int) -> None:
        """Records that a stream has `count` batches in total on this rank."""
        self.post(m.StreamEnded(job.number, stream, count))

    def want_batch(self, job: JobRecord, stream: int, index: int) -> bool:
        """Waits until every rank has this batch or some rank's data has ended before it.

        Returns whether every rank has it.
        """
        answer = self._ask(job, m.BatchWanted(job.number, stream, index))
        assert isinstance(answer, m.BatchGranted)
        return answer.more

    def run_on_all_ranks(self, job: JobRecord, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on the exchange lanes of all ranks at once.

        Returns what the work returns and raises what it raises.
        """
        collective = CollectiveCall(label, work)
        job.collective = collective
        answer = self._ask(job, m.SyncWanted(job.number, label))
        assert isinstance(answer, m.SyncReturned)
        job.is_only_job = answer.is_only_job
        job.collective = None
        return collective.result()

    def _ask(self, job: JobRecord, event: m.Event) -> m.Instruction:
        """Posts a job's event and waits for the answer.

        Raises:
            Stopped: The job has ended without an error.
            JobError, ExchangeError: The job has ended with this error.
        """
        self.post(event)
        # In a broken run, `fail` has queued an answer, but an earlier call may have taken it
        # already.
        answer = job.answers.get() if self._fatal is None else m.Raised(job.number)
        if not isinstance(answer, m.Raised):
            return answer
        # A function that catches every exception would keep calling forever, and `Runner.run` would
        # wait for its thread. So abandon the thread after a number of refusals.
        job.refusals += 1
        if job.refusals > MAX_REFUSALS:
            job.abandon()
        if job.error is not None:
            raise job.error
        raise Stopped

    def resumed(self, job: JobRecord, step: int) -> None:
        """Makes the job's spans and errors count from `step`, the steps made by an earlier run."""
        self.post(m.StepsRestored(job.number, step))

    def excuse_start(self, job: JobRecord, *, late: bool = False) -> None:
        """At a joint start, lets the other jobs begin without this one. Doesn't wait.

        `late` says that the job takes too long.
        """
        if not job.excused:
            job.excused = True
            self.post(m.StartExcused(job.number, late))

    def first_step_made(self, job: JobRecord) -> None:
        """Records that the job has made its first step without the lanes."""
        self.post(m.FirstStepMade(job.number))

    def job_returned(self, job: JobRecord) -> None:
        """Records that the job's function returned."""
        self.post(m.JobReturned(job.number))

    def job_raised(self, job: JobRecord, error: BaseException, where: str) -> None:
        """Records that the job's function or its data raised."""
        if job.status is None and job.cause is None:
            job.cause = error
        self.post(m.JobRaised(job.number, f"{where}: {describe(error)}"))

    def abandon(self, thread: threading.Thread) -> None:
        """Lets the run end without waiting for this thread, which won't end."""
        self._abandoned.add(thread)

    def release(self, job: JobRecord) -> None:
        """Drops a job that has ended on all ranks, when its thread ends."""
        # Take the lock: the thread may continue as soon as `done` is set, even though `_finish`
        # hasn't returned yet.
        with self._lock:
            if self.router.jobs.pop(job.number, None) is not None:
                job.thread = None  # the job's context keeps the record alive

    # For lanes.

    def announcement(self) -> str:
        """Returns this rank's announcement of jobs that may join, for all ranks."""
        with self._lock:
            return self._interleaver.announcement()

    def finished(self) -> None:
        """Ends the run: the exchange lane has carried out its last instruction."""
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Ends the run, because a lane broke and can't serve any job any more.

        If there are other ranks, aborts all of them.
        """
        # Take the lock, so that an instruction in progress is carried out completely, and none
        # after it.
        with self._lock:
            if self._fatal is None:
                if self.world.size > 1:
                    text = "".join(traceback.format_exception(error))
                    self.world.abort(f"a lane of the runner broke\n{text}")
                self.router.break_off(error)
                self.start_gate.open()
                # Set this last: a job that reads it without the lock raises the error that its
                # record has got by now.
                self._fatal = error
        self._over.set()


@final
class FlightNotes(Instrument):
    """Writes job statuses to the event file, so that a post-mortem shows what ran.

    Leaves out the losses, which come on every step.
    """

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        if kind != "loss":
            self._flight.note(f"{kind}: {value}", job=job, step=step)
