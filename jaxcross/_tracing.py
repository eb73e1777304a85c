"""Information about the step that's being traced, for library code that the step calls.

A user's step calls functions of this library, e.g. the `update` of a gradient exchange. While JAX
traces the step, these functions need to know things that aren't among their arguments: which axes
the step runs over, and whether another exchange has already exchanged a gradient. They look these
up in a context variable.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, final


class ExchangedLeaf(NamedTuple):
    """A leaf that an exchange has returned, with the exchange's name and axes."""

    leaf: weakref.ref[Any]
    by: str
    axes: frozenset[Hashable]


@final
class Tracing:
    """One trace of a step.

    Attributes:
        axes: The step's axes, outermost first. JAX knows the axes too, but not their order.
        running: The names and axes of the exchanges whose `update` is currently being traced,
            outermost first.
    """

    __slots__ = ("_exchanged", "axes", "running")

    def __init__(self, axes: Iterable[str] = ()) -> None:
        self.axes = tuple(axes)
        self.running: list[tuple[str, frozenset[Hashable]]] = []
        # Leaves returned by exchanges, keyed by `id`. Python may reuse the id of an object that no
        # longer exists, so each entry is removed when its leaf is freed.
        self._exchanged: dict[int, ExchangedLeaf] = {}

    def note_exchanged(self, leaf: Any, by: str, axes: frozenset[Hashable]) -> None:
        """Records that an exchange has returned this array or tracer, without keeping it alive."""
        key = id(leaf)
        exchanged = self._exchanged
        exchanged[key] = ExchangedLeaf(
            weakref.ref(leaf, lambda _: exchanged.pop(key, None)), by, axes
        )

    def exchanged(self, leaf: Any) -> ExchangedLeaf | None:
        """Returns the record about a leaf, or None if it wasn't returned by an exchange."""
        found = self._exchanged.get(id(leaf))
        return found if found is not None and found.leaf() is leaf else None


_CURRENT: ContextVar[Tracing | None] = ContextVar("tracing", default=None)


@contextmanager
def tracing(axes: Iterable[str] = ()) -> Iterator[Tracing]:
    """Marks the `with` block as tracing a step over `axes`, outermost first."""
    trace = Tracing(axes)
    before = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(before)


def current_tracing() -> Tracing | None:
    """Returns the trace that's in progress in this context, or None."""
    return _CURRENT.get()
