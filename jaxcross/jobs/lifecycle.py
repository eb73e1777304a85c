"""The part that a job takes in a run: its driver, its record there, its thread, and its end."""

from __future__ import annotations

import logging
import threading
import traceback
from functools import partial
from typing import NoReturn, Protocol, final

from jaxcross.errors import JobError
from jaxcross.interleave.messages import FinalStatus
from jaxcross.interleave.vote import JobRequest
from jaxcross.jobs.resumption import Resumption
from jaxcross.jobs.thread import JobThread
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.job_record import JobRecord, Stopped

_log = logging.getLogger("jaxcross")


class ManagedJob(Protocol):
    """The part of a job that its life cycle calls, in the job's thread."""

    @property
    def step(self) -> int: ...
    def call_function(self) -> None: ...
    def close_loops(self) -> None: ...
    def close(self) -> None: ...
    def give_back_memory(self) -> None: ...


@final
class JobLifecycle:
    """Owned by the job's `JobRun`, whose thread it runs and ends.

    Attributes:
        name: The job's name.
        driver: The run's; None before the run, and once the job is over.
        record: The driver's record of the job; None before the run.
        resumption: Ties the job to its checkpoints, if there are any.
        stop_requested: Whether the job ended because it alone was asked to stop.
        misuse: The error of a loop over batches in another thread, for the job's own thread to raise.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver: Driver | None = None
        self.record: JobRecord | None = None
        self.resumption: Resumption | None = None
        self.stop_requested = False
        self.misuse: JobError | None = None
        self._unwound = False

    @property
    def in_own_thread(self) -> bool:
        """Whether the caller is the job's own thread."""
        return self.record is not None and self.record.thread is threading.current_thread()

    def running(self) -> tuple[Driver, JobRecord]:
        """Returns the run's driver, and its record of the job.

        Raises:
            JobError: The job is not running, or this is its thread and another one iterated over its batches.
        """
        if self.driver is None or self.record is None:
            raise JobError(
                f"Job `{self.name}` is not running. Its methods work inside its function, during `runner.run()`."
            )
        if self.misuse is not None and self.in_own_thread:
            raise self.misuse
        return self.driver, self.record

    def stray_error(self, what: str, done: str) -> JobError | None:
        """Returns the error for a caller that is not the job's own thread, and would take that thread's answers."""
        if self.in_own_thread:
            return None
        return JobError(
            f"{what} of job `{self.name}` was {done} in thread `{threading.current_thread().name}`, not in the "
            "job's own: two threads would take each other's answers from the other ranks. Do it in the job's function. "
            "`job.batches` has a thread that prepares batches ahead of it: give what yours does to batches as an "
            "iterator, `job.batches(prepared(data))`."
        )

    def ends_stray_loop(self) -> bool:
        """Whether a loop over batches must end at once, because it runs in another thread than the job's own.

        The job fails for it, where its own thread can still raise the error. Raised here, where perhaps no caller
        catches it, the error would end the other jobs as well.

        Raises:
            JobError: The job's thread cannot raise it: it is over, or has one to raise already.
        """
        error = self.stray_error("`job.batches`", "iterated")
        if error is None:
            return False
        if self.misuse is not None or self.driver is None or self.record is None or self.record.status == "ended":
            raise error
        self.misuse = error
        return True

    def request(self, request: JobRequest) -> None:
        """Passes a request to all ranks, unless the job is over. Does not wait.

        Raises:
            JobError: The run has not begun.
        """
        # Read once, because the job's thread clears the driver when the job leaves, and the record first, because the
        # run sets it last. With the driver read before the run begins and the record after that, the job would be taken
        # for one that is over, and the request would be lost without a word.
        record, driver = self.record, self.driver
        if record is None:
            raise JobError(f"Job `{self.name}` is not running: it can be stopped or paused during `runner.run()` only.")
        if driver is not None:
            driver.request(record, request)

    def excuse_start(self) -> None:
        """Allows the other jobs to begin without this one, at a joint start. Does not wait."""
        if self.driver is not None and self.record is not None:
            self.driver.excuse_start(self.record)

    def attach(self, job: ManagedJob, driver: Driver, record: JobRecord, resumption: Resumption | None) -> None:
        """Takes the job's place in a run that begins, or that the job is added to."""
        self.driver, self.record, self.resumption = driver, record, resumption
        record.abandon = partial(self._abandon, job)
        # Called by the driver before any other job can save what it did in the knowledge of this end.
        record.on_end = partial(self._on_end, job)
        if resumption is not None:
            record.on_pause = resumption.mark_paused

    def main(self, job: ManagedJob) -> None:
        """Runs the job's function: the body of its thread. An error becomes the job's failure on all ranks.

        Waits, after the function, until the job is over on every rank.
        """
        driver, record = self.running()
        try:
            job.call_function()
        except Stopped as stopped:
            self._unwound = True
            forget_locals(stopped)
            driver.job_returned(record)
        except BaseException as error:
            driver.job_raised(record, self.misuse or error, f"after step {job.step}")
            forget_locals(error)
        else:
            driver.job_returned(record)
        self._end_thread(job, driver, record)

    def _abandon(self, job: ManagedJob) -> NoReturn:
        """Leaves the job's thread behind: the job is over, but its function catches the error and calls again."""
        driver, record = self.running()
        _log.warning(
            "Job `%s` is over (%s), but its function catches every exception and goes on: its thread stays, asleep. "
            "Let `except` name what it expects.",
            self.name,
            describe(record.error) if record.error else "stopped",
        )
        self._unwound = True
        driver.job_returned(record)
        self._end_thread(job, driver, record)
        thread = threading.current_thread()
        assert isinstance(thread, JobThread)
        thread.living.discard(thread)
        driver.abandon(thread)
        while True:
            threading.Event().wait()

    def _end_thread(self, job: ManagedJob, driver: Driver, record: JobRecord) -> None:
        # The loops first: their threads may hold batches while the other ranks take long to end the job.
        job.close_loops()
        record.done.wait()
        job.close()
        driver.release(record)

    def _on_end(self, job: ManagedJob, status: FinalStatus, asked: bool) -> None:
        job.give_back_memory()
        status = self.final_status(status)
        self.stop_requested = asked
        # A job that ends because its whole run was stopped goes on in the next run: no mark for that.
        if self.resumption is not None and (status != "stopped" or asked):
            self.resumption.mark_done(status)

    def final_status(self, status: FinalStatus) -> FinalStatus:
        """Returns the job's status, given the vote's: a stop may have unwound a function that exchanges nothing.

        The vote takes a job that a `ParameterServer` has stopped for one that has come to its end.
        """
        return "stopped" if self._unwound and status == "ended" else status

    def detach(self) -> None:
        """Drops the driver, and the callbacks that it has."""
        self.driver = None
        if self.record is not None:
            self.record.detach()


def forget_locals(error: BaseException | None) -> None:
    """Clears the variables of the functions that an exception went through, which would keep a step's arrays alive."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
