"""`JobObserver`: follows one job, for what decides about jobs while they run."""

from __future__ import annotations

from typing import Protocol

from jaxcross._pytree import PyTree


class JobObserver(Protocol):
    """Called in the job's own thread on every rank, where each call comes at the same step of the
    job.

    `logged` and `saving` may raise, which ends the job as an error of its function does.

    Attributes:
        metric: The name of what counts among all that the job logs, for its progress.
    """

    metric: str

    def restored(self, entries: int) -> None:
        """Called when the job's history has got so many entries of earlier runs, or lost them again
        if negative.
        """
        ...

    def stepped(self, step: int) -> None:
        """Called when all ranks have committed the job's step of this number. Must not wait."""
        ...

    def logged(self, step: int, metrics: PyTree) -> None:
        """Called with what the job logs, not read back yet. May wait."""
        ...

    def saving(self, step: int) -> None:
        """Called before a checkpoint begins, when all that was logged is read back."""
        ...

    def ended(self, *, asked: bool) -> bool:
        """Called once the job is over on all ranks and its results are final; `asked` if it alone
        was asked to stop.

        Returns whether the run saves what the job left, if it did not come to its end.
        """
        ...
