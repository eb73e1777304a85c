"""Many arrays in one flat buffer, in equations that XLA compiles in time linear in their number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax import lax

OPERANDS = 64
"""The longest concatenation: XLA's CPU backend takes time quadratic in the number of operands (1.4
s for 1,500).
"""


def packed(values: Sequence[jax.Array]) -> jax.Array:
    """Concatenates the elements of all values, one value after the other, into a vector."""
    flat = [lax.reshape(value, (value.size,)) for value in values]
    while len(flat) > OPERANDS:
        chunks = [flat[start : start + OPERANDS] for start in range(0, len(flat), OPERANDS)]
        # Without the barrier XLA fuses the chunks back into one concatenation.
        flat = list(lax.optimization_barrier([lax.concatenate(chunk, 0) for chunk in chunks]))
    return flat[0] if len(flat) == 1 else lax.concatenate(flat, 0)


def unpacked(flat: jax.Array, shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
    """Splits a vector that `packed` made into arrays of these shapes."""
    pieces = lax.split(flat, [math.prod(shape) for shape in shapes])
    return [lax.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]
