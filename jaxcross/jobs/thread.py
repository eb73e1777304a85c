"""The thread of a job. Each job's function runs in a thread of its own, and calls its steps only there."""

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
    """

    def __init__(self, name: str, main: Callable[[], object], job: object, living: set[threading.Thread]) -> None:
        super().__init__(f"job-{name}", main, living)
        self.job = job
