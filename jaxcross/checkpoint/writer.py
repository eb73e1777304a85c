"""The thread that writes the checkpoints of all jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """One thread for all jobs: what it takes of the cores and of the disk, the jobs lose.

    Attributes:
        done: Parts that it is through with: changes while a disk is slow, not while it hangs.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "jaxcross-checkpoint")
        self.done = 0

    def submit(self, write: Callable[[], None]) -> Future[None]:
        """Runs it after what was submitted before."""

        def run() -> None:
            try:
                write()
            finally:
                self.done += 1

        return self._pool.submit(run)

    def close(self) -> None:
        """Ends the thread, after what it has begun. Waits."""
        self._pool.shutdown()
