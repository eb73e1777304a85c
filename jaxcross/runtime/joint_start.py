"""A joint start: its clock, the gate that keeps jobs in order, and what the ranks note of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import final

from jaxcross.interleave.joint_start import Arrival

START_LIMIT_S = 30.0
"""Seconds of work other than to trace and compile, after which a job is not waited for any more."""


@final
class StartLimit:
    """Measures how long jobs do other work than to prepare their first step. Used by one thread.

    A job that waits for another job's results does not come to its first step before that job has
    begun, and cannot be told from one that loads its data or meets other ranks. So the wait for it
    is limited. To trace and to compile always ends, and may take minutes: that time does not count.

    Args:
        limit_s: The limit.
    """

    def __init__(self, limit_s: float = START_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._other_s: dict[int, float] = {}
        self._excused: set[int] = set()
        self._before_s: float | None = None

    def look(self, now_s: float, preparing: Mapping[int, bool]) -> list[int]:
        """Takes the jobs that are awaited now, and whether each prepares its step; called a few
        times a second.

        Returns:
            The jobs that are over the limit, each once.
        """
        passed_s = 0.0 if self._before_s is None else now_s - self._before_s
        self._before_s = now_s
        for job, is_preparing in preparing.items():
            self._other_s[job] = self._other_s.get(job, 0.0) + (0.0 if is_preparing else passed_s)
        over = [
            job
            for job in preparing
            if self._other_s[job] >= self.limit_s and job not in self._excused
        ]
        self._excused.update(over)
        return over


@final
class StartGate:
    """Holds threads of jobs until all earlier jobs have come to their first steps on this rank.

    So jobs do what is decided before first steps in their order, however long each one compiles.

    Args:
        lock: The driver's, which is held while a job comes to its first step.
        coming: Returns the jobs that have still to come, called under the lock.
    """

    def __init__(self, lock: threading.RLock, coming: Callable[[], Sequence[int]]) -> None:
        self._changed = threading.Condition(lock)
        self._coming = coming
        self._waiting = 0
        self._is_open = False

    def wait(self, job: int) -> None:
        """Waits until no job with a lower number has still to come."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(
                lambda: self._is_open or all(number >= job for number in self._coming())
            )
            self._waiting -= 1

    def look(self) -> None:
        """Lets those go on that need not wait any more; called under the lock after each event."""
        if self._waiting:
            self._changed.notify_all()

    def open(self) -> None:
        """Lets all go on, as the run broke; called under the lock."""
        self._is_open = True
        self._changed.notify_all()


def note_at_start(arrival: Arrival, awaited: Sequence[str]) -> str:
    """Returns the note on a job that has come to its first step, or is excused."""
    if arrival != "here":
        return "the other jobs begin without it"
    if not awaited:
        return "ready: all jobs begin"
    return (
        "ready, waits for "
        f"{f'`{awaited[0]}`' if len(awaited) == 1 else f'{len(awaited)} more jobs'}"
    )


def late_warning(job: str) -> str:
    """Returns the text for a job that is over the limit on some rank."""
    return (
        f"Job `{job}` spent {START_LIMIT_S:.0f} s, on some rank, on other work than compiling its "
        "first step: the other jobs begin without it. If it waits for them, a policy with "
        '`start="as_ready"` saves that time.'
    )
