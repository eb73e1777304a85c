"""Packs many arrays into one flat buffer; XLA compiles the equations in linear time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax

OPERANDS = 64
"""The most operands of one concatenation. XLA's CPU backend takes quadratic time (1.4 s for 1,500).
"""


def packed(values: Sequence[jax.Array]) -> jax.Array:
    """Concatenates the flattened values, one after the other, into a vector."""
    flat = [lax.reshape(value, (value.size,)) for value in values]
    while len(flat) > OPERANDS:
        chunks = [flat[start : start + OPERANDS] for start in range(0, len(flat), OPERANDS)]
        # Without the barrier, XLA would fuse the chunks back into a single concatenation.
        flat = list(lax.optimization_barrier([lax.concatenate(chunk, 0) for chunk in chunks]))
    return flat[0] if len(flat) == 1 else lax.concatenate(flat, 0)


def unpacked(flat: jax.Array, shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
    """Splits a vector that `packed` made into arrays of these shapes."""
    pieces = lax.split(flat, [math.prod(shape) for shape in shapes])
    return [lax.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]
