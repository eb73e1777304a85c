"""Handles runs whose unfinished jobs are all paused.

Such a run waits until somebody resumes one of its jobs, and rank 0 logs a warning. If nothing on
any rank could do that any more, we end the run rather than let it wait forever.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from typing import final

from jaxcross.errors import JobError, quoted

_log = logging.getLogger("jaxcross")

_WARN_AFTER_S = 3.0  # no warning if all jobs are paused just for a moment
_MARK = "nobody resumes"  # can't be mistaken for a submitted job, whose text is JSON


@final
class PausedRun:
    """Finds out whether anything on any rank can still resume a job.

    A paused job can't resume itself, because its thread is waiting in a step. So only another
    thread of the script or a signal handler can call `resume`. A rank that has neither submits a
    text saying so, which all ranks receive between the same two slots. The run ends once all ranks
    have submitted such a text, and no job has joined, paused or resumed in the meantime. A rank
    can't start a new thread later that resumes a job after all: the code that starts it would have
    to be running already, in a thread that we'd have noticed.

    Args:
        rank: This rank.
        ranks: Number of ranks.

    Attributes:
        changes: How many times a job has joined, been paused, or been resumed. All ranks have the
            same number between the same two slots.
        is_over: Whether the run ends because nothing can resume its jobs. All ranks have the same
            value between the same two slots.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self.changes = 0
        self.is_over = False
        self._since: tuple[int, float] | None = None
        # The values of `changes` when this rank last logged the warning, and when it last submitted
        # its text.
        self._warned = -1
        self._submitted = -1
        self._without: set[tuple[int, int]] = set()
        self._ends = False

    def look(self, now_s: float, paused: Sequence[str]) -> str | None:
        """Returns a text for all ranks if nothing on this rank can resume the paused jobs, or None.

        This is called a few times per second.

        Args:
            now_s: The current time.
            paused: The unfinished jobs, if all of them are paused and their threads are waiting on
                this rank. Otherwise empty.
        """
        if not paused:
            self._since = None
            return None
        if self._since is None or self._since[0] != self.changes:
            self._since = (self.changes, now_s)
            return None
        if (
            self._rank == 0
            and self._warned != self.changes
            and now_s - self._since[1] >= _WARN_AFTER_S
        ):
            self._warned = self.changes
            _log.warning(
                "All remaining jobs are paused: %s. The run waits until another thread or a signal "
                "handler calls `resume()` of one of them.",
                _named(paused),
            )
        if self._submitted == self.changes or can_resume():
            return None
        self._submitted = self.changes
        return f"{_MARK} {self.changes} {self._rank}"

    def take(self, text: str) -> bool:
        """Processes a text that was delivered on all ranks in the same order.

        Returns whether the text came from `look`.
        """
        if not text.startswith(_MARK):
            return False
        changes, rank = map(int, text.removeprefix(_MARK).split())
        if changes == self.changes:
            self._without = {
                (changes, rank),
                *(each for each in self._without if each[0] == changes),
            }
            self.is_over = len(self._without) == self._ranks
            self._ends = self.is_over
        return True

    def take_end(self) -> bool:
        """Returns True if the run has to stop, but only once."""
        ends = self._ends
        self._ends = False
        return ends


def can_resume() -> bool:
    """Whether the script may still call `job.resume` in this process.

    Any thread that isn't ours could call `resume`, and so could a signal handler. The handlers for
    SIGINT and SIGTERM don't count, and neither does the calling thread, because it's waiting for
    the run to end.
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
    """Returns the error for a run that has ended because nothing could resume these jobs.

    Identical across ranks.
    """
    return JobError(
        f"All remaining jobs are paused ({_named(jobs)}), and no rank has a thread or a signal "
        "handler that could call `resume()`, so the run has ended. Call `resume()` from a job that "
        "is not paused, or from a thread that you start before `run()`. With checkpoints, these "
        "jobs stay paused in the next run."
    )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return quoted(names[:8]) + more
