"""The runner's side of a job: its function, its place in the run, and its end.

`JobContext` is what users see of a job, and `JobHost` runs its steps. A `JobRun` owns both. It
creates the job's thread, calls the function in it, and after the end reads back what was logged,
sets the final status, and drops everything but the state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from jaxcross._endings import JobStatus
from jaxcross._pytree import PyTree
from jaxcross.checkpoint import Session
from jaxcross.errors import ExchangeError, JobError
from jaxcross.health.abort import print_error, traceback_text
from jaxcross.interleave.instrument import Listeners
from jaxcross.jobs.admission import MemoryAdmission
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.host import JobHost
from jaxcross.jobs.lifecycle import JobLifecycle, forget_locals
from jaxcross.jobs.metrics import BeginFiles, MetricLog
from jaxcross.jobs.resumption import Resumption
from jaxcross.jobs.stop_text import StoppedJob
from jaxcross.jobs.thread import JobThread
from jaxcross.runtime.collective_call import run_collectively
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.job_record import JobRecord
from jaxcross.runtime.stall_watch import after_run
from jaxcross.runtime.step_host import T
from jaxcross.world import World
from jaxcross.world.control_plane import Control, RunOnAllRanks

_log = logging.getLogger("jaxcross")


@final
class JobRun:
    """One job of a runner. Implements `jaxcross.jobs.lifecycle.ManagedJob`.

    Attributes:
        context: The object that the job's function receives and that `Runner.add` returns.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        listeners: Listeners,
        world: World,
        admission: MemoryAdmission,
        begin_files: BeginFiles | None = None,
    ) -> None:
        self._function = fn
        self._arguments = arguments
        self._listeners = listeners
        self._world = world
        self._life = JobLifecycle(name)
        self._host = JobHost(
            self._life,
            listeners=listeners,
            world=world,
            admission=admission,
        )
        self._metrics = MetricLog(self._note_metrics, begin_files)
        self.context = JobContext(self._life, self._host, self._metrics, world)

    @property
    def name(self) -> str:
        return self._life.name

    @property
    def step(self) -> int:
        return self._host.step

    @property
    def order(self) -> float:
        """The job's place among the jobs of the run, the same on all ranks.

        Infinite if the job never joined.
        """
        record = self._life.record
        return float("inf") if record is None or record.number < 0 else record.number

    def _note_metrics(self, step: int, values: PyTree) -> None:
        self._listeners.metrics(job=self.name, step=step, values=values)
        if isinstance(values, Mapping) and isinstance(values.get("loss"), float):
            self._listeners.note(job=self.name, kind="loss", step=step, value=values["loss"])

    def make_thread(self) -> JobThread:
        living = self._world.exchange_owner.job_threads
        main, excuse_start = partial(self._life.main, self), self._life.excuse_start
        return JobThread(self.name, main, self.context, living, excuse_start)

    def attach(self, driver: Driver, record: JobRecord, session: Session | None = None) -> None:
        """Puts the job into a run that's about to begin, or into one that's in progress.

        With a session, the job has checkpoints.
        """
        self._life.attach(
            self, driver, record, None if session is None else self._resumption(session)
        )

    def _resumption(self, session: Session) -> Resumption:
        def note(text: str) -> None:
            self._listeners.note(job=self.name, kind="status", value=text)

        evaluations = self._host.evaluations
        if session.best is not None:
            evaluations.keep_best(*session.best)
        checkpointer = session.checkpointer(self.name, note)
        return Resumption(
            checkpointer, self._host.cuts, session.every, evaluations, self._host.skipped
        )

    def call_function(self) -> None:
        """Runs the job's function in the job's thread, and keeps what it returns."""
        driver, record = self._life.running()
        result = self._function(self.context, **self._arguments)
        self._life.running()
        if result is not None:
            self._host.latest.set(result, self.step)
        del result
        self.context._finish_step()
        # What was logged must not be lost if the process dies after the last save.
        if self._life.resumption is not None:
            self.context._read_back()
        self._save_last(partial(driver.run_on_all_ranks, record))

    def give_back_memory(self) -> None:
        """Gives back what the job has booked, once a vote has ended it. Doesn't wait."""
        self._host.give_back_memory()

    def close_loops(self) -> None:
        """Ends the threads that prepare batches. Doesn't wait for them."""
        for loop in self._host.loops:
            loop.close()

    def close(self) -> None:
        """Ends the job on this rank: reads back what it logged, and drops everything but the state.

        Waits for the device. A second call is a no-op.
        """
        life, host, context = self._life, self._host, self.context
        if context.done.is_set():
            return
        record = life.record
        if record is not None:
            status = record.status and life.final_status(record.status)
            stopped_early = status == JobStatus.ENDED and host.evaluations.stop_reason
            # Other threads may read these at any time. So we set the status after the error, and it
            # never changes.
            context.error = record.error
            left = status or JobStatus.LEFT_OUT
            context.status = JobStatus.STOPPED_EARLY if stopped_early else left
            context.skipped = host.skipped.before + record.skipped
            if context.error is not None:
                if record.prints_error:
                    self._print_failure(context.error)
                forget_locals(context.error)
            if left != JobStatus.ENDED:
                host.latest.adopt_results()
            host.replicas.finish(left, self.step)
            host.latest.release()
        failure = self._metrics.read_remaining()
        # If a step failed, the job's own error is more useful than that of reading its metrics.
        if failure is not None and context.error is None:
            context._unread = failure
        if record is not None:
            status = context.status
            complete = status is not None and status.is_complete
            done = record.status == JobStatus.ENDED and complete
            self._listeners.note(
                job=self.name,
                kind="done" if done else "closed",
                step=self.step,
                value=status,
            )
        # Free the memory: the arguments hold data and steps, the steps hold their constants, and
        # the loops may hold a batch.
        life.detach()
        self._function, self._arguments = _no_function, {}
        host.registry.forget()
        host.loops = []
        if host.observer is not None:
            if not host.observer.ended(asked=life.stop_requested):
                life.resumption = None
            host.observer = self._metrics.observer = None
        context.done.set()

    def _print_failure(self, error: JobError | ExchangeError) -> None:
        """Prints why the job has left. The run may continue for days before it raises the error."""
        cause = error.__cause__
        if cause is None or self.context.status == JobStatus.EJECTED:
            print_error(f"jaxcross: {error}")
        else:
            heading = (
                f"jaxcross: job `{self.name}` failed on rank {self._world.rank} of "
                f"{self._world.size}:"
            )
            print_error(f"{heading}\n{traceback_text(cause)}")

    def close_unbegun(self) -> None:
        """Closes the job after the run broke, if no thread of its own will do that."""
        thread = None if self._life.record is None else self._life.record.thread
        if thread is None or not thread.is_alive():
            self.close()

    def save_left(self) -> None:
        """Saves what a stop or a failure left, after the run. Waits for all ranks.

        If saving fails, that's only logged, so the reason for which the job ended isn't hidden.
        """
        record = self._life.record
        # Use the record's status, on which all ranks agreed: the context's may differ between
        # ranks.
        if record is None or record.status in (None, JobStatus.ENDED):
            return

        def together(label: str, work: Callable[[Control], T]) -> T:
            with after_run(self._world, label, job=self.name, step=self.step):
                return run_collectively(work, self._world.control)

        try:
            self._save_last(together)
        except JobError as error:
            _log.warning("%s", error)

    def at_stop(self) -> StoppedJob:
        """Returns how far the job was when the run was stopped, and what is saved of it."""
        resumption = self._life.resumption
        begun, saved = (
            (False, None) if resumption is None else (resumption.begun, resumption.saved_step)
        )
        return StoppedJob(
            name=self.name, status=self.context.status, step=self.step, begun=begun, saved=saved
        )

    def _save_last(self, together: RunOnAllRanks) -> None:
        resumption = self._life.resumption
        if resumption is not None:
            reason = self._host.unsavable_reason()
            resumption.save_last(
                self._host.latest.state, self.step, together, unsavable_reason=reason
            )


def first_of(runs: Sequence[JobRun], world: World) -> list[JobRun]:
    """Returns the first job alone, whose first step `jaxcross estimate` measures.

    If there are more jobs, rank 0 logs which one is measured.
    """
    if len(runs) > 1 and world.rank == 0:
        _log.warning(
            "Job `%s`, the first of %d, is measured. The others are not run.",
            runs[0].name,
            len(runs),
        )
    return list(runs[:1])


def _no_function(*_: object, **__: object) -> None:
    """Does nothing. Replaces the function of a job that has ended."""
