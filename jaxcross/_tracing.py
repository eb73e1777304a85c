"""The step that is being traced in this context, for library code that the step calls.

`Mesh` and the exchanges use it to find out over which axes the step runs, and which leaves were
already exchanged by whom.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, final


class ExchangedLeaf(NamedTuple):
    """A leaf that an exchange returned, with the exchange's name and the axes it went over."""

    leaf: weakref.ref[Any]
    by: str
    axes: frozenset[Hashable]


@final
class Tracing:
    """One trace of a step.

    Attributes:
        axes: The step's axes, outermost first. JAX's own environment of axes doesn't keep their
            order.
        running: The exchanges whose `update` is being traced, outermost first, each with its axes.
    """

    __slots__ = ("_exchanged", "axes", "running")

    def __init__(self, axes: Iterable[str] = ()) -> None:
        self.axes = tuple(axes)
        self.running: list[tuple[str, frozenset[Hashable]]] = []
        # The exchanged leaves by identity, as long as each leaf is alive.
        self._exchanged: dict[int, ExchangedLeaf] = {}

    def note_exchanged(self, leaf: Any, by: str, axes: frozenset[Hashable]) -> None:
        """Records that an exchange returned this array or tracer. Doesn't keep it alive."""
        key, exchanged = id(leaf), self._exchanged
        exchanged[key] = ExchangedLeaf(
            weakref.ref(leaf, lambda _: exchanged.pop(key, None)), by, axes
        )

    def exchanged(self, leaf: Any) -> ExchangedLeaf | None:
        """Returns what was recorded about a leaf, or None if no exchange returned it."""
        found = self._exchanged.get(id(leaf))
        return found if found is not None and found.leaf() is leaf else None


_CURRENT: ContextVar[Tracing | None] = ContextVar("tracing", default=None)


@contextmanager
def tracing(axes: Iterable[str] = ()) -> Iterator[Tracing]:
    """Marks this context as tracing a step over `axes`, outermost first."""
    trace = Tracing(axes)
    before = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(before)


def current_tracing() -> Tracing | None:
    """Returns the trace that is in progress in this context, or None."""
    return _CURRENT.get()
