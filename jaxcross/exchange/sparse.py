"""Sparse messages of a fixed size: (value, index) pairs.

The number of pairs in a message is part of the compiled program and therefore fixed. If a rank has
fewer elements to send, the remaining slots stay empty: they have value 0 and index D, just past the
end of the vector.

The pairs contain the largest elements either of a whole leaf or of each of its chunks
(`layouts.Chunks`).
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxcross._jax_compat import Tracer
from jaxcross._pytree import PyTree
from jaxcross.exchange import bits, collectives
from jaxcross.exchange.layouts import Chunks
from jaxcross.exchange.validation import as_number

Skip = Callable[[str, Any], bool]
_LARGEST = (1 << 31) - 1

# Matches the path of a parameter called `bias` or `scale`, in the format of `jax.tree_util.keystr`.
# The name is the last dict key or attribute in the path, except in NNX, where it's followed by the
# attribute that holds the variable's value.
_BIAS_OR_SCALE = re.compile(r"(?<!\w)(bias|scale)\b\W*((raw_)?value\W*)?$")


def bias_or_norm(path: str, leaf: jax.typing.ArrayLike) -> bool:
    """Whether a leaf is small and sensitive enough to be exchanged uncompressed.

    This applies to all scalars and vectors, as well as to biases and the scales of normalisation
    layers, which aren't always vectors: attention adds a dimension for the heads, and `nn.scan`
    adds one for the layers. We recognise them by name, i.e. by a path that ends in `bias` or
    `scale`.
    """
    return jnp.ndim(leaf) <= 1 or _BIAS_OR_SCALE.search(path) is not None


def check_density(density: object, what: str = "`density`") -> float:
    """Validates a fraction of elements and returns it as a float.

    Raises:
        ValueError: `density` is not a number in (0, 1].
    """
    share = as_number(density)
    if not 0 < share <= 1:
        raise ValueError(
            f"{what} is the share of elements that are sent and must be a number in (0, 1], for "
            f"example 0.01, got {density!r}. The number of elements is a constant of the compiled "
            "step, so for a share that changes, use `warm_up` of `top_k`. To send everything, use "
            "`jaxcross.exchange.mean`."
        )
    return share


def check_wire_dtype(dtype: DTypeLike | None) -> None:
    """Raises a ValueError if values can't be sent as this type. None stands for their own type."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            "`wire_dtype` must be a floating-point type, for example `jnp.bfloat16`, got "
            f"{jnp.dtype(dtype).name}."
        )


def slots(density: float, size: int) -> int:
    """Returns how many of `size` elements to send: this fraction, rounded, but at least one."""
    return min(size, max(1, round(density * size)))


def compressed_leaves(leaves: Sequence[tuple[Any, Any]], skip: Skip) -> list[bool]:
    """Returns for each (path, leaf) pair whether the leaf gets compressed.

    That's the case for all nonempty floating-point leaves, unless `skip` is true for them.
    """
    return [
        jnp.size(leaf) > 0
        and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))
        and not skip(jax.tree_util.keystr(path), leaf)
        for path, leaf in leaves
    ]


def residuals(params: optax.Params, skip: Skip, length: Callable[[int], int]) -> PyTree:
    """Returns a tree of zeros: a float32 vector of `length(size)` for each compressed leaf."""
    found, treedef = jax.tree.flatten_with_path(params)
    vectors = [
        jnp.zeros(length(jnp.size(leaf)), jnp.float32) if chosen else optax.MaskedNode()
        for (_, leaf), chosen in zip(found, compressed_leaves(found, skip), strict=True)
    ]
    return jax.tree.unflatten(treedef, vectors)


def warn_if_none(params: optax.Params, skip: Skip, what: str) -> None:
    """Warns if `what` compresses nothing because all parameters are vectors, biases or scales.

    This happens, for example, if `optax.flatten` has joined all leaves into one vector. We don't
    warn users who pass their own `skip`, since that's their choice, nor while `init` is being
    traced, since that may only be done to find out shapes.
    """
    found = jax.tree.leaves_with_path(params)
    if (
        skip is not bias_or_norm
        or any(compressed_leaves(found, skip))
        or any(isinstance(x, Tracer) for _, x in found)
    ):
        return
    if any(compressed_leaves(found, lambda path, leaf: jnp.size(leaf) < 2)):
        warnings.warn(
            f"{what} compresses none of these parameters: vectors, biases and the scales of norms "
            "are averaged as they are unless `skip` says otherwise. To compress them, too, write "
            "`skip=lambda path, leaf: False`.",
            stacklevel=2,
        )


def rounded(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Clips and rounds values to their wire type, letting the residual keep whatever is lost."""
    return collectives.round_for_wire(collectives.saturate(values, dtype), dtype)


def residual_after(x: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns what's left of a vector after sending these pairs, including wire rounding."""
    return x.at[indices].add(-values.astype(x.dtype), mode="drop")


def sum_of_pairs(values: jax.Array, indices: jax.Array, size: int) -> jax.Array:
    """Returns the float32 sum of every rank's pairs, `[P, k]`.

    Adds rank after rank, so the result is bitwise identical everywhere.
    """

    def add(rank: jax.Array, sum_: jax.Array) -> jax.Array:
        # A rank's indices are all different, so each element is added to at most once. This means
        # that backends can do these additions in any order without affecting the bits of the
        # result.
        return sum_.at[indices[rank]].add(values[rank].astype(jnp.float32), mode="drop")

    # Start the sum with the first rank's pairs instead of zeros. Under `shard_map(check_vma=True)`,
    # JAX considers zeros identical on all ranks, and rejects a loop whose carry is identical on all
    # ranks before the first iteration but not after it.
    first = add(jnp.int32(0), jnp.zeros(size, jnp.float32))
    return jax.lax.fori_loop(1, values.shape[0], add, first)


def check_size(size: int, what: str) -> None:
    """Raises a ValueError for leaves of 2^31 elements or more."""
    if size > _LARGEST:
        raise ValueError(
            f"{what} was given a leaf of {size} elements, which are too many for int32 indices. "
            "Exclude this leaf with `skip`."
        )


def chunked(rows: int, width: int, density: float) -> Chunks:
    """Lays out `rows` chunks that each send a fraction `density`, but at least one element."""
    return Chunks(rows=rows, width=width, sent=slots(density, width))


def largest_of_chunks(x: jax.Array, layout: Chunks) -> tuple[jax.Array, jax.Array]:
    """Returns each row's largest elements by absolute value, and their int32 columns.

    `x` has shape `[rows, width]`; both results have shape `[rows, sent]`. NaN counts as infinity.
    Does not communicate.
    """
    size = jnp.abs(x)
    _, columns = jax.lax.top_k(jnp.where(jnp.isnan(size), jnp.inf, size), layout.sent)
    return jnp.take_along_axis(x, columns, axis=1), columns.astype(jnp.int32)


def residual_of_chunks(x: jax.Array, values: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns what's left of `[rows, width]` after sending `values` at `columns` of each row."""
    return x.at[jnp.arange(x.shape[0])[:, None], columns].add(-values.astype(x.dtype))


def sum_of_chunks(values: jax.Array, columns: jax.Array, layout: Chunks) -> jax.Array:
    """Sums all ranks' elements into `[rows, width]` float32.

    Adds rank after rank, so the result is bitwise identical everywhere.

    Args:
        values: Elements of each rank, `[P, count]`.
        columns: Their columns, `[P, count]`, row after row.
        layout: Layout of the chunks.
    """
    starts = jnp.repeat(jnp.arange(layout.rows, dtype=jnp.int32) * layout.width, layout.sent)
    flat = sum_of_pairs(values, columns + starts, layout.rows * layout.width)
    return flat.reshape(layout.rows, layout.width)


def mean_of_chunks(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    layouts: Sequence[Chunks],
    names: tuple[Hashable, ...],
) -> list[jax.Array]:
    """Exchanges the values and columns of all leaves, and returns each leaf's mean over ranks.

    Each mean is a float32 array of shape `[rows, width]`. The values of all leaves share a single
    message, and so do their columns (i.e. their indices within a chunk). With a separate message
    per leaf, small leaves would spend most of their time on latency.
    """
    ends = list(itertools.accumulate(lay.count for lay in layouts))[:-1]
    own = jnp.concatenate([values.reshape(-1) for values, _ in pairs])
    values = jnp.split(collectives.gather(own, names), ends, axis=1)
    packed = pack_columns([columns for _, columns in pairs], layouts)
    columns = unpack_columns(collectives.gather(packed, names), layouts)
    ranks = jax.lax.psum(1, names)
    return [
        sum_of_chunks(v, c, lay) / ranks for v, c, lay in zip(values, columns, layouts, strict=True)
    ]


def pack_columns(
    numbers: Sequence[jax.Array], layouts: Sequence[Chunks], extra_bits: int = 0
) -> jax.Array:
    """Packs the columns of all leaves into one vector of bytes.

    Numbers may have `extra_bits` bits above those of their column.
    """
    packed = [
        bits.pack_integers(x.reshape(-1), lay.index_bits + extra_bits)
        for x, lay in zip(numbers, layouts, strict=True)
    ]
    return jnp.concatenate(packed)


def unpack_columns(
    packed: jax.Array, layouts: Sequence[Chunks], extra_bits: int = 0
) -> list[jax.Array]:
    """Unpacks every rank's bytes, `[P, bytes]`, into each leaf's numbers, `[P, count]` int32."""
    found: list[jax.Array] = []
    start = 0
    for lay in layouts:
        width = lay.index_bits + extra_bits
        end = start + bits.packed_bytes(width, lay.count)
        found.append(bits.unpack_integers(packed[:, start:end], width, lay.count))
        start = end
    return found
