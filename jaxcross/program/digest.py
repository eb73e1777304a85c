"""Computes the keys under which equal segments share executables, and hashes of programs.

Segments that compute the same thing should get the same key. The printed jaxpr isn't good enough on
its own: it includes memory addresses, which differ between otherwise equal jaxprs, and omits
constants, the contexts in which equations are lowered, and the functions that callbacks call.

So the key is a hash of this text, minus the addresses, followed by everything that the text omits.
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
# Some parameters of these primitives are functions that JAX only needs for differentiation, such as
# derivative rules and policies for what to save. All derivatives have been taken by now, so we
# ignore these functions; what the equation computes is in its inner jaxprs.
_DERIVED = frozenset({"custom_jvp_call", "custom_vjp_call", "checkpoint", "remat", "remat2"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Compares its value by identity, and keeps it alive so that its id isn't reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def segment_key(segment: Segment) -> tuple[Any, ...]:
    """Returns a key that's equal for segments that can share an executable.

    The names of values don't matter. The key keeps any functions alive that the segment calls.
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
    """Returns a hash of `segment_key`.

    If the segment calls back into Python, the hash is only valid within this process.
    """
    digest = hashlib.sha256()
    for part in segment_key(segment):
        if isinstance(part, bytes | _Same):  # the text already covers other parts
            digest.update(part if isinstance(part, bytes) else f"{id(part.value)} ".encode())
    return digest.hexdigest()


def _unprinted(value: object) -> Iterator[Any]:
    """Yields whatever the text of a jaxpr or parameter omits, in hashable form.

    This includes constants, contexts, and the functions that callbacks call.
    """
    if isinstance(value, _PRINTED):
        return
    generator = compat.generator_name(value)
    if compat.is_jaxpr(value):
        inner, consts = compat.open_jaxpr(value)
        yield from map(_content, consts)
        # An equation's context affects how it's lowered: `threefry_partitionable`, for example,
        # determines which random bits are drawn.
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
        # Callables can look alike, or even compare equal, and still do different things, so we
        # compare them by identity. The exception is methods: since Python creates a new object on
        # every access, we treat methods as equal if they're bound to the same object and have the
        # same function.
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
