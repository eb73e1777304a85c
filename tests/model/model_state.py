"""Copies and names the states of pure objects, for a search that must visit each state only once.

Both walk through a state by the types of its values, with one function per type that is created
when the type first occurs. A search spends half of its time here. That's why we check whether a
value is immutable *before* we call a function on it, and why the check is written out inline
wherever it's needed: one more call per item would cost a fifth of the time.
"""

from __future__ import annotations

import hashlib
import marshal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np

from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import Ballot, Verdict


class _Ways(dict[type, Any]):
    """Maps each type to the function for its values, created on first use. None means that such a
    value is used as it is.
    """

    def __init__(self, make: Callable[[type], Callable[[Any], Any] | None]) -> None:
        super().__init__(dict.fromkeys((type(None), bool, int, float, str, bytes)))
        self.make = make

    def __missing__(self, kind: type) -> Callable[[Any], Any] | None:
        self[kind] = way = self.make(kind)
        return way


def clone(value: Any) -> Any:
    """Returns a copy that shares only immutable values: tuples, frozen dataclasses, verdicts.

    Raises:
        TypeError: The state holds a standard-library or NumPy object that we can't copy.
    """
    return way(value) if (way := _CLONERS[type(value)]) else value


def name(value: Any) -> bytes:
    """Returns a 16-byte digest of a state's contents, which is the same for equal states.

    The order in which sets and numbered dictionaries were filled makes no difference.
    """
    plain = way(value) if (way := _DESCRIBERS[type(value)]) else value
    # Version 2 doesn't encode references, so equal values have equal bytes no matter which objects
    # they share.
    return hashlib.blake2b(marshal.dumps(plain, 2), digest_size=16).digest()


def _cloner(kind: type) -> Callable[[Any], Any] | None:
    """Returns the function that copies values of a mutable type, or None for an immutable type."""
    if kind in (tuple, frozenset, Verdict) or _frozen(kind) or issubclass(kind, Enum):
        return None
    ways = _CLONERS
    if kind is list:
        return lambda value: [way(item) if (way := ways[type(item)]) else item for item in value]
    if kind is deque:
        return lambda value: deque(
            [way(item) if (way := ways[type(item)]) else item for item in value]
        )
    if kind is dict:
        # Most dictionaries are empty, so check that first.
        return lambda value: (
            {key: way(item) if (way := ways[type(item)]) else item for key, item in value.items()}
            if value
            else {}
        )
    if kind is set:
        return set.copy
    if kind is Ballot:
        return _clone_ballot
    if kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "numpy"):
        raise TypeError(
            f"`{kind.__module__}.{kind.__qualname__}` has no place in a state that is copied and "
            "compared"
        )
    slots = _slots(kind)
    members = [(getattr(kind, slot).__get__, getattr(kind, slot).__set__) for slot in slots]
    whole = ways[dict] if kind.__dictoffset__ else None

    def copy(value: Any) -> Any:
        new = object.__new__(kind)
        for get, put in members:
            item = get(value)
            put(new, way(item) if (way := ways[type(item)]) else item)
        if whole is not None:
            new.__dict__ = whole(value.__dict__)
        return new

    return copy


def _clone_ballot(ballot: Ballot) -> Ballot:
    new = object.__new__(Ballot)
    new._vector, rows = ballot._vector.copy(), ballot._rows
    new._rows = new._vector[-rows.size :].reshape(rows.shape)  # a view, as in the original
    return new


def _describer(kind: type) -> Callable[[Any], Any]:
    """Returns the function that converts values of a type to plain data."""
    ways = _DESCRIBERS
    if kind in (tuple, list, deque):
        return lambda value: (
            tuple([way(item) if (way := ways[type(item)]) else item for item in value])
            if value
            else ()
        )
    if kind is dict:
        return lambda value: (
            tuple(
                [
                    (key, way(item) if (way := ways[type(item := value[key])]) else item)
                    for key in _in_order(value)
                ]
            )
            if value
            else ()
        )
    if issubclass(kind, Enum):
        return lambda value: value.value
    if kind in (set, frozenset):
        return lambda value: tuple(sorted(value)) if value else ()
    if kind is Ballot:
        return lambda value: value._vector.tobytes()
    if kind is Verdict:
        return lambda value: (value.stop, value.gather, np.ascontiguousarray(value._rows).tobytes())
    # The search uses the same step graphs and policies throughout, so identity is enough. Only
    # policies have `share`.
    if kind is StepGraph or hasattr(kind, "share"):
        return id
    slots = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else _slots(kind)
    label = kind.__name__
    held = (
        values_of(slots)
        if slots
        else lambda value: [item for _, item in sorted(value.__dict__.items())]
    )
    return lambda value: (
        label,
        *[way(item) if (way := ways[type(item)]) else item for item in held(value)],
    )


def values_of(attributes: Sequence[str]) -> Callable[[Any], Sequence[Any]]:
    """Returns a function that looks up these attributes of a value, always as a sequence."""
    look = attrgetter(*attributes)
    return look if len(attributes) > 1 else lambda value: (look(value),)


def _in_order(value: dict[Any, Any]) -> Iterable[Any]:
    """Sorts numeric keys, because they are only looked up and their order doesn't matter. Names
    keep their order, because they are sent to other ranks in it.
    """
    return value if isinstance(next(iter(value)), str) else sorted(value)


def _frozen(kind: type) -> bool:
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _slots(kind: type) -> tuple[str, ...]:
    return tuple(slot for base in kind.__mro__ for slot in base.__dict__.get("__slots__", ()))


_CLONERS, _DESCRIBERS = _Ways(_cloner), _Ways(_describer)
