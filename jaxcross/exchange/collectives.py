"""Sums, rings and trees over one named axis, using `ppermute`, `all_gather` and `all_to_all`.

Every permutation we pass to `ppermute` includes all ranks, because JAX can't run partial
permutations under `vmap`. A rank that has nothing to send therefore sends to itself, which is free.

Loops over ranks are unrolled in Python rather than written as a `scan`, because an exchange inside
a `scan` can't overlap with computation outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Axes = Hashable | tuple[Hashable, ...] | list[Hashable]
"""One or several axis names. Each strategy documents whether it accepts several."""

Arrays = TypeVar("Arrays")
"""A tree of arrays, whose structure an exchange doesn't change."""


def axis_names(axes: Axes) -> tuple[Hashable, ...]:
    """Converts a single axis name, or a tuple or list of names, to a tuple.

    Raises:
        ValueError: There are no axes, an axis is named twice, a name is a number, or `axes` maps
            names to sizes.
    """
    if isinstance(axes, Mapping):
        raise ValueError(
            f"`axes` of an exchange must be names only, got `{axes!r}`. Write `{tuple(axes)}` "
            "here. Sizes belong to the `axes` of `crossover`."
        )
    names = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    if not names:
        raise ValueError(
            f"`axes` of an exchange must contain at least one name, got `{axes!r}`: without any "
            "axis, nothing would be exchanged and the ranks would drift apart. Name an axis of the "
            "step."
        )
    if any(isinstance(name, int) for name in names):
        raise ValueError(
            f"`axes` of an exchange must be names, got `{names}`: to JAX, a number is a dimension "
            "of an array, not an axis of ranks. Name an axis of the step."
        )
    if len(set(names)) < len(names):
        raise ValueError(
            f"`axes` of an exchange must name each axis once, got `{names}`: the ranks of an axis "
            "that is named twice would be counted twice. Leave out the second one."
        )
    return names


def one_axis(axes: Axes, what: str) -> Hashable:
    """Returns the axis name, of which there must be exactly one.

    Raises:
        ValueError: `axes` contains several names.
    """
    names = axis_names(axes)
    if len(names) != 1:
        raise ValueError(
            f"`axes` of {what} must be a single axis, got `{axes!r}`. Name one of them, or give "
            "the step a single axis over all ranks."
        )
    return names[0]


def is_power_of_two(size: int) -> bool:
    """Whether all `size` ranks have a partner at every level of recursive halving or doubling."""
    return size & (size - 1) == 0


def saturate(values: jax.Array, dtype: DTypeLike, times: int = 1) -> jax.Array:
    """Clips finite values to the range of a narrower type, or to `times` that range.

    Converting a value beyond the narrower type's range would give infinity, and an infinity that
    makes it into an error-feedback residual stays there forever. So we clip such values to the
    type's largest number. Values that are already infinite or NaN are left alone, because they
    indicate that training has gone wrong.
    """
    largest = times * float(jnp.finfo(dtype).max)
    if largest >= float(jnp.finfo(values.dtype).max):
        return values
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -largest, largest), values)


def round_for_wire(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to its wire type, for values that this rank both sends and uses itself.

    If a rank uses a value that it also sends, it must use exactly what the other ranks receive. A
    plain `x.astype(dtype)` gives the same bits as this function, but we can't rely on it: when a
    value is converted to a narrow type and back, XLA is free to remove both conversions, and does
    so on GPUs (`xla_allow_excess_precision`). The rank would then carry on with the unrounded
    value.
    """
    if not all(jnp.issubdtype(t, jnp.floating) for t in (x.dtype, dtype)):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    own = jnp.finfo(x.dtype)
    if info.nmant >= own.nmant:
        return x.astype(dtype)
    # Some 8-bit floating-point types don't have the range that their number of exponent bits
    # suggests, so `reduce_precision` can't limit the exponent for us. For these types, we only have
    # it round the mantissa, and leave numbers that are too large to the conversion at the end.
    half = 1 << (info.nexp - 1)
    exponent = info.nexp if (info.minexp, info.maxexp) == (2 - half, half) else own.nexp
    rounded = jax.lax.reduce_precision(x, exponent, info.nmant)
    if info.nexp < own.nexp:
        # `reduce_precision` doesn't support subnormal numbers (the tiny numbers below a type's
        # normal range), so we round these ourselves, to multiples of the type's smallest subnormal.
        tiny = float(info.tiny)
        step = tiny * 2.0**-info.nmant
        multiple = jax.lax.round(x / step, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * step
        rounded = jax.lax.select(jnp.abs(x) < tiny, multiple, rounded)
    return rounded.astype(dtype)


def swap(x: Arrays, axis_name: Hashable, distance: int, *, ranks: int | None = None) -> Arrays:
    """Swaps each array of `x` with its counterpart on rank `r XOR distance`.

    Args:
        x: A tree of arrays, each of which is sent as a separate message.
        axis_name: One axis.
        distance: A power of two.
        ranks: Number of ranks that take part, a multiple of `2 * distance`. Any ranks beyond that
            keep their arrays. If None, all ranks take part.
    """
    size = jax.lax.axis_size(axis_name)
    taking_part = size if ranks is None else ranks
    perm = [(r, r ^ distance if r < taking_part else r) for r in range(size)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, axis_name, perm), x)


def fold(x: Arrays, axis_name: Hashable) -> Arrays:
    """Swaps arrays between ranks `r` and `r + 2^L`, where 2^L is the largest power of two up to P.

    Recursive halving and doubling need a power-of-two number of ranks. Each rank beyond the largest
    power of two, 2^L, therefore hands its data to a partner among the others up front, and gets the
    result back from that partner at the end. This permutation serves both purposes. Ranks without a
    partner keep their arrays.
    """
    size = jax.lax.axis_size(axis_name)
    base = 1 << (size.bit_length() - 1)
    extra = size - base
    partner = {**{r: r + base for r in range(extra)}, **{r + base: r for r in range(extra)}}
    perm = [(r, partner.get(r, r)) for r in range(size)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, axis_name, perm), x)


def doubling(x: Arrays, axis_name: Hashable, combine: Callable[[Arrays, Arrays], Arrays]) -> Arrays:
    """Combines trees over all ranks by recursive doubling; bitwise identical on every rank.

    The arrays are combined along a balanced binary tree that has the ranks as its leaves, in rank
    order. This takes log2(P) hops, each of which sends all of `x`. If P isn't a power of two, two
    more hops are needed: the ranks beyond the largest power of two hand their arrays to a partner
    up front, and get the result back at the end.

    Args:
        x: A tree of arrays.
        axis_name: One axis.
        combine: (lower ranks' tree, higher ranks' tree) -> the two combined. Must not communicate.
    """
    size = jax.lax.axis_size(axis_name)
    base = 1 << (size.bit_length() - 1)
    rank = jax.lax.axis_index(axis_name)
    if base < size:
        x = _where(rank < size - base, combine(x, fold(x, axis_name)), x)
    for level in range(base.bit_length() - 1):
        other = swap(x, axis_name, 1 << level, ranks=base)
        lower = (rank >> level) & 1 == 0
        x = _where(rank < base, combine(_where(lower, x, other), _where(lower, other, x)), x)
    if base < size:
        x = _where(rank < base, x, fold(x, axis_name))
    return x


def ring_sum(
    x: jax.Array, axis_name: Hashable, *, wire_dtype: DTypeLike | None = None
) -> jax.Array:
    """Sums a vector over ranks with a ring all-reduce: P-1 hops to reduce and P-1 hops to gather.

    The vector is split into P blocks, and in each hop, every rank passes one block on to its
    neighbour in the ring. During the first P-1 hops, each block travels around the ring, with every
    rank adding its own term. The other hops copy the finished sums to all ranks, so the result is
    bitwise identical everywhere.

    Since each block starts at a different rank, the order in which the ranks' terms are added
    varies from block to block.

    Args:
        x: A vector whose length is a multiple of the number of ranks.
        axis_name: One axis.
        wire_dtype: Element type on the wire. Sums are computed in the vector's own type.
    """
    size = jax.lax.axis_size(axis_name)
    if size == 1:
        return x
    wire = x.dtype if wire_dtype is None else wire_dtype
    ring = [(r, (r + 1) % size) for r in range(size)]
    rank = jax.lax.axis_index(axis_name)
    blocks = x.reshape(size, -1)

    def block(number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(blocks, number % size, keepdims=False)

    moving = block(rank)
    for hop in range(1, size):
        moving = jax.lax.ppermute(round_for_wire(moving, wire), axis_name, ring).astype(
            x.dtype
        ) + block(rank - hop)
    # At this point, we hold the finished sum of block `rank + 1`, which the other ranks will
    # receive rounded to the wire type. Round our own copy as well before sending it, so that we
    # continue with the same bits as everyone else.
    moving = round_for_wire(moving, wire)
    out = jnp.zeros_like(blocks, dtype=wire)
    for hop in range(size):
        out = jax.lax.dynamic_update_index_in_dim(out, moving, (rank + 1 - hop) % size, 0)
        moving = jax.lax.ppermute(moving, axis_name, ring) if hop < size - 1 else moving
    return out.astype(x.dtype).reshape(x.shape)


def sum_scatter(
    x: jax.Array, axis_name: Hashable, *, wire_dtype: DTypeLike | None = None
) -> jax.Array:
    """Sums a vector over ranks, in rank order, and returns this rank's block of the result.

    The vector's length must be a multiple of the number of ranks. We use an all-to-all followed by
    a local sum, which is what a reduce-scatter over MPI boils down to anyway. `lax.psum_scatter`
    isn't an option, because it scatters the wrong dimension when two `vmap` calls are nested.
    """
    size = jax.lax.axis_size(axis_name)
    if size == 1:
        return x
    sent = round_for_wire(x, x.dtype if wire_dtype is None else wire_dtype).reshape(size, -1)
    received = jax.lax.all_to_all(sent, axis_name, 0, 0).astype(x.dtype)
    return sum_rows(received)


def sum_rows(x: jax.Array) -> jax.Array:
    """Sums along the first axis, row by row, so that the result is bitwise reproducible."""
    total = x[0]
    for row in range(1, x.shape[0]):
        total = total + x[row]
    return total


def gather(x: jax.Array, axes: Hashable | tuple[Hashable, ...]) -> jax.Array:
    """Gathers every rank's `x` along a new first axis.

    Given several axes, the last of them varies fastest along the new axis. Given no axes, the new
    axis has length 1.
    """
    rows = x[None]
    # Gather over one axis at a time, because `vmap` can't gather over two at once.
    for name in reversed(axes if isinstance(axes, tuple) else (axes,)):
        rows = jax.lax.all_gather(rows, name, tiled=True)
    return rows


def _where(condition: jax.Array, a: Arrays, b: Arrays) -> Arrays:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
