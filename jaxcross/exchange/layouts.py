"""Layouts that arrange the leaves of a tree for an exchange.

Exchanges operate on vectors, or on rows of equal length, whereas a model is a tree of arrays
(leaves) of arbitrary shape. This file has four ways to get from one to the other. Which one a
strategy uses depends on what it cares about most: static layer boundaries, few messages, little
copying, or short indices.

**Blocks.** We cut every leaf into equal parts, and row `r` of the result holds the r-th part of
*every* leaf. Adasum, the sharded optimizer and the hierarchical top-k use this layout.

The alternative would be to concatenate all leaves and cut the resulting vector. But then each
rank's part would start in the middle of a layer, and in a different one for each rank. With blocks,
layer boundaries are static and the same in every rank's part, at the cost of fewer than `count`
elements of padding per leaf.

**Vectors.** We lay out all leaves end to end in a single padded vector. This copies the whole tree,
but lets operations like a ring all-reduce or bit packing process everything at once with a single
message, instead of leaf by leaf.

**Fragments.** We treat the leaves as a single long vector and cut that into equal fragments. The
long vector itself is never materialised, since that would copy the tree. Each fragment is a vector
of its own, so working on it doesn't touch the memory of the others. Streaming DiLoCo exchanges one
fragment at a time.

**Chunks.** Strategies that only send the largest elements (SparseLoCo and decoupled momentum) cut a
leaf into chunks of equal length, and send the same number of elements from each. That way, regions
of a layer with small values still get to send something. As a bonus, indices within a chunk take
fewer bits than indices within the leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxcross._pytree import PyTree
from jaxcross.exchange.arithmetic import is_float


def block_width(shape: Sequence[int], count: int, multiple: int = 1) -> int:
    """Returns how many elements of a leaf go in each of `count` rows, rounded up to `multiple`."""
    return -(-math.prod(shape) // (count * multiple)) * multiple


def leaf_blocks(leaf: jax.Array, count: int, multiple: int = 1) -> jax.Array:
    """Returns a leaf as `[count, width]`, zero-padded at the end. Does not communicate."""
    elements = block_width(leaf.shape, count, multiple)
    return jnp.pad(leaf.reshape(-1), (0, count * elements - leaf.size)).reshape(count, elements)


def to_blocks(
    leaves: Sequence[jax.Array], count: int, dtype: jax.typing.DTypeLike, multiple: int = 1
) -> jax.Array:
    """Packs all leaves into one array `[count, sum of widths]` of type `dtype`."""
    return jnp.concatenate([leaf_blocks(x, count, multiple).astype(dtype) for x in leaves], axis=1)


def block_columns(
    rows: jax.Array, shapes: Sequence[Sequence[int]], count: int, multiple: int = 1
) -> list[jax.Array]:
    """Returns the columns of `rows` that belong to each leaf, along the last axis.

    `rows` can be any subset of the `count` rows, e.g. just the local rank's.
    """
    bounds = itertools.accumulate((block_width(s, count, multiple) for s in shapes), initial=0)
    return [rows[..., a:b] for a, b in itertools.pairwise(bounds)]


def from_blocks(
    rows: jax.Array, shapes: Sequence[Sequence[int]], multiple: int = 1
) -> list[jax.Array]:
    """Restores the leaves' shapes from all rows. Element types stay as they are in `rows`."""
    found = block_columns(rows, shapes, rows.shape[0], multiple)
    return [
        x.reshape(-1)[: math.prod(s)].reshape(tuple(s)) for x, s in zip(found, shapes, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class VectorLayout:
    """Where each leaf of a tree is located in the vector.

    Layouts are static: they consist of shapes and types and don't hold any arrays.

    Attributes:
        treedef: Structure of the tree.
        shapes: Shape of each leaf.
        dtypes: Element type of each leaf, which `unravel` casts back to.
        bounds: Leaf `i` spans the elements from `bounds[i]` to `bounds[i + 1]`.
        length: Length of the vector, i.e. all elements plus zero padding up to a multiple.
        dtype: Element type of the vector, which can represent every leaf's type.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    bounds: tuple[int, ...]
    length: int
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Total number of elements, excluding the padding."""
        return self.bounds[-1]

    def ravel(self, tree: PyTree) -> jax.Array:
        """Returns the tree's leaves end to end, cast to `dtype` and zero-padded.

        This makes a copy.
        """
        parts = [
            jnp.asarray(x).reshape(-1).astype(self.dtype) for x in self.treedef.flatten_up_to(tree)
        ]
        if self.length > self.size:
            parts.append(jnp.zeros(self.length - self.size, self.dtype))
        return jnp.concatenate(parts) if parts else jnp.zeros(0, self.dtype)

    def unravel(self, vector: jax.Array) -> PyTree:
        """Rebuilds the tree from `vector`, with the leaves' original shapes and types."""
        ranges = itertools.pairwise(self.bounds)
        leaves = [
            jax.lax.slice_in_dim(vector, start, stop).reshape(shape).astype(dtype)
            for (start, stop), shape, dtype in zip(ranges, self.shapes, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)


def vector_layout(
    tree: PyTree, *, multiple: int = 1, dtype: DTypeLike | None = None
) -> VectorLayout:
    """Lays out `tree` in one vector whose length is a multiple of `multiple`.

    Args:
        tree: Arrays or `jax.ShapeDtypeStruct`; may be empty.
        multiple: The vector's length is a multiple of this, for example of the number of ranks.
        dtype: Element type of the vector. If None, the type that all leaves promote to.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes = tuple(tuple(jnp.shape(x)) for x in leaves)
    dtypes = tuple(jnp.result_type(x) for x in leaves)
    if dtype is None:
        dtype = jnp.result_type(*dtypes) if dtypes else jnp.float32
    bounds = tuple(itertools.accumulate((math.prod(s) for s in shapes), initial=0))
    length = -(-bounds[-1] // multiple) * multiple
    dtype = jnp.dtype(dtype)
    return VectorLayout(
        treedef=treedef, shapes=shapes, dtypes=dtypes, bounds=bounds, length=length, dtype=dtype
    )


def ravel_floats(
    tree: PyTree, *, multiple: int = 1
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], PyTree]]:
    """Packs the floating-point leaves into one vector per type. Also returns the inverse function.

    That function turns vectors of the same lengths back into a tree. Joining leaves pays off
    because hops between neighbours are dominated by latency, so it's faster to send one message per
    element type than one per leaf. Vectors are zero-padded to a multiple of `multiple`. Types
    without any elements don't get a vector.
    """
    leaves, treedef = jax.tree.flatten(tree)
    groups = [
        members
        for members in group_by_dtype(leaves).values()
        if is_float(leaves[members[0]]) and any(jnp.size(leaves[i]) for i in members)
    ]
    # Use one vector per element type. A single vector for everything would force some leaves into a
    # wider type, and thus send more bytes.
    layouts = [vector_layout([leaves[i] for i in members], multiple=multiple) for members in groups]
    vectors = [
        lay.ravel([leaves[i] for i in members])
        for lay, members in zip(layouts, groups, strict=True)
    ]

    def back(changed: Sequence[jax.Array]) -> PyTree:
        out = list(leaves)
        for vector, lay, members in zip(changed, layouts, groups, strict=True):
            for i, leaf in zip(members, lay.unravel(vector), strict=True):
                out[i] = leaf
        return jax.tree.unflatten(treedef, out)

    return vectors, back


def group_by_dtype(leaves: Sequence[Any]) -> dict[Any, list[int]]:
    """Groups the positions of the leaves by element type."""
    found: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(jnp.result_type(leaf), []).append(i)
    return found


class Piece(NamedTuple):
    """A range of elements from a leaf, belonging to one fragment.

    Attributes:
        leaf: Position of the leaf in the tree.
        start: Index of the first element, in row-major order.
        stop: Index past the last element.
        shape: The leaf's shape if the piece covers the whole leaf, otherwise `[stop - start]`.
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
    """How a tree is divided into fragments.

    Static: consists of shapes and types and doesn't hold any arrays.

    Attributes:
        pieces: The pieces of each fragment, in leaf order. Leaves that aren't floating-point don't
            belong to any fragment.
        width: Length of a fragment's zero-padded vector.
        dtype: Element type of the vectors, at least float32.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    width: int
    dtype: np.dtype

    def take(self, tree: PyTree, fragment: int) -> jax.Array:
        """Copies a fragment of a tree into a vector."""
        parts = self.parts(tree, fragment)
        missing = self.width - sum(part.size for part in parts)
        return jnp.concatenate(
            [*(part.reshape(-1) for part in parts), jnp.zeros(missing, self.dtype)]
        )

    def parts(self, tree: PyTree, fragment: int) -> list[jax.Array]:
        """Returns the pieces of a tree's fragment in their shapes, all cast to the vectors' type.

        Prefer this over `take` for anything that can be done piece by piece. `take` has to copy all
        pieces into one vector, at the cost of reading and writing their memory once more.

        A piece that covers a whole leaf keeps the leaf's shape, because XLA can only write a leaf
        in place if its shape never changes along the way.
        """
        leaves = jax.tree.leaves(tree)
        return [p.of(leaves[p.leaf]).astype(self.dtype) for p in self.pieces[fragment]]

    def split(self, vector: jax.Array, fragment: int) -> list[jax.Array]:
        """Splits a fragment's vector into its pieces, each in its own shape."""
        pieces = self.pieces[fragment]
        bounds = itertools.pairwise(
            itertools.accumulate((p.stop - p.start for p in pieces), initial=0)
        )
        return [
            vector[start:stop].reshape(p.shape)
            for p, (start, stop) in zip(pieces, bounds, strict=True)
        ]

    def put(self, tree: PyTree, fragment: int, parts: Sequence[jax.Array]) -> PyTree:
        """Returns the tree with a fragment's pieces replaced, cast to the leaves' own types."""
        leaves, treedef = jax.tree.flatten(tree)
        for piece, part in zip(self.pieces[fragment], parts, strict=True):
            old = leaves[piece.leaf]
            new = part.astype(old.dtype)
            # A piece is either a range of a leaf's elements or the whole leaf. Ranges are written
            # into the flattened leaf, but whole leaves get replaced without any reshape, which lets
            # XLA work in place.
            if piece.shape != old.shape:
                new = jax.lax.dynamic_update_slice(old.reshape(-1), new, (piece.start,)).reshape(
                    old.shape
                )
            leaves[piece.leaf] = new
        return jax.tree.unflatten(treedef, leaves)


def cut_fragments(tree: PyTree, fragments: int, *, multiple: int = 1) -> Fragments:
    """Cuts a tree into `fragments` parts whose width is a multiple of `multiple`.

    Args:
        tree: Arrays, or their types.
        fragments: Number of fragments, at least 1. If there are more of them than elements, some
            are empty.
        multiple: Divisor of the width.
    """
    leaves: list[Any] = jax.tree.leaves(tree)
    moving = [i for i, x in enumerate(leaves) if is_float(x)]
    shapes = {i: jnp.shape(leaves[i]) for i in moving}
    bounds = [*itertools.accumulate(map(math.prod, shapes.values()), initial=0)]
    # Since the vectors of all fragments have the same length, round up the number of elements per
    # fragment. This can leave the last fragments with fewer elements (or none at all) and more zero
    # padding.
    share = -(-bounds[-1] // fragments)
    pieces = tuple(_pieces(shapes, bounds, n * share, (n + 1) * share) for n in range(fragments))
    dtype = jnp.result_type(jnp.float32, *(jnp.result_type(leaves[i]) for i in moving))
    return Fragments(pieces=pieces, width=-(-share // multiple) * multiple, dtype=jnp.dtype(dtype))


def _pieces(
    shapes: Mapping[int, tuple[int, ...]], bounds: Sequence[int], start: int, stop: int
) -> tuple[Piece, ...]:
    """Returns the pieces between two positions in the vector of all leaves."""
    found = []
    for (leaf, shape), (low, high) in zip(shapes.items(), itertools.pairwise(bounds), strict=True):
        # Intersect the leaf's range with the given one.
        begin = max(start, low)
        end = min(stop, high)
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


def chunk_length(size: int, most: int) -> int:
    """Returns the chunk length to use for `size` elements, which is at most `most`.

    All chunks have the same length, with fewer elements of padding than there are chunks.
    """
    # First work out how many chunks we need, then spread the elements evenly over them. If we used
    # chunks of exactly `most` elements instead, the last one might be mostly padding, and would
    # still send as many elements as the others.
    return -(-size // max(1, -(-size // most)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """How a leaf is divided into chunks, and how many elements each of them sends.

    Attributes:
        rows: Number of chunks.
        width: Elements per chunk.
        sent: Elements that each chunk sends.
    """

    rows: int
    width: int
    sent: int

    @property
    def index_bits(self) -> int:
        """Number of bits in an index within a chunk."""
        return max(1, (self.width - 1).bit_length())

    @property
    def count(self) -> int:
        """Total number of elements that the chunks send."""
        return self.rows * self.sent
