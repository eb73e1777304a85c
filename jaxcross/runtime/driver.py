"""Carries out what the interleaver decides: one thread a lane, one that waits for the device, one a job.

Every event passes through `Driver.post`, under one lock, and its instructions are queued for their threads under the
same lock: their order is the interleaver's. Nothing else is shared but those queues.

Jobs are `JobRecord`s here. Their numbers are the interleaver's, and are used in events and instructions only.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from jaxcross._pytree import PyTree
from jaxcross.health.abort import INTERRUPTED, TERMINATED, Terminated
from jaxcross.interleave import messages as m
from jaxcross.interleave.instrument import Listeners
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import Policy
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest
from jaxcross.runtime.chaos import Chaos, LateQueue
from jaxcross.runtime.collective_call import CollectiveCall
from jaxcross.runtime.emulated_link import Link
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.job_record import MAX_REFUSALS, Execution, JobRecord, NonFinite, StepCall, Stopped
from jaxcross.runtime.joint_start import Start, StartGate, StartLimit
from jaxcross.runtime.lanes import ComputeLane, ExchangeLane
from jaxcross.runtime.router import Router
from jaxcross.runtime.stall_watch import JobWaits
from jaxcross.runtime.step_host import T
from jaxcross.world import World
from jaxcross.world.control_plane import Control


class Driver:
    """One run of several jobs on this rank.

    Args:
        world: Rank, size, control messages, watchdog.
        jobs: The name of each job and how to make its thread, which calls `job_returned` or `job_raised` at its end.
        policy: Decides whose turn it is.
        depth: Compute segments on the device at once.
        listeners: Receive every span and note.
        link: An emulated link, if any.
        chaos: Delays all threads now and then, for tests.
        start: Whether the jobs make their first steps once all of them are ready.
        on_text: Called on every rank, in one order, with each text that some rank submitted. May call `join`.
        clock_ns: `time.monotonic_ns`, or a test's clock.

    Attributes:
        records: The jobs of the run in the order of `jobs`, without those that were added later.
        router: The jobs by their numbers, and what instructions do to them.
        start_gate: Holds jobs at a joint start.
        interrupt: The first exception of a signal's handler on this rank. Others know of it if the run was stopped.
        terminated: Whether SIGTERM came to this rank.
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
        start: Start = "as ready",
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
            JobRecord(number, name, thread, self.queue()) for number, (name, thread) in enumerate(jobs)
        )
        self._abandoned: set[threading.Thread] = set()
        self._on_text = on_text
        self._early: list[m.Event] | None = []  # events that came before the run began
        self._interleaver = Interleaver(len(jobs), policy, depth)
        self._lock = threading.RLock()
        self.start_gate = StartGate(self._lock, self._interleaver.coming)
        self._over = threading.Event()
        self._fatal: BaseException | None = None
        self._held: deque[BaseException] = deque()  # exceptions of signal handlers, not looked at yet
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
        """Whether all ranks know of a request to stop the job, or all jobs."""
        shared = self._interleaver.shared
        mine = shared.jobs.get(job.number)
        return shared.stopping or (mine is not None and mine.stop)

    def run(self, held: deque[BaseException]) -> bool:
        """Runs all jobs to their end. Waits; communicates; ends on every rank after the same vote.

        Args:
            held: Receives what signal handlers raise during the run: see
                `jaxcross.health.deferred_signals.defer_signals`.

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
        # The lanes first: from the first event on, instructions find their threads.
        self._compute.start()
        self._exchange.start()
        # Under the lock, events of other threads queue up after these: a request must not overtake its job's addition.
        # None of these events delivers a text, so no callback runs in here.
        with self._lock:
            early, self._early = self._early or [], None
            for event in (m.RunStarted(together=self._start == "together"), *early):
                self.post(event)
        self._wait_for(self._over.is_set, self._over.wait)
        # Job threads read back metrics and close their loops after the last vote. In a broken run some never end.
        if self._fatal is None:
            for thread in self.router.threads:
                self._wait_for(lambda t=thread: not t.is_alive() or t in self._abandoned, thread.join)
        self._job_waits.look({})
        self._exchange.close()
        self._compute.close()

    def _wait_for(self, over: Callable[[], bool], wait: Callable[[float], object]) -> None:
        # The main thread wakes up five times a second, for interrupts and for jobs that wait too long.
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
            late = [jobs[number] for number in self._start_limit.look(self.clock_ns() / 1e9, coming)]
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
        # A second interrupt means that stopping after this step takes too long for the user.
        if self.interrupt is not None:
            self.world.abort("interrupted twice", code=TERMINATED if self.terminated else INTERRUPTED)
        self.interrupt = interrupt
        for job in tuple(self.router.jobs.values()):
            if job.status is None:  # not one that another rank's interrupt has stopped already
                self.listeners.note(job=job.name, kind="status", value="stopping after this step")
        self.post(m.StopRequested())

    # Events and instructions.

    def queue(self) -> SimpleQueue[Any]:
        """Returns a queue for one of the run's threads."""
        return SimpleQueue() if self._chaos is None else LateQueue(self._chaos)

    def post(self, event: m.Event) -> None:
        """Hands an event to the interleaver and its instructions to their threads. Never waits for work."""
        if self._chaos is not None:
            self._chaos.pause()
        try:
            with self._lock:
                texts = self._follow(event)
                stops = self.router.paused_run.take_end()
            # Not under the lock: the callback may take locks of its own, as the runner's.
            for text in texts:
                self._on_text(text)
            if stops:
                self.post(m.StopRequested())
        except Exception as error:
            # Any thread may post; an error here is the run's, not that thread's.
            self.fail(error)

    def _follow(self, event: m.Event) -> list[str]:
        """Does what the interleaver answers to an event; returns the texts to deliver. Called under the lock."""
        if self._early is not None:
            self._early.append(event)
            return []
        if self._fatal is not None:
            return []  # no job begins in a run that broke
        # In the order given, and before the lock is free: queues then have the interleaver's order.
        for instruction in self._interleaver.handle(event):
            self.router.route(instruction)
        self.start_gate.look()
        texts, self.router.texts = self.router.texts, []
        return texts

    # For the runner, and for code that holds a job: in any thread.

    def join(
        self, name: str, thread: Callable[[], threading.Thread], attach: Callable[[Driver, JobRecord], None]
    ) -> JobRecord | None:
        """Adds a job while the run goes on. Does not wait: the job joins once all ranks have added it.

        Args:
            name: The job's name.
            thread: How to make its thread.
            attach: Called with its record before it joins.

        Returns:
            The job's record; None if the run is over.
        """
        job = JobRecord(-1, name, thread, self.queue())
        # One lock for the look and the post: the run cannot end between them.
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return None
            self.router.joining[name] = job
            attach(self, job)
            self.post(m.JobAdded(name))
        return job

    def submit(self, text: str) -> bool:
        """Delivers the text on all ranks. Does not wait. Returns whether the run still goes on."""
        with self._lock:
            if self._interleaver.finished or self._fatal is not None:
                return False
            self.post(m.TextSubmitted(text))
        return True

    def request(self, job: JobRecord, request: JobRequest) -> None:
        """Passes a request for a job to all ranks, in the next vote. Does not wait."""
        with self._lock:
            self.post(m.JobRequested(job.number, job.name, request))

    # For job threads.

    def call(
        self,
        job: JobRecord,
        graph: StepGraph,
        execution: Execution,
        nonfinite: NonFinite = "ignore",
        *,
        in_step: bool = True,
    ) -> PyTree:
        """Runs one call of a step. Waits until its last segment was dispatched.

        Args:
            job: The caller.
            graph: The step's segments.
            execution: The call's values.
            nonfinite: Policy for exchanged values that are not finite.
            in_step: Whether reports count the call as a step of the job.

        Returns:
            The step's results, perhaps not computed yet.
        """
        # Before the event: the lanes may get the first segment before `_ask` returns.
        job.calls += 1
        job.call = StepCall(job.name, job.calls, graph, execution, self.clock_ns(), nonfinite, in_step)
        try:
            answer = self._ask(job, m.StepCalled(job.number, graph, in_step))
        finally:
            job.call = None
        assert isinstance(answer, m.StepReturned)
        job.skipped += answer.skipped and in_step
        return execution.outputs()

    def stream_begun(self, job: JobRecord, still_open: Sequence[int]) -> None:
        """Notes that the job opens another stream of batches, and which of the earlier ones it may still read."""
        self.post(m.StreamBegun(job.number, tuple(still_open)))

    def batches_ready(self, job: JobRecord, stream: int, count: int) -> None:
        """Notes that so many batches of a stream are or were ready on this rank."""
        self.post(m.BatchPrepared(job.number, stream, count))

    def batch_dropped(self, job: JobRecord) -> None:
        """Notes that one more batch was skipped on the way to where a restart goes on."""
        self.post(m.BatchDropped(job.number))

    def stream_ended(self, job: JobRecord, stream: int, count: int) -> None:
        """Notes that a stream has so many batches in all on this rank."""
        self.post(m.StreamEnded(job.number, stream, count))

    def want_batch(self, job: JobRecord, stream: int, index: int) -> bool:
        """Whether every rank has this batch (or some rank's data ended before it). Waits for the ranks."""
        answer = self._ask(job, m.BatchWanted(job.number, stream, index))
        assert isinstance(answer, m.BatchGranted)
        return answer.more

    def run_on_all_ranks(self, job: JobRecord, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on the exchange lane of every rank at once, and returns or raises what it does."""
        collective = CollectiveCall(label, work)
        job.collective = collective
        answer = self._ask(job, m.SyncWanted(job.number, label))
        assert isinstance(answer, m.SyncReturned)
        job.is_only_job = answer.is_only_job
        job.collective = None
        return collective.result()

    def _ask(self, job: JobRecord, event: m.Event) -> m.Instruction:
        """Posts a job's event and waits for the answer to it.

        Raises:
            Stopped: The job is over without an error.
            JobError, ExchangeError: The job is over.
        """
        self.post(event)
        # In a broken run `fail` has put an answer, but perhaps an earlier call took it.
        answer = job.answers.get() if self._fatal is None else m.Raised(job.number)
        if not isinstance(answer, m.Raised):
            return answer
        # A function that catches every exception would call again for ever, and `Runner.run` wait for its thread.
        job.refusals += 1
        if job.refusals > MAX_REFUSALS:
            job.abandon()
        if job.error is not None:
            raise job.error
        raise Stopped

    def resumed(self, job: JobRecord, step: int) -> None:
        """Makes the spans and errors of a job count from `step`, the steps that an earlier run made."""
        self.post(m.StepsRestored(job.number, step))

    def excuse_start(self, job: JobRecord, *, late: bool = False) -> None:
        """Lets the other jobs begin without this one, at a joint start. Does not wait. `late`: it takes too long."""
        if not job.excused:
            job.excused = True
            self.post(m.StartExcused(job.number, late))

    def first_step_made(self, job: JobRecord) -> None:
        """Notes that the job has made its first step without the lanes."""
        self.post(m.FirstStepMade(job.number))

    def job_returned(self, job: JobRecord) -> None:
        """Notes that the job's function returned."""
        self.post(m.JobReturned(job.number))

    def job_raised(self, job: JobRecord, error: BaseException, where: str) -> None:
        """Notes that the job's function, or its data, raised."""
        if job.status is None and job.cause is None:
            job.cause = error
        self.post(m.JobRaised(job.number, f"{where}: {describe(error)}"))

    def abandon(self, thread: threading.Thread) -> None:
        """Makes the run end without this thread, which will not end."""
        self._abandoned.add(thread)

    def release(self, job: JobRecord) -> None:
        """Drops a job that is over on all ranks, as its thread ends."""
        # The lock: the thread may run on as soon as `done` is set, while `_finish` has not come to its end.
        with self._lock:
            if self.router.jobs.pop(job.number, None) is not None:
                job.thread = None  # the job's context keeps the record

    # For lanes.

    def announcement(self) -> str:
        """Returns this rank's announcement of jobs that may join, for all ranks."""
        with self._lock:
            return self._interleaver.announcement()

    def finished(self) -> None:
        """Ends the run: the exchange lane has done its last instruction."""
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Ends the run, because a lane broke and can serve no job any more. Aborts all ranks where there are others."""
        # The lock: an instruction that is being followed is followed to its end, and none after it.
        with self._lock:
            if self._fatal is None:
                if self.world.size > 1:
                    text = "".join(traceback.format_exception(error))
                    self.world.abort(f"a lane of the runner broke\n{text}")
                self.router.break_off(error)
                self.start_gate.open()
                # Last: a job that sees this without the lock raises the error that its record has got by now.
                self._fatal = error
        self._over.set()
