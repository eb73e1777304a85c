"""Trees cut evenly, leaf by leaf: row `r` holds the r-th part of *every* leaf.

If we concatenated all leaves into one vector and cut that, each rank's share would begin in the
middle of some layer, a different one on each rank. Here all shares have the same layout, so layers
have static bounds within a share. The price is fewer than `count` elements of padding per leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def width(shape: Sequence[int], count: int, multiple: int = 1) -> int:
    """Returns how many elements of a leaf are in each of `count` rows, rounded up to `multiple`."""
    return -(-math.prod(shape) // (count * multiple)) * multiple


def split(leaf: jax.Array, count: int, multiple: int = 1) -> jax.Array:
    """Returns a leaf as `[count, width]`, padded with zeros at the end. Does not communicate."""
    elements = width(leaf.shape, count, multiple)
    return jnp.pad(leaf.reshape(-1), (0, count * elements - leaf.size)).reshape(count, elements)


def to_blocks(
    leaves: Sequence[jax.Array], count: int, dtype: jax.typing.DTypeLike, multiple: int = 1
) -> jax.Array:
    """Returns all leaves as one array `[count, sum of widths]`, cast to `dtype`."""
    return jnp.concatenate([split(x, count, multiple).astype(dtype) for x in leaves], axis=1)


def columns(
    rows: jax.Array, shapes: Sequence[Sequence[int]], count: int, multiple: int = 1
) -> list[jax.Array]:
    """Returns each leaf's columns of `rows`, along the last axis.

    `rows` may be any of the `count` rows, e.g. a single rank's.
    """
    bounds = itertools.accumulate((width(s, count, multiple) for s in shapes), initial=0)
    return [rows[..., a:b] for a, b in itertools.pairwise(bounds)]


def from_blocks(
    rows: jax.Array, shapes: Sequence[Sequence[int]], multiple: int = 1
) -> list[jax.Array]:
    """Returns the leaves in their shapes, from all rows; they keep the rows' element type."""
    found = columns(rows, shapes, rows.shape[0], multiple)
    return [
        x.reshape(-1)[: math.prod(s)].reshape(tuple(s)) for x, s in zip(found, shapes, strict=True)
    ]
