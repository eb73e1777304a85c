"""A tree of arrays cut into fragments of equal size.

The fragments are even parts of the vector that the leaves would form if they were concatenated.
That vector is never made, since it would be a copy of the whole tree. Each fragment is a vector by
itself, so working on one doesn't touch the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._pytree import PyTree
from jaxcross.exchange.arithmetic import is_float


class Piece(NamedTuple):
    """A range of a leaf's elements, which belongs to one fragment.

    Attributes:
        leaf: Position of the leaf in the tree.
        start: First element, in row-major order.
        stop: End of the elements.
        shape: The leaf's shape if the piece is the whole leaf, otherwise `[stop - start]`.
    """

    leaf: int
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, leaf: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(leaf)
        return x if x.shape == self.shape else x.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragments:
    """The cut of a tree. Static: holds shapes and types, but no arrays.

    Attributes:
        pieces: The pieces of each fragment, in the order of the tree's leaves. Leaves that are not
            floating-point are in none.
        width: Length of a fragment's vector, which is padded with zeros.
        dtype: Element type of the vectors, float32 at least.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    width: int
    dtype: np.dtype

    def take(self, tree: PyTree, fragment: int) -> jax.Array:
        """Returns a fragment of a tree as a vector, which is a copy."""
        parts = self.parts(tree, fragment)
        missing = self.width - sum(part.size for part in parts)
        return jnp.concatenate(
            [*(part.reshape(-1) for part in parts), jnp.zeros(missing, self.dtype)]
        )

    def parts(self, tree: PyTree, fragment: int) -> list[jax.Array]:
        """Returns the pieces of a fragment of a tree, each in its shape, all in the vectors' type.

        Use this rather than `take` for work that can be done piece by piece, because making a
        vector reads and writes all its memory once more. Pieces keep the shape of a whole leaf,
        because XLA can write a leaf in place only if its shape doesn't change on the way.
        """
        leaves = jax.tree.leaves(tree)
        return [p.of(leaves[p.leaf]).astype(self.dtype) for p in self.pieces[fragment]]

    def split(self, vector: jax.Array, fragment: int) -> list[jax.Array]:
        """Returns the pieces of a fragment's vector, each in its shape."""
        pieces = self.pieces[fragment]
        bounds = itertools.pairwise(
            itertools.accumulate((p.stop - p.start for p in pieces), initial=0)
        )
        return [
            vector[start:stop].reshape(p.shape)
            for p, (start, stop) in zip(pieces, bounds, strict=True)
        ]

    def put(self, tree: PyTree, fragment: int, parts: Sequence[jax.Array]) -> PyTree:
        """Returns the tree with the pieces of a fragment replaced, in the leaves' own types."""
        leaves, treedef = jax.tree.flatten(tree)
        for piece, part in zip(self.pieces[fragment], parts, strict=True):
            old, new = leaves[piece.leaf], part.astype(leaves[piece.leaf].dtype)
            if piece.shape != old.shape:
                new = jax.lax.dynamic_update_slice(old.reshape(-1), new, (piece.start,)).reshape(
                    old.shape
                )
            leaves[piece.leaf] = new
        return jax.tree.unflatten(treedef, leaves)


def cut(tree: PyTree, fragments: int, *, multiple: int = 1) -> Fragments:
    """Returns the cut of a tree into `fragments` parts, whose width is a multiple of `multiple`.

    Args:
        tree: Arrays, or their types.
        fragments: At least 1. If there are more than the tree has elements, some are empty.
        multiple: Divisor of the width.
    """
    leaves: list[Any] = jax.tree.leaves(tree)
    moving = [i for i, x in enumerate(leaves) if is_float(x)]
    shapes = {i: jnp.shape(leaves[i]) for i in moving}
    bounds = [*itertools.accumulate(map(math.prod, shapes.values()), initial=0)]
    share = -(-bounds[-1] // fragments)
    pieces = tuple(_pieces(shapes, bounds, n * share, (n + 1) * share) for n in range(fragments))
    dtype = jnp.result_type(jnp.float32, *(jnp.result_type(leaves[i]) for i in moving))
    return Fragments(pieces=pieces, width=-(-share // multiple) * multiple, dtype=jnp.dtype(dtype))


def _pieces(
    shapes: Mapping[int, tuple[int, ...]], bounds: Sequence[int], start: int, stop: int
) -> tuple[Piece, ...]:
    """Returns the pieces between two positions of the vector of all leaves."""
    found = []
    for (leaf, shape), (low, high) in zip(shapes.items(), itertools.pairwise(bounds), strict=True):
        begin, end = max(start, low), min(stop, high)
        if begin < end:
            found.append(
                Piece(
                    leaf,
                    begin - low,
                    end - low,
                    shape if (begin, end) == (low, high) else (end - begin,),
                )
            )
    return tuple(found)
