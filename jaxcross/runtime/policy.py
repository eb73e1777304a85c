"""A policy says whose turn it is. It sees job numbers and what each has had: both lanes and all ranks can use it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    """Decides from its arguments alone: the exchange lane of every rank asks the same question and must hear the same
    answer. Policies are immutable and have neither clock nor random numbers.
    """

    @property
    def name(self) -> str:
        """One word for reports."""
        ...

    def running(self, finished: Sequence[bool]) -> tuple[int, ...]:
        """The unfinished jobs that may run now. Empty only if all are finished."""
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
        jobs: How many there are.
        last: The job that had the previous turn.
    """

    def __init__(self, policy: Policy, jobs: int) -> None:
        self.policy, self.jobs, self.last = policy, jobs, jobs - 1
        self._now = 0.0  # the lane's virtual time
        self._had = [0.0] * jobs

    def next(self, candidates: Collection[int]) -> int:
        """The policy's choice."""
        return self.policy.next(candidates, self)

    def had(self, job: int) -> float:
        """What a job has had, over its share. Who was away is owed nothing: it has had the lane's virtual time."""
        return max(self._now, self._had[job])

    def distance(self, job: int) -> int:
        """How far the job is from its turn when turns go round."""
        return (job - self.last - 1) % self.jobs

    def round(self) -> Iterator[int]:
        """All jobs in the order of their turns, when turns go round."""
        yield from range(self.last + 1, self.jobs)
        yield from range(self.last + 1)

    def begin(self, job: int) -> None:
        """A turn of the job begins."""
        self.last = job
        self._now = self._had[job] = self.had(job)

    def charge(self, job: int, amount: float) -> None:
        """What a turn took of the lane: bytes or nanoseconds, the same unit in all calls."""
        self._had[job] += amount / self.policy.share(job)


def _unfinished(finished: Sequence[bool]) -> tuple[int, ...]:
    return tuple(job for job, over in enumerate(finished) if not over)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Crossover: all jobs run, turns go round. On the compute lane a turn is a segment, on the other an exchange."""

    name: str = "round-robin"

    def running(self, finished: Sequence[bool]) -> tuple[int, ...]:
        return _unfinished(finished)

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

    Raises:
        ValueError: A share is not a positive finite number.
    """

    shares: tuple[float, ...]
    name: str = "weighted"

    def __post_init__(self) -> None:
        if not self.shares or not all(math.isfinite(share) and share > 0 for share in self.shares):
            raise ValueError(f"the shares of jobs are positive numbers, not {self.shares}")

    def running(self, finished: Sequence[bool]) -> tuple[int, ...]:
        return _unfinished(finished)

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        return min(candidates, key=lambda job: (turns.had(job), turns.distance(job)))

    def share(self, job: int) -> float:
        return self.shares[job]


@dataclass(frozen=True, slots=True)
class Sequential:
    """One whole training loop after the other, in the order in which the jobs were added: the baseline."""

    name: str = "sequential"

    def running(self, finished: Sequence[bool]) -> tuple[int, ...]:
        return _unfinished(finished)[:1]

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        del turns
        return min(candidates)

    def share(self, job: int) -> float:
        del job
        return 1.0
