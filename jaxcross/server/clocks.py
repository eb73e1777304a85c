"""Decides which workers may continue, based on all workers' clocks as known to a server. Pure."""

from __future__ import annotations

import math


class Clocks:
    """The stale-synchronous rule: no worker may get too far ahead of the slowest worker.

    A worker's clock counts the gradients it has pushed to the servers. A worker whose clock is at
    `c` has to wait until the slowest worker's clock reaches `c - staleness`.

    When a worker finishes, its clock jumps to infinity, so nobody has to wait for it any more. The
    finished worker itself waits until all other workers have finished as well.

    Args:
        ranks: Number of workers.
        staleness: How many gradients a worker may be ahead of the slowest worker: 0, 1, ... or
            `math.inf`.
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
        """Records that a worker has pushed a gradient and is now waiting to continue."""
        self._clocks[rank] += 1
        self._waiting.add(rank)

    def finish(self, rank: int) -> None:
        """Records that a worker won't push any more and is waiting for all others to finish."""
        self._clocks[rank] = math.inf
        self._waiting.add(rank)

    def release(self) -> list[int]:
        """Removes and returns the waiting workers that may continue now, in rank order."""
        free = sorted(rank for rank in self._waiting if not self.behind(rank))
        self._waiting.difference_update(free)
        return free

    def behind(self, rank: int) -> list[int]:
        """Returns the workers that `rank` must wait for."""
        clock = self._clocks[rank]
        least = clock if clock == math.inf else clock - self.staleness
        return [other for other, theirs in enumerate(self._clocks) if theirs < least]
