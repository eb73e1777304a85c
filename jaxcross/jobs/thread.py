"""The thread of a job. Each job's function runs in a thread of its own, and calls its steps only
there.
"""

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
        excuse_start: Lets the other jobs begin without this one, at a joint start.
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
    """An event that is set once a job is over. A joint start does not wait for a job that waits for
    another one.
    """

    def wait(self, timeout: float | None = None) -> bool:
        thread = threading.current_thread()
        if isinstance(thread, JobThread) and not self.is_set():
            thread.excuse_start()
        return super().wait(timeout)
