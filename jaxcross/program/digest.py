"""What makes two segments alike: the key under which executables are shared."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.program.segments import Segment

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})  # hold rules of derivatives that have been taken already


def segment_digest(segment: Segment) -> str:
    """Hash of what a segment computes, whatever its values are called."""
    body = f"{segment.kind} {len(segment.inputs)} {segment.jaxpr}"
    digest = hashlib.sha256(_ADDRESS.sub("0x", body).encode())
    if segment.jaxpr is not None:
        for part in _unprinted(segment.jaxpr):
            digest.update(part)
    return digest.hexdigest()


def _unprinted(jaxpr: Any) -> Iterator[bytes]:
    """What the text of a jaxpr leaves out: constants of jaxprs inside it, and which function a callback calls."""
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name not in _CUSTOM:
            yield from (text.encode() for v in eqn.params.values() if callable(v) and " at 0x" in (text := repr(v)))
        for inner in compat.sub_jaxprs(eqn):
            for const in compat.open_jaxpr(inner)[1]:
                yield compat.bytes_of(const)
            yield from _unprinted(inner)
