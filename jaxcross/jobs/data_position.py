"""Where a job stands in its data, and how to get there again."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Positioned(Protocol):
    """An iterator that knows its place: Grain's do, and those of `jaxcross.data`."""

    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a rank's data.

    Attributes:
        taken: Batches before it, the same on every rank.
        state: The iterator's own word for it, as text, if it has one that can be written.
    """

    taken: int = 0
    state: str | None = None


START = Place()


def state_of(source: Iterator[Any]) -> str | None:
    """What `source` says of its place, if that can be written and read back as it is."""
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


def go_to(place: Place, source: Iterator[Any], dropped: Callable[[], None] = lambda: None) -> None:
    """Brings a new iterator to `place`: by its own means, else by dropping the batches before it.

    Args:
        place: Where to.
        source: The iterator.
        dropped: Called after each batch that was.

    Raises:
        ValueError: The text is none that `state_of` wrote. Else what the iterator raises.
    """
    if place.state is None or not isinstance(source, Positioned):
        for _ in range(place.taken):
            if next(source, _END) is _END:
                return
            dropped()
        return
    state = json.loads(place.state)
    if not isinstance(state, dict) or set(state) not in ({"bytes"}, {"value"}):
        raise ValueError("what a checkpoint says of the data's place is no such thing")
    source.set_state(base64.b64decode(state["bytes"]) if "bytes" in state else state["value"])


_END = object()
