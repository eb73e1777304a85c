"""Decides which workers may go on, from the clocks of all workers as one server knows them.
Pure.
"""

from __future__ import annotations

import math


class Clocks:
    """The stale-synchronous rule: a worker at clock `c` waits until the slowest is at `c -
    staleness` or beyond.

    A worker's clock is the number of gradients that it has pushed, infinite once it has finished:
    then it waits for all others to finish, and no worker waits for it.

    Args:
        ranks: Number of workers.
        staleness: Clocks by which a worker may be ahead of the slowest: 0, 1, ... or `math.inf`.
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
        """Records that the worker has pushed a gradient, and waits to go on."""
        self._clocks[rank] += 1
        self._waiting.add(rank)

    def finish(self, rank: int) -> None:
        """Records that the worker will push no more, and waits for the end."""
        self._clocks[rank] = math.inf
        self._waiting.add(rank)

    def release(self) -> list[int]:
        """Returns the workers that waited and may go on, in order; they no longer wait."""
        free = sorted(rank for rank in self._waiting if not self.behind(rank))
        self._waiting.difference_update(free)
        return free

    def behind(self, rank: int) -> list[int]:
        """Returns the workers that `rank` must wait for."""
        clock = self._clocks[rank]
        least = clock if clock == math.inf else clock - self.staleness
        return [other for other, theirs in enumerate(self._clocks) if theirs < least]
