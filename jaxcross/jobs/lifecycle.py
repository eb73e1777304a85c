"""A job's part in a run: its driver, its record there, its thread, and its end.

A job can end in several ways: its function returns or raises, a vote stops it, another rank fails,
or its function catches the error that should have ended it and continues. Whatever happens, the
thread first reports to the driver, then waits until all ranks have ended the job, and only then
closes it.
"""

from __future__ import annotations

import logging
import threading
import traceback
from functools import partial
from typing import NoReturn, Protocol, final

from jaxcross._endings import JobStatus
from jaxcross.errors import JobError
from jaxcross.interleave.vote import JobRequest
from jaxcross.jobs.resumption import Resumption
from jaxcross.jobs.thread import JobThread
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.job_record import JobRecord, Stopped

_log = logging.getLogger("jaxcross")


class ManagedJob(Protocol):
    """The part of a job that its lifecycle uses, in the job's thread."""

    @property
    def step(self) -> int: ...
    def call_function(self) -> None: ...
    def close_loops(self) -> None: ...
    def close(self) -> None: ...
    def give_back_memory(self) -> None: ...


@final
class JobLifecycle:
    """Runs and ends the job's thread. Owned by the job's `JobRun`.

    Attributes:
        name: The job's name.
        driver: The run's driver; None before the run, and after the job has ended.
        record: The driver's record of the job; None before the run.
        resumption: Connects the job to its checkpoints, if there are any.
        stop_requested: Whether the job ended because someone asked to stop this job alone.
        misuse: The error of a loop over batches in another thread, which the job's own thread
            should raise.
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
            JobError: The job isn't running, or this is its own thread and another thread iterated
                over its batches.
        """
        if self.driver is None or self.record is None:
            raise JobError(
                f"Job `{self.name}` is not running. Its methods work inside its function, during "
                "`runner.run()`."
            )
        if self.misuse is not None and self.in_own_thread:
            raise self.misuse
        return self.driver, self.record

    def stray_error(self, what: str, done: str) -> JobError | None:
        """Returns the error for a call outside of the job's own thread; None in that thread.

        A call from another thread would receive answers that belong to the job's own.
        """
        if self.in_own_thread:
            return None
        return JobError(
            f"{what} of job `{self.name}` was {done} in thread "
            f"`{threading.current_thread().name}`, not in the job's own: two threads would take "
            "each other's answers from the other ranks. Do it in the job's function. `job.batches` "
            "has a thread that prepares batches ahead of it: give what yours does to batches as an "
            "iterator, `job.batches(prepared(data))`."
        )

    def ends_stray_loop(self) -> bool:
        """Whether a loop over batches must end at once because it's in the wrong thread.

        If possible, the job's own thread raises the error, so that the job fails. In the other
        thread, there may be no caller to catch it, and then it would end the other jobs too.

        Raises:
            JobError: The job's own thread can't raise the error, because the job has ended or
                already has an error to raise.
        """
        error = self.stray_error("`job.batches`", "iterated")
        if error is None:
            return False
        if (
            self.misuse is not None
            or self.driver is None
            or self.record is None
            or self.record.status == JobStatus.ENDED
        ):
            raise error
        self.misuse = error
        return True

    def request(self, request: JobRequest) -> None:
        """Passes a request to all ranks, unless the job has ended. Doesn't wait.

        Raises:
            JobError: The run hasn't begun.
        """
        # We read both once, because the job's thread clears the driver when the job leaves. The
        # order matters because the run sets the record last: if we read the driver before the run
        # begins and the record after that, the job would look as if it had ended, and the request
        # would be lost silently.
        record, driver = self.record, self.driver
        if record is None:
            raise JobError(
                f"Job `{self.name}` is not running: it can be stopped or paused during "
                "`runner.run()` only."
            )
        if driver is not None:
            driver.request(record, request)

    def excuse_start(self) -> None:
        """Lets the other jobs begin without this one at a joint start. Doesn't wait."""
        if self.driver is not None and self.record is not None:
            self.driver.excuse_start(self.record)

    def attach(
        self, job: ManagedJob, driver: Driver, record: JobRecord, resumption: Resumption | None
    ) -> None:
        """Puts the job into a run that's about to begin, or into one that's in progress."""
        self.driver, self.record, self.resumption = driver, record, resumption
        record.abandon = partial(self._abandon, job)
        # The driver calls this before any other job can save something that depends on this job's
        # end.
        record.on_end = partial(self._on_end, job)
        if resumption is not None:
            record.on_pause = resumption.mark_paused

    def main(self, job: ManagedJob) -> None:
        """Runs the job's function. This is the body of the job's thread.

        An error becomes the job's failure on all ranks. After the function has ended, waits until
        the job has ended on every rank.
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
        """Abandons the job's thread, which then sleeps forever.

        Called if the job has ended but its function caught the error and called again.
        """
        driver, record = self.running()
        _log.warning(
            "Job `%s` is over (%s), but its function catches every exception and goes on: its "
            "thread stays, asleep. Let `except` name what it expects.",
            self.name,
            describe(record.error) if record.error else JobStatus.STOPPED,
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
        # Close the loops first: their threads may hold batches, and it may take long until the
        # other ranks end the job.
        job.close_loops()
        record.done.wait()
        job.close()
        driver.release(record)

    def _on_end(self, job: ManagedJob, status: JobStatus, asked: bool) -> None:
        job.give_back_memory()
        status = self.final_status(status)
        self.stop_requested = asked
        # A job that ends because its whole run was stopped resumes in the next run, so it isn't
        # marked as done.
        if self.resumption is not None and (status != JobStatus.STOPPED or asked):
            self.resumption.mark_done(status)

    def final_status(self, status: JobStatus) -> JobStatus:
        """Returns the job's status, given the vote's.

        They differ if a `ParameterServer` has stopped the job. Its function exchanges nothing, and
        after a stop has unwound it, the vote can't tell that from a function that has returned.
        """
        return JobStatus.STOPPED if self._unwound and status == JobStatus.ENDED else status

    def detach(self) -> None:
        """Drops the driver and the callbacks that it has."""
        self.driver = None
        if self.record is not None:
            self.record.detach()


def forget_locals(error: BaseException | None) -> None:
    """Clears the local variables in an exception's traceback.

    Otherwise, they'd keep a step's arrays alive.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
