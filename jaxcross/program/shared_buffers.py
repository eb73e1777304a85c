"""Packs many arrays into one flat buffer and takes them out again.

`packed` and `unpacked` are what a program contains. XLA compiles these equations in linear time.

`split` is what a wire makes of `unpacked`: slices at constant positions, which
`compile_with_arguments` turns into arguments. XLA's CPU backend compiles only one kernel for
identical operations, but slices at different literal positions aren't identical. Each one takes 5
ms to compile, and the 1,500 small gradients of a shared buffer take 8 s. If the position is an
argument, all slices of the same size share a kernel. An argument costs 0.3 us per call.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
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


_LARGEST = np.iinfo(np.uint32).max


def split(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Splits a vector into consecutive pieces of these sizes.

    Pieces whose size occurs only once are sliced at literal positions, because they have no kernel
    to share.
    """
    times = Counter(sizes)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        _at_constant(flat, start, size)
        if times[size] > 1 and start <= _LARGEST
        else lax.slice(flat, (start,), (start + size,))
        for start, size in zip(starts, sizes, strict=False)
    ]


def _at_constant(flat: jax.Array, start: int, size: int) -> jax.Array:
    # An array of one element rather than a scalar: JAX would write a scalar into the equation as a
    # literal.
    position = np.asarray([start], np.uint32)
    return lax.dynamic_slice(flat, (lax.reshape(position, ()),), (size,))
