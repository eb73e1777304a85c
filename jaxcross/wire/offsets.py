"""Pieces of a vector at places that are constants of the trace, which `compile_with_arguments`
makes arguments of.

XLA's CPU backend compiles one kernel for all operations that are alike, and slices at different
literal places are not: 5 ms each, 8 s for the 1,500 small gradients of a shared buffer. With the
place as an argument, pieces of one size share a kernel. An argument costs 0.3 us a call.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

_LARGEST = np.iinfo(np.uint32).max


def split(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Returns consecutive pieces of a vector; those of a size that occurs once at literal
    places.
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
    # One element and not a scalar, which JAX would write into the equation as a literal.
    position = np.asarray([start], np.uint32)
    return lax.dynamic_slice(flat, (lax.reshape(position, ()),), (size,))
