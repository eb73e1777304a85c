"""How the leaves of a tree are laid out for an exchange.

Exchanges work on vectors, or on rows of equal length, but a model is a tree of arrays (leaves) of
all shapes. This file contains four ways to get from one to the other, because strategies have
different priorities: that the bounds of layers are static, that there are few messages, that little
is copied, or that indices are short.

**Blocks.** We cut every leaf evenly, and row `r` of the result holds the r-th part of *every* leaf.
Adasum, the sharded optimizer and the hierarchical top-k use this layout.

The alternative would be to concatenate all leaves into one vector and to cut that. But then each
rank's part would begin in the middle of some layer, and in a different one on each rank. With
blocks, the layers have the same static bounds within every rank's part. The price is fewer than
`count` elements of padding per leaf.

**Vectors.** We write all leaves into one vector, one after the other, and pad it. This copies the
whole tree. In return, operations such as a ring all-reduce or the packing of bits are done once for
the whole vector, with a single message, rather than once per leaf.

**Fragments.** We imagine that all leaves are concatenated into one vector, and cut this vector into
even parts, the fragments. The whole vector is never created, because it would be a copy of the
tree. Each fragment is a vector by itself, so work on one fragment doesn't touch the memory of the
others. Streaming DiLoCo exchanges one fragment at a time.

**Chunks.** This layout is for strategies that send only the largest elements (SparseLoCo and
decoupled momentum). We cut a leaf into chunks of equal length, and send the same number of elements
from every chunk. This way, a part of a layer still sends something if its values are smaller than
elsewhere. An index within a chunk also takes fewer bits than an index within the leaf.
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
    """Returns how many elements of a leaf each of `count` rows gets, rounded up to `multiple`."""
    return -(-math.prod(shape) // (count * multiple)) * multiple


def leaf_blocks(leaf: jax.Array, count: int, multiple: int = 1) -> jax.Array:
    """Returns a leaf as `[count, width]`, padded with zeros at the end. Does not communicate."""
    elements = block_width(leaf.shape, count, multiple)
    return jnp.pad(leaf.reshape(-1), (0, count * elements - leaf.size)).reshape(count, elements)


def to_blocks(
    leaves: Sequence[jax.Array], count: int, dtype: jax.typing.DTypeLike, multiple: int = 1
) -> jax.Array:
    """Returns all leaves as one array `[count, sum of widths]`, cast to `dtype`."""
    return jnp.concatenate([leaf_blocks(x, count, multiple).astype(dtype) for x in leaves], axis=1)


def block_columns(
    rows: jax.Array, shapes: Sequence[Sequence[int]], count: int, multiple: int = 1
) -> list[jax.Array]:
    """Returns each leaf's columns of `rows`, along the last axis.

    `rows` may be any of the `count` rows, e.g. a single rank's.
    """
    bounds = itertools.accumulate((block_width(s, count, multiple) for s in shapes), initial=0)
    return [rows[..., a:b] for a, b in itertools.pairwise(bounds)]


def from_blocks(
    rows: jax.Array, shapes: Sequence[Sequence[int]], multiple: int = 1
) -> list[jax.Array]:
    """Returns the leaves in their shapes, from all rows; they keep the rows' element type."""
    found = block_columns(rows, shapes, rows.shape[0], multiple)
    return [
        x.reshape(-1)[: math.prod(s)].reshape(tuple(s)) for x, s in zip(found, shapes, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class VectorLayout:
    """Position of each leaf of a tree in its vector.

    A layout is static: it holds shapes and types, but no arrays.

    Attributes:
        treedef: Structure of the tree.
        shapes: Shape of each leaf.
        dtypes: Element type of each leaf; `unravel` casts back to them.
        bounds: Leaf `i` consists of the elements from `bounds[i]` to `bounds[i + 1]`.
        length: Length of the vector: the elements of all leaves, padded with zeros to a multiple.
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
        """Number of elements of all leaves, without the padding."""
        return self.bounds[-1]

    def ravel(self, tree: PyTree) -> jax.Array:
        """Returns the tree's leaves, one after the other, cast to `dtype` and padded with zeros.

        This is a copy.
        """
        parts = [
            jnp.asarray(x).reshape(-1).astype(self.dtype) for x in self.treedef.flatten_up_to(tree)
        ]
        if self.length > self.size:
            parts.append(jnp.zeros(self.length - self.size, self.dtype))
        return jnp.concatenate(parts) if parts else jnp.zeros(0, self.dtype)

    def unravel(self, vector: jax.Array) -> PyTree:
        """Returns the tree of the leaves in `vector`, in their own shapes and types."""
        ranges = itertools.pairwise(self.bounds)
        leaves = [
            jax.lax.slice_in_dim(vector, start, stop).reshape(shape).astype(dtype)
            for (start, stop), shape, dtype in zip(ranges, self.shapes, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)


def vector_layout(
    tree: PyTree, *, multiple: int = 1, dtype: DTypeLike | None = None
) -> VectorLayout:
    """Returns the layout of `tree` in one vector whose length is a multiple of `multiple`.

    Args:
        tree: Arrays or `jax.ShapeDtypeStruct`; may be empty.
        multiple: Divisor of the vector's length, for example the number of ranks.
        dtype: Element type of the vector. If None, the type that all leaves' types promote to.
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
    """Returns the floating-point leaves as one vector per type, and a function to undo that.

    The returned function converts vectors of the same lengths back into a tree. We join leaves
    because hops between neighbours are mostly latency, so one message per element type takes less
    time than one per leaf. Vectors are padded with zeros to a multiple of `multiple`. Types without
    any elements get no vector.
    """
    leaves, treedef = jax.tree.flatten(tree)
    groups = [
        members
        for members in group_by_dtype(leaves).values()
        if is_float(leaves[members[0]]) and any(jnp.size(leaves[i]) for i in members)
    ]
    # We make one vector per element type. If all leaves were in a single vector, some of them would
    # have to be converted to a wider type, which would send more bytes.
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
    """Returns the positions of the leaves of each element type."""
    found: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault(jnp.result_type(leaf), []).append(i)
    return found


class Piece(NamedTuple):
    """A range of a leaf's elements, which belongs to one fragment.

    Attributes:
        leaf: Position of the leaf in the tree.
        start: Index of the first element, in row-major order.
        stop: Index after the last element.
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
    """How a tree is cut into fragments.

    The cut is static: it holds shapes and types, but no arrays.

    Attributes:
        pieces: The pieces of each fragment, in the order of the tree's leaves. Leaves that aren't
            floating-point don't belong to any fragment.
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

        Use this method rather than `take` for work that can be done piece by piece. `take` copies
        all pieces into one vector, which reads and writes their memory once more.

        If a piece is a whole leaf, it keeps the leaf's shape, because XLA can write a leaf in place
        only if the leaf's shape doesn't change on the way.
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
            old = leaves[piece.leaf]
            new = part.astype(old.dtype)
            # A piece is either a range of a leaf's elements or the whole leaf. We write a range
            # into the flat form of the leaf. But we replace a whole leaf without any reshape, so
            # that XLA can work in place.
            if piece.shape != old.shape:
                new = jax.lax.dynamic_update_slice(old.reshape(-1), new, (piece.start,)).reshape(
                    old.shape
                )
            leaves[piece.leaf] = new
        return jax.tree.unflatten(treedef, leaves)


def cut_fragments(tree: PyTree, fragments: int, *, multiple: int = 1) -> Fragments:
    """Returns the cut of a tree into `fragments` parts, whose width is a multiple of `multiple`.

    Args:
        tree: Arrays, or their types.
        fragments: Number of fragments, at least 1. If there are more fragments than elements, some
            are empty.
        multiple: Divisor of the width.
    """
    leaves: list[Any] = jax.tree.leaves(tree)
    moving = [i for i, x in enumerate(leaves) if is_float(x)]
    shapes = {i: jnp.shape(leaves[i]) for i in moving}
    bounds = [*itertools.accumulate(map(math.prod, shapes.values()), initial=0)]
    # All fragments have vectors of the same length, so we round up the number of elements per
    # fragment. The last fragments may therefore contain fewer elements, or none at all, and are
    # padded with zeros.
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
        # Intersect the leaf's range in the vector with the given one.
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
    """Returns the length of the chunks that `size` elements are cut into, which is at most `most`.

    All chunks are equally long. There are fewer elements of padding than chunks.
    """
    # We first compute how many chunks are needed, and then spread the elements evenly over them. If
    # we made chunks of exactly `most` elements instead, the last one could be mostly padding, but
    # would still send as many elements as the others.
    return -(-size // max(1, -(-size // most)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of a leaf, and how many elements each of them sends.

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
        """Number of bits of an index within a chunk."""
        return max(1, (self.width - 1).bit_length())

    @property
    def count(self) -> int:
        """Number of elements that all chunks send together."""
        return self.rows * self.sent
