"""A policy says whose turn it is. It sees job numbers and what each has had: both lanes and all ranks can use it.

A job's number is its place in the order in which jobs were added or joined; it is never given to another one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Policy(Protocol):
    """Decides from its arguments alone: the exchange lane of every rank asks the same question and must hear the same
    answer. Policies are immutable and have neither clock nor random numbers.
    """

    @property
    def name(self) -> str:
        """One word for reports."""
        ...

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        """Of the jobs that are neither over nor paused, in ascending order, those that may run now: at least one."""
        ...

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        """Whose turn it is among `candidates` (not empty), after those that were."""
        ...

    def share(self, job: int) -> float:
        """What a job is owed of a lane, relative to the others."""
        ...


class Turns:
    """Whose turn it was on one lane, and how much each job has had of it: start-time fair queueing (Goyal, Vin and
    Cheng, SIGCOMM 1996, section 2).

    Attributes:
        jobs: Those that are there, in ascending order.
        last: The job that had the previous turn; -1 before the first one.
    """

    def __init__(self, policy: Policy, jobs: int) -> None:
        self.policy, self.jobs, self.last = policy, list(range(jobs)), -1
        self._now = 0.0  # the lane's virtual time
        self._had = dict.fromkeys(self.jobs, 0.0)

    def add(self, job: int) -> None:
        """The job joins; it is owed nothing of what was."""
        insort(self.jobs, job)
        self._had[job] = self._now

    def remove(self, job: int) -> None:
        """The job has left."""
        self.jobs.remove(job)
        del self._had[job]

    def next(self, candidates: Collection[int]) -> int:
        """The policy's choice."""
        return self.policy.next(candidates, self)

    def had(self, job: int) -> float:
        """What a job has had, over its share. Who was away is owed nothing: it has had the lane's virtual time."""
        return max(self._now, self._had[job])

    def distance(self, job: int) -> int:
        """How far the job is from its turn when turns go round."""
        return (bisect_left(self.jobs, job) - bisect_right(self.jobs, self.last)) % len(self.jobs)

    def round(self) -> Iterator[int]:
        """All jobs in the order of their turns, when turns go round."""
        first = bisect_right(self.jobs, self.last)
        yield from self.jobs[first:]
        yield from self.jobs[:first]

    def begin(self, job: int) -> None:
        """A turn of the job begins."""
        self.last = job
        self._now = self._had[job] = self.had(job)

    def charge(self, job: int, amount: float) -> None:
        """What a turn took of the lane: bytes or nanoseconds, the same unit in all calls."""
        if job in self._had:  # its last segments may come to their end after it has left
            self._had[job] += amount / self.policy.share(job)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Crossover: all jobs run, turns go round. On the compute lane a turn is a segment, on the other an exchange."""

    name: str = "round-robin"

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs)

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        # Nearly always the first that is asked; the least of all distances would cost 64 jobs as much as the rest.
        return next(job for job in turns.round() if job in candidates)

    def share(self, job: int) -> float:
        del job
        return 1.0


@dataclass(frozen=True, slots=True)
class Weighted:
    """Crossover by shares: a job gets its share of each lane, of the device's time and of the link's bytes, whatever
    the size of its steps; what it does not use, the others get.

    A segment or an exchange that has begun is not broken off, so a job's step waits at most for one of each other job:
    cut large jobs into pieces no longer than the small job's.

    Args:
        shares: Of each job, in the order in which the jobs were added. Only their ratios count. Same on every rank.
        joining: Of each job that joins during the run; the mean of `shares` if None.

    Raises:
        TypeError: `shares` is not a sequence of numbers, or `joining` is not a number.
        ValueError: A share is not a positive finite number.
    """

    shares: tuple[float, ...]
    name: str = "weighted"
    joining: float | None = None

    def __post_init__(self) -> None:
        ordered = not isinstance(self.shares, str | Mapping | AbstractSet) and isinstance(self.shares, Iterable)
        numbers = [*self.shares] if ordered else []
        if not ordered or not all(map(_is_number, [*numbers, 1.0 if self.joining is None else self.joining])):
            raise TypeError(
                f"`Weighted` takes a share for each job, as in `Weighted((4, 1))`, got `shares={self.shares!r}` and"
                f" `joining={self.joining!r}`."
            )
        if not numbers or not all(math.isfinite(share) and share > 0 for share in numbers):
            raise ValueError(f"`shares` of `Weighted` must be positive numbers, one for each job, got {self.shares}.")
        # Ranks compare what a policy prints: equal shares, in a list or an array here and a tuple there, print alike.
        object.__setattr__(self, "shares", tuple(map(float, numbers)))
        if self.joining is not None and not (math.isfinite(self.joining) and self.joining > 0):
            raise ValueError(f"`joining` of `Weighted` must be a positive number, got {self.joining}.")

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs)

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        return min(candidates, key=lambda job: (turns.had(job), turns.distance(job)))

    def share(self, job: int) -> float:
        if job < len(self.shares):
            return self.shares[job]
        return sum(self.shares) / len(self.shares) if self.joining is None else self.joining


@dataclass(frozen=True, slots=True)
class Sequential:
    """One whole training loop after the other, in the order in which the jobs were added: the baseline."""

    name: str = "sequential"

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs[:1])

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        del turns
        return min(candidates)

    def share(self, job: int) -> float:
        del job
        return 1.0


def _is_number(value: Any) -> bool:
    """Whether `value` is a real number, of Python, NumPy or JAX; texts and truth values are not."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
