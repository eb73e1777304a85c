"""A run in which every job that is left is paused: rank 0 says so, and the run ends if nobody can
resume them.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from typing import final

from jaxcross.errors import JobError

_log = logging.getLogger("jaxcross")

_SAID_AFTER_S = 3.0  # jobs may all be paused for a moment
_MARK = "nobody resumes"  # no JSON, as the texts of submitted jobs are


@final
class PausedRun:
    """Finds out whether somebody on any rank can still resume the jobs.

    A paused job's own thread waits in a step, so only another thread or a signal handler can call
    `resume`. A rank without either says so in a text that reaches all ranks between the same two
    slots. Once each rank has said so since the last job joined, paused or resumed, nobody is left:
    whoever could start such a thread would have to run first.

    Args:
        rank: This rank.
        ranks: Number of ranks.

    Attributes:
        changes: How often a job joined, paused or resumed; the same on every rank between the same
            two slots.
        is_over: Whether the run ends because nobody can resume its jobs; the same on every rank.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self.changes = 0
        self.is_over = False
        self._since: tuple[int, float] | None = None
        self._said = self._voted = -1  # the value of `changes` when this rank last did so
        self._without: set[tuple[int, int]] = set()
        self._ends = False

    def look(self, now_s: float, paused: Sequence[str]) -> str | None:
        """Takes the jobs if all that are left are paused, and wait on this rank; called a few times
        a second.

        Returns:
            A text to deliver on all ranks, if nobody on this rank can resume them.
        """
        if not paused:
            self._since = None
            return None
        if self._since is None or self._since[0] != self.changes:
            self._since = (self.changes, now_s)
            return None
        if (
            self._rank == 0
            and self._said != self.changes
            and now_s - self._since[1] >= _SAID_AFTER_S
        ):
            self._said = self.changes
            _log.warning(
                "All jobs that are left are paused: %s. The run waits for `resume()`.",
                _named(paused),
            )
        if self._voted == self.changes or can_resume():
            return None
        self._voted = self.changes
        return f"{_MARK} {self.changes} {self._rank}"

    def take(self, text: str) -> bool:
        """Takes a text that is delivered on all ranks, in one order. Returns whether it was one of
        `look`.
        """
        if not text.startswith(_MARK):
            return False
        changes, rank = map(int, text.removeprefix(_MARK).split())
        if changes == self.changes:
            self._without = {
                (changes, rank),
                *(each for each in self._without if each[0] == changes),
            }
            self.is_over = self._ends = len(self._without) == self._ranks
        return True

    def take_end(self) -> bool:
        """Returns whether the run is to stop; True once."""
        ends = self._ends
        self._ends = False
        return ends


def can_resume() -> bool:
    """Whether this process has a thread or a signal handler, besides jaxcross's own, that may call
    `job.resume`.
    """
    if any(
        callable(signal.getsignal(number))
        for number in signal.valid_signals() - {signal.SIGINT, signal.SIGTERM}
    ):
        return True
    current = threading.current_thread()
    return any(
        thread is not current and not thread.name.startswith("jaxcross-")
        for thread in threading.enumerate()
    )


def nobody_resumes(jobs: Sequence[str]) -> JobError:
    """Returns the error of a run that ended because nobody could resume these jobs; the same on
    every rank.
    """
    return JobError(
        f"All jobs that were left are paused ({_named(jobs)}), and no rank has a thread or a "
        "signal handler that could call `resume()`: the run has ended. Resume a job from one that "
        "is not paused, or from a thread that you start before `run()`. With checkpoints, these "
        "jobs stay paused in the next run."
    )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(f"`{name}`" for name in names[:8]) + more
