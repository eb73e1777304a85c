"""A policy says whose turn it is. It sees job numbers only, so both lanes and every rank can use it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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

    def next(self, last: int, candidates: Collection[int], jobs: int) -> int:
        """Whose turn it is among `candidates` (not empty), after job `last` had the previous turn."""
        ...


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Crossover: all jobs run, turns go round. On the compute lane a turn is a segment, on the other an exchange."""

    name: str = "round-robin"

    def running(self, finished: Sequence[bool]) -> tuple[int, ...]:
        return tuple(job for job, over in enumerate(finished) if not over)

    def next(self, last: int, candidates: Collection[int], jobs: int) -> int:
        return min(candidates, key=lambda job: (job - last - 1) % jobs)


@dataclass(frozen=True, slots=True)
class Sequential:
    """One whole training loop after the other, in the order in which the jobs were added: the baseline."""

    name: str = "sequential"

    def running(self, finished: Sequence[bool]) -> tuple[int, ...]:
        return tuple(job for job, over in enumerate(finished) if not over)[:1]

    def next(self, last: int, candidates: Collection[int], jobs: int) -> int:
        del last, jobs
        return min(candidates)
