"""Slices of a vector at constant positions, which `compile_with_arguments` turns into arguments.

XLA's CPU backend compiles only one kernel for identical operations, but slices at different literal
positions aren't identical. Each one takes 5 ms to compile, and the 1,500 small gradients of a
shared buffer take 8 s. If the position is an argument, all slices of the same size share a kernel.
An argument costs 0.3 us per call.
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
