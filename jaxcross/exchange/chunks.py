"""Vectors cut into chunks of equal length, and messages of each chunk's largest elements.

Every chunk sends the same number of elements, so no part of a layer starves, and an index within a
chunk takes few bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxcross.exchange import bits, collectives, sparse

_LARGEST = (1 << 31) - 1


def check_size(size: int, what: str) -> None:
    """Raises a ValueError for a leaf of 2^31 elements or more."""
    if size > _LARGEST:
        raise ValueError(
            f"{what} was given a leaf of {size} elements, which int32 indices cannot name. Let "
            "`skip` name it."
        )


def length(size: int, most: int) -> int:
    """Returns the length of the chunks, at most `most`, that `size` elements are cut into.

    All chunks are equally long. The padding is fewer elements than there are chunks.
    """
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


def chunked(rows: int, width: int, density: float) -> Chunks:
    """Returns the layout of `rows` chunks that each send a fraction `density`, but at least one."""
    return Chunks(rows=rows, width=width, sent=sparse.slots(density, width))


def largest(x: jax.Array, layout: Chunks) -> tuple[jax.Array, jax.Array]:
    """Returns the largest elements by absolute value of each row, and their int32 columns.

    `x` is `[rows, width]`, and both results are `[rows, sent]`. NaN counts as infinity. Does not
    communicate.
    """
    size = jnp.abs(x)
    _, columns = jax.lax.top_k(jnp.where(jnp.isnan(size), jnp.inf, size), layout.sent)
    return jnp.take_along_axis(x, columns, axis=1), columns.astype(jnp.int32)


def without(x: jax.Array, values: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns what is left of `[rows, width]` after sending `values` at `columns` of each row."""
    return x.at[jnp.arange(x.shape[0])[:, None], columns].add(-values.astype(x.dtype))


def sum_of_ranks(values: jax.Array, columns: jax.Array, layout: Chunks) -> jax.Array:
    """Sums all ranks' elements into `[rows, width]` float32.

    Adds rank after rank, so the result is bitwise identical everywhere.

    Args:
        values: Elements of each rank, `[P, count]`.
        columns: Their columns, `[P, count]`, row after row.
        layout: Layout of the chunks.
    """
    starts = jnp.repeat(jnp.arange(layout.rows, dtype=jnp.int32) * layout.width, layout.sent)
    flat = sparse.sum_of_pairs(values, columns + starts, layout.rows * layout.width)
    return flat.reshape(layout.rows, layout.width)


def mean_over_ranks(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    layouts: Sequence[Chunks],
    names: tuple[Hashable, ...],
) -> list[jax.Array]:
    """Exchanges values and columns of all leaves; returns each leaf's mean over ranks.

    A mean is `[rows, width]` float32. All values are one message and all columns another, because
    small leaves would otherwise mostly wait for latency.
    """
    ends = list(itertools.accumulate(lay.count for lay in layouts))[:-1]
    own = jnp.concatenate([values.reshape(-1) for values, _ in pairs])
    values = jnp.split(collectives.gather(own, names), ends, axis=1)
    packed = pack([columns for _, columns in pairs], layouts)
    columns = unpack(collectives.gather(packed, names), layouts)
    ranks = jax.lax.psum(1, names)
    return [
        sum_of_ranks(v, c, lay) / ranks for v, c, lay in zip(values, columns, layouts, strict=True)
    ]


def pack(numbers: Sequence[jax.Array], layouts: Sequence[Chunks], extra_bits: int = 0) -> jax.Array:
    """Packs the columns of all leaves into one vector of bytes.

    Each number may have `extra_bits` above those of its column.
    """
    packed = [
        bits.pack_integers(x.reshape(-1), lay.index_bits + extra_bits)
        for x, lay in zip(numbers, layouts, strict=True)
    ]
    return jnp.concatenate(packed)


def unpack(packed: jax.Array, layouts: Sequence[Chunks], extra_bits: int = 0) -> list[jax.Array]:
    """Returns each leaf's numbers, `[P, count]` int32, from every rank's bytes, `[P, bytes]`."""
    found: list[jax.Array] = []
    start = 0
    for lay in layouts:
        width = lay.index_bits + extra_bits
        end = start + bits.packed_bytes(width, lay.count)
        found.append(bits.unpack_integers(packed[:, start:end], width, lay.count))
        start = end
    return found
