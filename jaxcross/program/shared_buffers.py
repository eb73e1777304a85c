"""Packs many arrays into one flat buffer, and unpacks them again.

A program packs small arrays into a buffer with `packed`, exchanges the buffer, and takes the arrays
back out with `unpacked`. XLA compiles these equations in linear time.

A wire replaces `unpacked` with `split`, which slices at constant positions;
`compile_with_arguments` then turns these positions into arguments. The reason is that XLA's CPU
backend compiles only one kernel for identical operations, but slices at different literal positions
aren't identical. At 5 ms of compile time each, the 1,500 small gradients of a shared buffer take 8
s.

With the position as an argument, all slices of the same size share a kernel, which costs only 0.3
us per call.
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
"""Maximum number of operands in a concatenation.

XLA's CPU backend takes quadratic time to compile a concatenation (1.4 s for 1,500 operands).
"""


def packed(values: Sequence[jax.Array]) -> jax.Array:
    """Flattens the values and concatenates them into a vector."""
    flat = [lax.reshape(value, (value.size,)) for value in values]
    while len(flat) > OPERANDS:
        chunks = [flat[start : start + OPERANDS] for start in range(0, len(flat), OPERANDS)]
        # Without the barrier, XLA would fuse the chunks back into a single concatenation.
        flat = list(lax.optimization_barrier([lax.concatenate(chunk, 0) for chunk in chunks]))
    return flat[0] if len(flat) == 1 else lax.concatenate(flat, 0)


def unpacked(flat: jax.Array, shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
    """Splits a vector made by `packed` into arrays of these shapes."""
    parts = lax.split(flat, [math.prod(shape) for shape in shapes])
    return [lax.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


_LARGEST = np.iinfo(np.uint32).max


def split(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Splits a vector into consecutive parts of these sizes.

    Parts of the same size are sliced at positions that later become arguments, so that XLA compiles
    only one kernel for all of them. If a size occurs only once, that part is sliced at a literal
    position, because there's no other part to share a kernel with.
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
    # The position must be a one-element array, because JAX would write a scalar into the equation
    # as a literal.
    position = np.asarray([start], np.uint32)
    return lax.dynamic_slice(flat, (lax.reshape(position, ()),), (size,))
