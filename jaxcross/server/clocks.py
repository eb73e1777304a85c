"""Decides which workers may continue, from all workers' clocks as one server knows them. Pure."""

from __future__ import annotations

import math


class Clocks:
    """The stale-synchronous rule: no worker continues too far ahead of the slowest one.

    A worker's clock counts the gradients that it has pushed to the servers. A worker whose clock is
    `c` has to wait until the slowest worker's clock has reached `c - staleness`.

    When a worker finishes, its clock becomes infinite, so nobody waits for it any more. It then
    waits itself until all other workers have finished.

    Args:
        ranks: Number of workers.
        staleness: How many clocks a worker may be ahead of the slowest: 0, 1, ... or `math.inf`.
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
        """Records that a worker has pushed a gradient, and that it's waiting to continue."""
        self._clocks[rank] += 1
        self._waiting.add(rank)

    def finish(self, rank: int) -> None:
        """Records that a worker won't push any more, and is waiting for all others to finish."""
        self._clocks[rank] = math.inf
        self._waiting.add(rank)

    def release(self) -> list[int]:
        """Returns the waiting workers that may continue now, in rank order, and ends their wait."""
        free = sorted(rank for rank in self._waiting if not self.behind(rank))
        self._waiting.difference_update(free)
        return free

    def behind(self, rank: int) -> list[int]:
        """Returns the workers that `rank` must wait for."""
        clock = self._clocks[rank]
        least = clock if clock == math.inf else clock - self.staleness
        return [other for other, theirs in enumerate(self._clocks) if theirs < least]
