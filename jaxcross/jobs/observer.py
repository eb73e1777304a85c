"""`JobObserver` follows one job, for code that makes decisions about running jobs."""

from __future__ import annotations

from typing import Protocol

from jaxcross._pytree import PyTree


class JobObserver(Protocol):
    """Called in the job's own thread, on every rank at the same step of the job.

    `logged` and `saving` may raise, which ends the job like an error in its function.

    Attributes:
        metric: The name of the metric to show as the job's progress.
    """

    metric: str

    def restored(self, entries: int) -> None:
        """Called when entries of earlier runs were added to the job's history.

        A negative number means that they were removed again.
        """
        ...

    def stepped(self, step: int) -> None:
        """Called when all ranks have committed the job's step of this number. Must not wait."""
        ...

    def logged(self, step: int, metrics: PyTree) -> None:
        """Called with what the job logs, before it's read back. May wait."""
        ...

    def saving(self, step: int) -> None:
        """Called before a checkpoint begins, once everything that was logged has been read back."""
        ...

    def ended(self, *, asked: bool) -> bool:
        """Called once the job has ended on all ranks and its results are final.

        Args:
            asked: Whether someone asked to stop this job alone.

        Returns:
            Whether the run should save what is left of a job that didn't come to its end.
        """
        ...
