"""Decides which workers may continue, from all workers' clocks as one server knows them. Pure."""

from __future__ import annotations

import math


class Clocks:
    """The stale-synchronous rule: no worker continues too far ahead of the slowest one.

    A worker's clock is the number of gradients that it has pushed. A worker at clock `c` waits
    until the slowest has reached `c - staleness`. The clock of a worker that has finished is
    infinite, so no worker waits for it, while it waits itself until all others have finished.

    Args:
        ranks: Number of workers.
        staleness: Clocks that a worker may be ahead of the slowest: 0, 1, ... or `math.inf`.
    """

    def __init__(self, ranks: int, staleness: float) -> None:
        self.staleness = staleness
        self._clocks: list[float] = [0] * ranks
        self._waiting: set[int] = set()

    @property
    def now(self) -> tuple[float, ...]:
        """Every worker's clock."""
        return tuple(self._clocks)

    def push(self, rank: int) -> None:
        """Records that a worker has pushed a gradient and waits to continue."""
        self._clocks[rank] += 1
        self._waiting.add(rank)

    def finish(self, rank: int) -> None:
        """Records that a worker will push no more and waits for all others to finish."""
        self._clocks[rank] = math.inf
        self._waiting.add(rank)

    def release(self) -> list[int]:
        """Returns the waiting workers that may continue, in rank order; they no longer wait."""
        free = sorted(rank for rank in self._waiting if not self.behind(rank))
        self._waiting.difference_update(free)
        return free

    def behind(self, rank: int) -> list[int]:
        """Returns the workers that `rank` must wait for."""
        clock = self._clocks[rank]
        least = clock if clock == math.inf else clock - self.staleness
        return [other for other, theirs in enumerate(self._clocks) if theirs < least]
