"""Copies and names of the states of pure objects, for a search that must meet each state once.

Both go through a state by the types of what it holds: one function a type, made when the type is first met. Half of a
search's time is spent here, which is why what nobody changes is asked for before a function is called.
"""

from __future__ import annotations

import hashlib
import marshal
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import Ballot, Verdict

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))


def clone(value: Any) -> Any:
    """A copy that shares only what nobody changes: tuples, frozen dataclasses, verdicts.

    Raises:
        TypeError: It holds something of which that cannot be said.
    """
    kind = type(value)
    return value if kind in _ATOMS or (copy := _cloner(kind)) is None else copy(value)


def name(value: Any) -> bytes:
    """16 bytes that are equal for equal states: a digest of what is in them, in an order of its own."""
    # Version 2 knows no references: equal values have equal bytes, whoever shares them.
    return hashlib.blake2b(marshal.dumps(_plain(value), 2), digest_size=16).digest()


def _plain(value: Any) -> Any:
    kind = type(value)
    return value if kind in _ATOMS else _describer(kind)(value)


@cache
def _cloner(kind: type) -> Callable[[Any], Any] | None:
    """How a mutable value is copied; None for what no one changes."""
    if kind in _ATOMS or kind in (tuple, frozenset, Verdict) or _frozen(kind) or issubclass(kind, Enum):
        return None
    if kind is list:
        return lambda value: [item if type(item) in _ATOMS else clone(item) for item in value]
    if kind is deque:
        return lambda value: deque(map(clone, value))
    if kind is dict:
        return lambda value: {k: item if type(item) in _ATOMS else clone(item) for k, item in value.items()}
    if kind is set:
        return set.copy
    if kind is Ballot:
        return _clone_ballot
    if kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "numpy"):
        raise TypeError(f"`{kind.__module__}.{kind.__qualname__}` has no place in a state that is copied and compared")
    slots = _slots(kind)
    whole = _cloner(dict) if kind.__dictoffset__ else None

    def copy(value: Any) -> Any:
        new = object.__new__(kind)
        for slot in slots:
            item = getattr(value, slot)
            setattr(new, slot, item if type(item) in _ATOMS else clone(item))
        if whole is not None:
            new.__dict__ = whole(value.__dict__)
        return new

    return copy


def _clone_ballot(ballot: Ballot) -> Ballot:
    new = object.__new__(Ballot)
    new._vector, rows = ballot._vector.copy(), ballot._rows
    new._rows = new._vector[-rows.size :].reshape(rows.shape)  # a view, there as here
    return new


@cache
def _describer(kind: type) -> Callable[[Any], Any]:
    """What makes plain data of a value."""
    if kind in (tuple, list, deque):
        return lambda value: tuple([item if type(item) in _ATOMS else _plain(item) for item in value])
    if kind is dict:
        return lambda value: tuple([(key, _plain(value[key])) for key in _in_order(value)])
    if issubclass(kind, Enum):
        return lambda value: value.value
    if kind in (set, frozenset):
        return lambda value: tuple(sorted(value))
    if kind is Ballot:
        return lambda value: value._vector.tobytes()
    if kind is Verdict:
        return lambda value: (value.stop, value.gather, np.ascontiguousarray(value._rows).tobytes())
    if kind is StepGraph or hasattr(kind, "share"):  # a policy: like a step graph, one object for the whole search
        return id
    slots = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else _slots(kind)
    label = kind.__name__

    def describe(value: Any) -> Any:
        items = [getattr(value, slot) for slot in slots]
        if not slots:
            attributes = value.__dict__
            items = [attributes[key] for key in sorted(attributes)]
        return label, *[item if type(item) in _ATOMS else _plain(item) for item in items]

    return describe


def _in_order(value: dict[Any, Any]) -> Iterable[Any]:
    """Numbers are looked up, in whatever order they came; names are told to other ranks in the order that they have."""
    return value if any(isinstance(key, str) for key in value) else sorted(value)


def _frozen(kind: type) -> bool:
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _slots(kind: type) -> tuple[str, ...]:
    return tuple(slot for base in kind.__mro__ for slot in base.__dict__.get("__slots__", ()))
