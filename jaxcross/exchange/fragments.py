"""A tree of arrays cut into fragments of equal size: even parts of the vector that its leaves would form.

A fragment is a vector of its own, so that work on one touches no other, and no copy of the whole tree is ever made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._pytree import PyTree
from jaxcross.exchange.validation import is_float


class Piece(NamedTuple):
    """Attributes: `leaf`, position of a leaf of the tree; `start` and `stop`, of its elements, row after row."""

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragments:
    """The cut of a tree. Static: knows shapes and types, holds no array.

    Attributes:
        pieces: Of each fragment, in the order of the tree's leaves. Leaves that are not floating-point are in none.
        width: Elements of a fragment's vector, which ends with zeros.
        dtype: Element type of the vectors, float32 at least.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    width: int
    dtype: np.dtype

    def take(self, tree: PyTree, fragment: int) -> jax.Array:
        """Returns a fragment of a tree as a vector. Copies."""
        leaves = jax.tree.leaves(tree)
        parts = [_flat(leaves[p.leaf])[p.start : p.stop].astype(self.dtype) for p in self.pieces[fragment]]
        missing = self.width - sum(p.stop - p.start for p in self.pieces[fragment])
        return jnp.concatenate([*parts, jnp.zeros(missing, self.dtype)])

    def put(self, tree: PyTree, fragment: int, vector: jax.Array) -> PyTree:
        """Returns the tree with a fragment taken from a vector, in the leaves' own types."""
        leaves, treedef = jax.tree.flatten(tree)
        at = 0
        for leaf, start, stop in self.pieces[fragment]:
            old = leaves[leaf]
            part = vector[at : at + stop - start].astype(old.dtype)
            at += stop - start
            whole = stop - start == old.size
            flat = part if whole else jax.lax.dynamic_update_slice(_flat(old), part, (start,))
            leaves[leaf] = flat.reshape(old.shape)
        return jax.tree.unflatten(treedef, leaves)


def cut(tree: PyTree, fragments: int, *, multiple: int = 1) -> Fragments:
    """Returns the cut of a tree into so many fragments, whose width is a multiple of `multiple`.

    Args:
        tree: Arrays, or their types.
        fragments: From 1 on; more than the tree has elements leave some empty.
        multiple: Divisor of the width.
    """
    leaves: list[Any] = jax.tree.leaves(tree)
    moving = [i for i, x in enumerate(leaves) if is_float(x)]
    sizes = [math.prod(jnp.shape(leaves[i])) for i in moving]
    bounds = [*itertools.accumulate(sizes, initial=0)]
    share = -(-bounds[-1] // fragments)
    pieces = tuple(_pieces(moving, bounds, n * share, (n + 1) * share) for n in range(fragments))
    dtype = jnp.result_type(jnp.float32, *(jnp.result_type(leaves[i]) for i in moving))
    return Fragments(pieces=pieces, width=-(-share // multiple) * multiple, dtype=jnp.dtype(dtype))


def _pieces(leaves: Sequence[int], bounds: Sequence[int], start: int, stop: int) -> tuple[Piece, ...]:
    """Returns what lies between two places of the vector of all leaves."""
    found = (
        Piece(leaf, max(start, low) - low, min(stop, high) - low)
        for leaf, (low, high) in zip(leaves, itertools.pairwise(bounds), strict=True)
    )
    return tuple(p for p in found if p.start < p.stop)


def _flat(leaf: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(leaf).reshape(-1)
