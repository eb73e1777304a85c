"""Positions in a job's data, and how to bring a new iterator to a position."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Positioned(Protocol):
    """An iterator that can save and restore its position, e.g. Grain's or `jaxcross.data`'s."""

    def get_state(self) -> object: ...
    def set_state(self, state: object) -> None: ...


@dataclass(frozen=True, slots=True)
class DataPosition:
    """A position in a rank's data.

    Attributes:
        n_batches: The number of batches before it, the same on every rank.
        state: The iterator's own state as text, or None if it doesn't have one that JSON can
            represent.
    """

    n_batches: int = 0
    state: str | None = None


START = DataPosition()


def iterator_state(source: Iterator[object]) -> str | None:
    """Returns the state of `source` as text, or None without one that survives JSON unchanged."""
    if not isinstance(source, Positioned):
        return None
    state = source.get_state()
    if isinstance(state, bytes):
        return json.dumps({"bytes": base64.b64encode(state).decode()})
    try:
        text = json.dumps({"value": state})
        return text if json.loads(text)["value"] == state else None
    except (TypeError, ValueError):
        return None


def seek(
    position: DataPosition, source: Iterator[object], on_drop: Callable[[], None] = lambda: None
) -> None:
    """Brings a new iterator to `position`.

    If possible, this uses the iterator's own `set_state`. Otherwise, it reads and drops the batches
    before the position.

    Args:
        position: The target.
        source: The iterator.
        on_drop: Called after each dropped batch.

    Raises:
        ValueError: `position.state` wasn't written by `iterator_state`.
        Exception: Whatever the iterator raises.
    """
    if position.state is None or not isinstance(source, Positioned):
        for _ in range(position.n_batches):
            if next(source, _END) is _END:
                return
            on_drop()
        return
    state = json.loads(position.state)
    if not isinstance(state, dict) or set(state) not in ({"bytes"}, {"value"}):
        raise ValueError("the position in the data that a checkpoint holds cannot be understood")
    source.set_state(base64.b64decode(state["bytes"]) if "bytes" in state else state["value"])


_END = object()
