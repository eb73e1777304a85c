"""Which job does this thread belong to? Each job's function runs in a thread of its own, and steps only there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from jaxcross.errors import JobError
from jaxcross.runtime.lanes import LaneThread

if TYPE_CHECKING:
    from jaxcross.jobs.context import JobContext


class JobThread(LaneThread):
    """Runs one job's function."""

    def __init__(self, job: JobContext) -> None:
        super().__init__(f"job-{job.name}", job.main)
        self.job = job


def current_job() -> JobContext | None:
    """The job whose thread this is, if any."""
    thread = threading.current_thread()
    return thread.job if isinstance(thread, JobThread) else None


def runner_active(world: Any = None) -> bool:
    """Whether a run is in progress in this process, or in `world` alone."""
    return any(world is None or lane.serves(world) for lane in tuple(LaneThread.living))


def check_not_stray(step: str) -> None:
    """Refuses a step that is called while a run is in progress, from a thread that is no job's.

    Raises:
        JobError: Its exchanges would have no place in the order that all ranks agreed on.
    """
    if runner_active() and current_job() is None:
        raise JobError(
            f"`{step}` was called from thread `{threading.current_thread().name}`, which is no job of the runner that "
            "is in progress. Its exchanges would have no place in the order that all ranks share. Call it in a job's "
            "own function (`runner.add(name, fn)`), not in a thread started there, or before or after `runner.run()`."
        )
