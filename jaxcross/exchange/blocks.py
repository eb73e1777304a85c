"""Trees cut evenly, leaf by leaf: row `r` holds the r-th part of *every* leaf, so that layers keep
static bounds.

In a plain flat vector the share of a rank begins in the middle of some layer, another one on each
rank. Here every share has the same layout, at the price of fewer than `count` padding elements a
leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def width(shape: Sequence[int], count: int, multiple: int = 1) -> int:
    """Elements of a leaf in each of `count` rows, rounded up to a multiple."""
    return -(-math.prod(shape) // (count * multiple)) * multiple


def split(leaf: jax.Array, count: int, multiple: int = 1) -> jax.Array:
    """A leaf as `[count, width]`, padded with zeros at the end. Communicates nothing."""
    elements = width(leaf.shape, count, multiple)
    return jnp.pad(leaf.reshape(-1), (0, count * elements - leaf.size)).reshape(count, elements)


def to_blocks(
    leaves: Sequence[jax.Array], count: int, dtype: jax.typing.DTypeLike, multiple: int = 1
) -> jax.Array:
    """All leaves as one `[count, sum of widths]`, cast to `dtype`."""
    return jnp.concatenate([split(x, count, multiple).astype(dtype) for x in leaves], axis=1)


def columns(
    rows: jax.Array, shapes: Sequence[Sequence[int]], count: int, multiple: int = 1
) -> list[jax.Array]:
    """Each leaf's columns, of some or all of the `count` rows along the last axis."""
    bounds = itertools.accumulate((width(s, count, multiple) for s in shapes), initial=0)
    return [rows[..., a:b] for a, b in itertools.pairwise(bounds)]


def from_blocks(
    rows: jax.Array, shapes: Sequence[Sequence[int]], multiple: int = 1
) -> list[jax.Array]:
    """The leaves that lie in all rows, in their shapes and the rows' type."""
    found = columns(rows, shapes, rows.shape[0], multiple)
    return [
        x.reshape(-1)[: math.prod(s)].reshape(tuple(s)) for x, s in zip(found, shapes, strict=True)
    ]
