"""Handles a run in which all remaining jobs are paused.

Rank 0 logs a warning, and the run ends if nobody can resume the jobs.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from typing import final

from jaxcross.errors import JobError, quoted

_log = logging.getLogger("jaxcross")

_SAID_AFTER_S = 3.0  # all jobs may be paused just for a moment
_MARK = "nobody resumes"  # not JSON, unlike the texts of submitted jobs


@final
class PausedRun:
    """Finds out whether anybody on any rank can still resume the jobs.

    A paused job's own thread waits in a step, so only another thread or a signal handler can call
    `resume`. A rank that has neither reports so in a text, which reaches all ranks between the same
    two slots. The run ends once every rank has reported this since the last time a job joined,
    paused or resumed. It's safe to end it then, because whoever could still start a thread that
    resumes would have to be running already.

    Args:
        rank: This rank.
        ranks: Number of ranks.

    Attributes:
        changes: How many times a job has joined, paused or resumed. Between the same two slots,
            it's identical across ranks.
        is_over: Whether the run ends because nobody can resume its jobs. Between the same two
            slots, it's identical across ranks.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self.changes = 0
        self.is_over = False
        self._since: tuple[int, float] | None = None
        # The value of `changes` when this rank last logged the warning, and when it last reported.
        self._said = self._voted = -1
        self._without: set[tuple[int, int]] = set()
        self._ends = False

    def look(self, now_s: float, paused: Sequence[str]) -> str | None:
        """Looks at the paused jobs and returns a text for all ranks if nobody here can resume them.

        Called a few times per second.

        Args:
            now_s: The current time.
            paused: All remaining jobs if they are paused and wait on this rank, otherwise nothing.
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
        """Processes a text that was delivered on all ranks in the same order.

        Returns whether it was one of `look`'s texts.
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
        """Returns True, once, if the run has to stop."""
        ends = self._ends
        self._ends = False
        return ends


def can_resume() -> bool:
    """Whether anything in this process besides jaxcross may call `job.resume`.

    That's any other thread, or a signal handler for a signal other than SIGINT and SIGTERM. The
    calling thread doesn't count.
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
    """Returns the error of a run that ended because nobody could resume these jobs.

    Identical across ranks.
    """
    return JobError(
        f"All jobs that were left are paused ({_named(jobs)}), and no rank has a thread or a "
        "signal handler that could call `resume()`: the run has ended. Resume a job from one that "
        "is not paused, or from a thread that you start before `run()`. With checkpoints, these "
        "jobs stay paused in the next run."
    )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return quoted(names[:8]) + more
