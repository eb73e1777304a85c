"""Sums, rings and trees over one named axis, from `ppermute`, `all_gather` and `all_to_all`.

The permutations that we pass to `ppermute` always include all ranks, because under `vmap`, JAX
can't run a permutation that leaves out a rank. A rank that has nothing to send therefore sends to
itself, which costs nothing.

Loops over ranks are unrolled in Python rather than written as a `scan`. The reason is that an
exchange inside a `scan` can't run at the same time as computation outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Axes = Hashable | tuple[Hashable, ...] | list[Hashable]
"""One axis name or several. A strategy's docstring says whether it accepts several."""

Arrays = TypeVar("Arrays")
"""A tree of arrays, which has the same structure before and after an exchange."""


def axis_names(axes: Axes) -> tuple[Hashable, ...]:
    """Returns the axes as a tuple; `axes` may be a single name, a tuple or a list.

    Raises:
        ValueError: There are no axes, an axis is named twice or by a number, or they come with
            sizes.
    """
    if isinstance(axes, Mapping):
        raise ValueError(
            f"the axes of an exchange are `{axes!r}`: sizes belong to the `axes` of `crossover`, "
            f"while an exchange only takes names. Write `{tuple(axes)}`."
        )
    names = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    if not names:
        raise ValueError(
            f"the axes of an exchange are `{axes!r}`: without any axis, nothing would be "
            "exchanged and the ranks would drift apart. Name an axis of the step."
        )
    if any(isinstance(name, int) for name in names):
        raise ValueError(
            f"the axes of an exchange are `{names}`: to JAX, a number is a dimension of an array, "
            "not an axis of ranks. Name an axis of the step."
        )
    if len(set(names)) < len(names):
        raise ValueError(
            f"the axes of an exchange are `{names}`, one of them twice, so its ranks would be "
            "counted twice. Name each axis once."
        )
    return names


def one_axis(axes: Axes, what: str) -> Hashable:
    """Returns the name of the only axis.

    Raises:
        ValueError: There are several.
    """
    names = axis_names(axes)
    if len(names) != 1:
        raise ValueError(
            f"`axes` of {what} are `{axes!r}`: it works over one axis only. Name one of them, or "
            "give the step a single axis over all ranks."
        )
    return names[0]


def is_power_of_two(size: int) -> bool:
    """Whether all `size` ranks have a partner at every level of a halving or doubling."""
    return size & (size - 1) == 0


def saturate(values: jax.Array, dtype: DTypeLike, times: int = 1) -> jax.Array:
    """Clips finite values to the largest number of a narrower type, or to `times` that number.

    A value beyond the narrower type's range would become infinite when it's converted. If an
    infinity then got into an error-feedback residual, it would stay there forever. So we replace
    such a value by the largest number of the type. Values that are already infinite or NaN are
    kept, because they show that training has gone wrong.
    """
    largest = times * float(jnp.finfo(dtype).max)
    if largest >= float(jnp.finfo(values.dtype).max):
        return values
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -largest, largest), values)


def round_for_wire(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to its type on the wire, for values that are sent and also used on this rank.

    If a rank sends a value and also uses it, it must use exactly what the other ranks receive. A
    plain conversion, `x.astype(dtype)`, gives the same bits as this function, but we can't rely on
    it. If a value is converted to a narrow type and back again, XLA may remove both conversions, as
    it does on GPUs (`xla_allow_excess_precision`). The rank would then continue with the unrounded
    value.
    """
    if not all(jnp.issubdtype(t, jnp.floating) for t in (x.dtype, dtype)):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    own = jnp.finfo(x.dtype)
    if info.nmant >= own.nmant:
        return x.astype(dtype)
    # Some 8-bit floating-point types have a different range than their number of exponent bits
    # suggests, so we can't have `reduce_precision` limit the exponent. For these types, it only
    # rounds the mantissa, and the conversion at the end takes care of numbers that are too large.
    half = 1 << (info.nexp - 1)
    exponent = info.nexp if (info.minexp, info.maxexp) == (2 - half, half) else own.nexp
    rounded = jax.lax.reduce_precision(x, exponent, info.nmant)
    if info.nexp < own.nexp:
        # `reduce_precision` doesn't support subnormal numbers (the tiny ones below a type's normal
        # range). We round these ourselves, to multiples of the smallest subnormal number of the
        # type.
        tiny = float(info.tiny)
        step = tiny * 2.0**-info.nmant
        multiple = jax.lax.round(x / step, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * step
        rounded = jax.lax.select(jnp.abs(x) < tiny, multiple, rounded)
    return rounded.astype(dtype)


def swap(x: Arrays, axis_name: Hashable, distance: int, *, ranks: int | None = None) -> Arrays:
    """Exchanges each array of `x` with the corresponding array of rank `r XOR distance`.

    Args:
        x: A tree of arrays, one message each.
        axis_name: One axis.
        distance: A power of two.
        ranks: Number of ranks that take part, a multiple of `2 * distance`. All ranks from this
            number on keep their arrays. If None, all ranks take part.
    """
    size = jax.lax.axis_size(axis_name)
    taking_part = size if ranks is None else ranks
    perm = [(r, r ^ distance if r < taking_part else r) for r in range(size)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, axis_name, perm), x)


def fold(x: Arrays, axis_name: Hashable) -> Arrays:
    """Exchanges the arrays of ranks `r` and `r + 2^L`, with 2^L the largest power of two up to P.

    Recursive halving and doubling need a power of two of ranks. If there are more, each rank beyond
    the largest power of two, 2^L, first sends its data to a partner among the others. At the end,
    it receives the result from its partner. This permutation serves both purposes. Ranks without a
    partner keep their arrays.
    """
    size = jax.lax.axis_size(axis_name)
    base = 1 << (size.bit_length() - 1)
    extra = size - base
    partner = {**{r: r + base for r in range(extra)}, **{r + base: r for r in range(extra)}}
    perm = [(r, partner.get(r, r)) for r in range(size)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, axis_name, perm), x)


def doubling(x: Arrays, axis_name: Hashable, combine: Callable[[Arrays, Arrays], Arrays]) -> Arrays:
    """Combines trees over all ranks by recursive doubling, bitwise identical on every rank.

    The arrays are combined over a balanced binary tree, with the ranks as its leaves in rank order.
    This takes log2(P) hops, each of which sends the whole of `x`. If P isn't a power of two, it
    takes two more hops: the ranks beyond the largest power of two first send their arrays to a
    partner, and get the result back at the end.

    Args:
        x: A tree of arrays.
        axis_name: One axis.
        combine: (the lower ranks' tree, the higher ranks' tree) -> both combined. Called on one
            rank.
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
    """Sums a vector over ranks by a ring: P-1 hops that reduce and P-1 hops that gather.

    The vector is cut into P blocks, and in each hop, a rank sends one block to its neighbour in the
    ring. In the first half of the hops, every block visits all ranks, each of which adds its own
    term. In the second half, the finished sums are copied to all ranks, so the result is bitwise
    identical everywhere.

    Blocks start at different ranks, so the order in which the ranks' terms are added differs from
    block to block.

    Args:
        x: A vector whose length is a multiple of the number of ranks.
        axis_name: One axis.
        wire_dtype: Element type on the wire. The sums are computed in the vector's own type.
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
    # The first half of the hops is done, and this rank holds the finished sum of block `rank + 1`.
    # The other ranks will receive this sum rounded to the wire type. So we round it here, before
    # it's sent, so that this rank continues with the same bits as the others.
    moving = round_for_wire(moving, wire)
    out = jnp.zeros_like(blocks, dtype=wire)
    for hop in range(size):
        out = jax.lax.dynamic_update_index_in_dim(out, moving, (rank + 1 - hop) % size, 0)
        moving = jax.lax.ppermute(moving, axis_name, ring) if hop < size - 1 else moving
    return out.astype(x.dtype).reshape(x.shape)


def sum_scatter(
    x: jax.Array, axis_name: Hashable, *, wire_dtype: DTypeLike | None = None
) -> jax.Array:
    """Returns this rank's block of the sum of a vector over ranks, added in rank order.

    The vector's length must be a multiple of the number of ranks. Instead of a reduce-scatter, we
    use an all-to-all followed by a local sum, because that's what a reduce-scatter over MPI amounts
    to anyway. `lax.psum_scatter` isn't an option, because under two nested `vmap`s, it scatters the
    wrong dimension.
    """
    size = jax.lax.axis_size(axis_name)
    if size == 1:
        return x
    sent = round_for_wire(x, x.dtype if wire_dtype is None else wire_dtype).reshape(size, -1)
    received = jax.lax.all_to_all(sent, axis_name, 0, 0).astype(x.dtype)
    return sum_rows(received)


def sum_rows(x: jax.Array) -> jax.Array:
    """Sums along the first axis, adding the rows in order, so that the bits are reproducible."""
    total = x[0]
    for row in range(1, x.shape[0]):
        total = total + x[row]
    return total


def gather(x: jax.Array, axes: Hashable | tuple[Hashable, ...]) -> jax.Array:
    """Gathers every rank's `x` along a new first axis.

    If there are several axes, the last one varies fastest along the new axis. With no axes, the new
    axis has length 1.
    """
    rows = x[None]
    # Gather over one axis after the other, because `vmap` can't gather over two at once.
    for name in reversed(axes if isinstance(axes, tuple) else (axes,)):
        rows = jax.lax.all_gather(rows, name, tiled=True)
    return rows


def _where(condition: jax.Array, a: Arrays, b: Arrays) -> Arrays:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
