"""The progress of work that takes longer while something else runs on the same machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """The factors by which the two lanes of a machine take longer next to each other than alone.

    Where the processor computes and drives the network, an exchange takes cycles, caches and memory
    from a computation.

    Attributes:
        compute: Factor on a computation while an exchange runs, at least 1.
        exchange: Factor on an exchange while any of its ranks computes, at least 1.

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
    """Work in progress: so many seconds if nothing disturbs it, at a pace that may change on the
    way.

    Args:
        seconds: Seconds that it takes undisturbed.
        at: Calls a function at a time.
        on_end: Called at its end.
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
        """Begins, and takes `factor` times as long as undisturbed until the pace changes."""
        self.start_s = self._since_s = now_s
        self._go_on(factor)

    def change_pace(self, now_s: float, factor: float) -> None:
        """Takes `factor` times as long from now on."""
        if (
            factor == self._factor
        ):  # an end that does not change is not computed again: it would be another number
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
        if (
            version == self._version
        ):  # else the pace has changed since, and another call is on its way
            self._on_end()
