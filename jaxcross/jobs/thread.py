"""Which job does this thread belong to? Each job's function runs in a thread of its own, and steps only there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jaxcross.runtime.lanes import LaneThread

if TYPE_CHECKING:
    from jaxcross.jobs.context import JobContext


class JobThread(LaneThread):
    """Runs one job's function."""

    def __init__(self, job: JobContext, living: set[threading.Thread]) -> None:
        super().__init__(f"job-{job.name}", job.main, living)
        self.job = job


def current_job() -> JobContext | None:
    """The job whose thread this is, if any."""
    thread = threading.current_thread()
    return thread.job if isinstance(thread, JobThread) else None
