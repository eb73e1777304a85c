"""Computes the key under which equal segments share an executable, and hashes of programs.

Segments that compute the same should have the same key. The printed jaxpr isn't enough for that: it
contains memory addresses, which differ even between equal jaxprs. It also leaves out constants, the
contexts in which equations are lowered, and the functions that callbacks call.

So the key consists of a hash of the text without addresses, followed by everything that the text
leaves out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import jax
import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Program, Segment

_PRINTED = (str, bytes, bool, int, float, complex, type(None), np.dtype)
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# The parameters of these primitives contain functions that JAX only needs for differentiation, such
# as derivative rules and policies for what to save. We ignore these, because all derivatives have
# already been taken. What the equation computes is in its inner jaxprs.
_DERIVED = frozenset({"custom_jvp_call", "custom_vjp_call", "checkpoint", "remat", "remat2"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Compares its value by identity. Keeps the value alive, so that its id isn't reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def segment_key(segment: Segment) -> tuple[Any, ...]:
    """Returns a key that's equal for segments that can share an executable.

    Names of values don't matter. The key keeps the functions that the segment calls alive.
    """
    body = f"{segment.kind} {len(segment.inputs)} {segment.jaxpr}"
    text = hashlib.sha256(_ADDRESS.sub("0x", body).encode()).digest()
    return text, *(() if segment.jaxpr is None else _unprinted(segment.jaxpr))


def program_digest(program: Program) -> str:
    """Hashes a program's structure, shapes, literals and equations on this rank.

    Programs with equal digests share executables.
    """
    return hashlib.sha256(
        "\n".join([program.text(), *map(segment_digest, program.segments)]).encode()
    ).hexdigest()


def segment_digest(segment: Segment) -> str:
    """Returns `segment_key` as a hash.

    If the segment calls back into Python, the hash is valid in this process only.
    """
    digest = hashlib.sha256()
    for part in segment_key(segment):
        if isinstance(part, bytes | _Same):  # of other parts, the text has all that can be hashed
            digest.update(part if isinstance(part, bytes) else f"{id(part.value)} ".encode())
    return digest.hexdigest()


def _unprinted(value: object) -> Iterator[Any]:
    """Yields, in hashable form, what the text of a jaxpr or parameter leaves out.

    This covers constants, contexts, and the functions that callbacks call.
    """
    if isinstance(value, _PRINTED):
        return
    generator = compat.generator_name(value)
    if compat.is_jaxpr(value):
        inner, consts = compat.open_jaxpr(value)
        yield from map(_content, consts)
        # The context of an equation decides how it's lowered; e.g. `threefry_partitionable` decides
        # which random bits are drawn.
        yield hashlib.sha256("\n".join(repr(eqn.ctx) for eqn in inner.eqns).encode()).digest()
        for eqn in inner.eqns:
            yield from (
                _content(a.val)
                for a in eqn.invars
                if isinstance(a, compat.Literal) and np.ndim(a.val)
            )
            known = (
                compat.sub_jaxprs(eqn) if eqn.primitive.name in _DERIVED else eqn.params.values()
            )
            for param in known:
                yield from _unprinted(param)
    elif generator is not None:  # a tuple of functions, printed as a tag of a few letters
        yield generator.encode()
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from _unprinted(item)
    elif isinstance(value, Mapping):
        yield from _unprinted(tuple(value.values()))
    elif isinstance(value, jax.Array | np.ndarray):
        yield _content(value)
    elif type(value).__module__.startswith("jax."):
        if dataclasses.is_dataclass(value):  # JAX wraps what a callback calls
            yield from _unprinted(tuple(getattr(value, f.name) for f in dataclasses.fields(value)))
        else:
            yield value if _hashable(value) else _Same(value)
    else:
        # Two callables may look alike, or even compare equal, and still do different things, so we
        # compare them by identity. Methods are an exception, because Python creates a new object
        # each time a method is accessed. So two methods count as equal if they belong to the same
        # object and have the same function.
        by_value = _hashable(value) and (isinstance(value, MethodType) or not callable(value))
        yield value if by_value else _Same(value)


def _content(array: object) -> bytes:
    return hashlib.sha256(compat.bytes_of(array)).digest()


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
