"""Simulated computations and exchanges that slow each other down when they run concurrently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much computations and exchanges slow each other down when they run concurrently.

    If the same processor computes and drives the network, an exchange competes with the computation
    for cycles, caches and memory bandwidth.

    Attributes:
        compute: How many times as long a computation takes while an exchange is running, at least
            1.
        exchange: How many times as long an exchange takes while at least one of its ranks is
            computing, at least 1.

    Raises:
        ValueError: A factor is below 1 or not finite.
    """

    compute: float = 1.0
    exchange: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "exchange"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"`{name}` of a contention must be at least 1, got {getattr(self, name)}"
                )


class Work:
    """A simulated computation or exchange whose speed may change while it's running.

    Args:
        seconds: How long the work takes if it runs undisturbed.
        at: Schedules a function to be called at a given simulated time.
        on_end: Called when the work ends.
    """

    def __init__(
        self,
        seconds: float,
        at: Callable[[float, Callable[[], None]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._left_s = seconds
        self._at = at
        self._on_end = on_end
        self._since_s = 0.0
        self._factor = 0.0
        self._version = 0
        self.start_s = 0.0

    def start(self, now_s: float, factor: float) -> None:
        """Begins the work. It takes `factor` times as long as undisturbed, until `change_pace` is
        called.
        """
        self.start_s = now_s
        self._since_s = now_s
        self._schedule_end(factor)

    def change_pace(self, now_s: float, factor: float) -> None:
        """Changes the work's speed: from now on, it takes `factor` times as long as undisturbed."""
        if factor == self._factor:
            # If the speed hasn't changed, keep the scheduled end. Computing it again would shift it
            # slightly through rounding errors.
            return
        self._left_s = max(0.0, self._left_s - (now_s - self._since_s) / self._factor)
        self._since_s = now_s
        self._schedule_end(factor)

    def _schedule_end(self, factor: float) -> None:
        self._factor = factor
        self._version += 1
        version = self._version
        self._at(self._since_s + self._left_s * factor, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version == self._version:
            # A call that was scheduled on the simulated clock can't be cancelled. So when the
            # work's speed changes, we schedule another call for the new end time, and increase the
            # version number. When the old call arrives, its version is outdated, and it's ignored.
            self._on_end()
