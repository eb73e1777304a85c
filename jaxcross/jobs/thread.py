"""The thread of a job. A job's function runs in it, and calls its steps only there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from jaxcross.runtime.lanes import LaneThread


@final
class JobThread(LaneThread):
    """Runs one job's function.

    Attributes:
        job: The job's `JobContext`.
        excuse_start: Lets the other jobs begin without this one at a joint start.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[], object],
        job: object,
        living: set[threading.Thread],
        excuse_start: Callable[[], None],
    ) -> None:
        super().__init__(f"job-{name}", main, living)
        self.job = job
        self.excuse_start = excuse_start


@final
class JobDone(threading.Event):
    """An event that's set once a job has ended.

    If a job waits for another job's event, a joint start doesn't wait for the waiting job.
    Otherwise, the run could deadlock.
    """

    def wait(self, timeout: float | None = None) -> bool:
        thread = threading.current_thread()
        if isinstance(thread, JobThread) and not self.is_set():
            thread.excuse_start()
        return super().wait(timeout)
