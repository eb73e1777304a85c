"""A joint start on one rank: a time limit, a gate that keeps the jobs in order, and notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import final

from jaxcross.interleave import Arrival

START_LIMIT_S = 30.0
"""How many seconds a job may spend on anything other than tracing and compiling.

After that, the other jobs begin without it.
"""


@final
class StartLimit:
    """Measures how much time jobs spend on anything other than preparing their first step.

    A job that waits for another job's results can't reach its first step before that job has begun,
    so at a joint start, the two would wait for each other forever. We can't tell such a job apart
    from a job that's loading data or waiting for other ranks, hence the limit. Tracing and
    compiling don't count, because a compilation always ends, even if it takes minutes.

    Only one thread may use this object.

    Args:
        limit_s: The limit in seconds.
    """

    def __init__(self, limit_s: float = START_LIMIT_S) -> None:
        self.limit_s = limit_s
        self._other_s: dict[int, float] = {}
        self._excused: set[int] = set()
        self._before_s: float | None = None

    def look(self, now_s: float, preparing: Mapping[int, bool]) -> list[int]:
        """Updates the times, and returns the jobs that have just exceeded the limit.

        Each job is returned only once. Called a few times per second.

        Args:
            now_s: The current time.
            preparing: The jobs that the others are waiting for, and whether each is tracing or
                compiling its step.
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
    """Holds back a job's thread until all earlier jobs have reached their first steps on this rank.

    Without this gate, the order in which jobs reach their first steps would depend on how long each
    of them takes to compile. The gate fixes that order, and with it the order of whatever the jobs
    decide before their first steps.

    Args:
        lock: The driver's lock, which is held whenever a job reaches its first step.
        coming: Returns the jobs that haven't reached their first steps. Called with the lock held.
    """

    def __init__(self, lock: threading.RLock, coming: Callable[[], Sequence[int]]) -> None:
        self._changed = threading.Condition(lock)
        self._coming = coming
        self._waiting = 0
        self._is_open = False

    def wait(self, job: int) -> None:
        """Waits until all jobs with lower numbers have reached their first steps."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(
                lambda: self._is_open or all(number >= job for number in self._coming())
            )
            self._waiting -= 1

    def look(self) -> None:
        """Wakes up threads that can continue. Called after each event, with the lock held."""
        if self._waiting:
            self._changed.notify_all()

    def open(self) -> None:
        """Releases all threads, because the run is broken. Called with the lock held."""
        self._is_open = True
        self._changed.notify_all()


def note_at_start(arrival: Arrival, awaited: Sequence[str]) -> str:
    """Returns the note about a job that has reached its first step, or was excused."""
    if arrival != "here":
        return "the other jobs begin without it"
    if not awaited:
        return "ready: all jobs begin"
    return (
        "ready, waits for "
        f"{f'`{awaited[0]}`' if len(awaited) == 1 else f'{len(awaited)} more jobs'}"
    )


def late_warning(job: str) -> str:
    """Returns the warning about a job that has exceeded the limit on some rank."""
    return (
        f"Job `{job}` spent {START_LIMIT_S:.0f} s, on some rank, on something other than compiling "
        "its first step, so the other jobs begin without it. If it waits for their results, "
        'use a policy with `start="as_ready"`, which does not make them wait for it.'
    )
