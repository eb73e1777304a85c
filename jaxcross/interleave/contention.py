"""Simulated computations and exchanges that slow each other down when they run concurrently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much computations and exchanges slow each other down when they run concurrently.

    When the processor that computes also drives the network, exchanges and computation compete for
    cycles, caches and memory bandwidth.

    Attributes:
        compute: The factor by which computation slows down while an exchange is running, at least
            1.
        exchange: The factor by which an exchange slows down while at least one of its ranks is
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
                    f"`{name}` of a contention must be at least 1 and finite, got "
                    f"{getattr(self, name)}"
                )


class Work:
    """A simulated computation or exchange whose speed may change midway.

    Args:
        seconds: How long the work takes when undisturbed.
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
        """Starts the work, with its duration stretched by `factor` until the next `change_pace`."""
        self.start_s = now_s
        self._since_s = now_s
        self._schedule_end(factor)

    def change_pace(self, now_s: float, factor: float) -> None:
        """Changes the factor by which the work's remaining duration is stretched."""
        if factor == self._factor:
            # Same speed, so keep the scheduled end. Recomputing it would only add rounding errors.
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
            # Calls scheduled on the simulated clock can't be cancelled. Instead, whenever the speed
            # changes, we bump the version and schedule another call for the new end time. When the
            # old call fires, it finds its version outdated and does nothing.
            self._on_end()
