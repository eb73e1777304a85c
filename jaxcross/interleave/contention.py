"""Simulated work that slows down while something else runs on the same machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much longer the two lanes of a machine take when they run at the same time.

    If the processor both computes and drives the network, an exchange takes cycles, caches and
    memory away from a computation.

    Attributes:
        compute: Factor by which a computation takes longer while an exchange runs, at least 1.
        exchange: Factor by which an exchange takes longer while any of its ranks computes, at least
            1.

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
    """Work in progress whose pace may change before it ends.

    Args:
        seconds: How long the work takes if nothing slows it down.
        at: Schedules a function to be called at a given time.
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
        """Begins the work. `factor` applies until the pace changes; see `change_pace`."""
        self.start_s = self._since_s = now_s
        self._go_on(factor)

    def change_pace(self, now_s: float, factor: float) -> None:
        """From now on, the work takes `factor` times as long as undisturbed."""
        if factor == self._factor:
            # Don't compute an unchanged end again: rounding would move it a little.
            return
        self._left_s = max(0.0, self._left_s - (now_s - self._since_s) / self._factor)
        self._since_s = now_s
        self._go_on(factor)

    def _go_on(self, factor: float) -> None:
        self._factor = factor
        self._version += 1
        version = self._version
        self._at(self._since_s + self._left_s * factor, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version == self._version:
            # Otherwise the pace has changed since, and a later call was scheduled.
            self._on_end()
