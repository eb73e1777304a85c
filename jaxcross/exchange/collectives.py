"""Sums, rings and trees over one named axis, from `ppermute`, `all_gather` and `all_to_all`.

Every permutation includes all ranks, because `vmap` can't run a `ppermute` that leaves out a rank.
If a rank has nothing to send in a hop, it sends to itself, which costs nothing. Loops over ranks
are unrolled, because an exchange inside a `scan` can't overlap with anything.
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

    Without clipping, large values would become infinite in the narrower type, and an infinity in a
    residual would stay there forever. Values that are already infinite or NaN are kept, so that
    they stay visible.
    """
    largest = times * float(jnp.finfo(dtype).max)
    if largest >= float(jnp.finfo(values.dtype).max):
        return values
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -largest, largest), values)


def round_for_wire(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to its type on the wire, for values that are sent and also used on this rank.

    The result is bitwise the same as that of `x.astype(dtype)`. We can't rely on a plain
    conversion, though. If a value is converted to a narrow type and back again, XLA may eliminate
    both conversions, as it does on GPUs (`xla_allow_excess_precision`). This rank would then
    continue with the unrounded value, which no other rank has received.
    """
    if not all(jnp.issubdtype(t, jnp.floating) for t in (x.dtype, dtype)):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    own = jnp.finfo(x.dtype)
    if info.nmant >= own.nmant:
        return x.astype(dtype)
    # The range of some 8-bit types isn't what you'd expect from their number of exponent bits. For
    # these types, we only round the mantissa here, and leave numbers that are too large to the
    # conversion at the end.
    half = 1 << (info.nexp - 1)
    exponent = info.nexp if (info.minexp, info.maxexp) == (2 - half, half) else own.nexp
    rounded = jax.lax.reduce_precision(x, exponent, info.nmant)
    if info.nexp < own.nexp:
        # `reduce_precision` doesn't support subnormal numbers, so we round these ourselves: a
        # type's subnormals are the multiples of its smallest one.
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

    Halving and doubling need a power of two of ranks. If there are more, this permutation first
    sends the data of the ranks beyond 2^L to their partners, and afterwards sends them the result.
    Ranks without a partner keep their arrays.
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

    Each hop sends 1/P of the vector. Every block is summed once, on its way around the ring, and
    the finished sum is then copied to all ranks, so the result is bitwise identical everywhere.
    Different blocks start at different ranks, so their terms are added in different orders.

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
    # This rank now holds the finished sum of block `rank + 1`. We round the sum before it's sent
    # around, so that this rank continues with the same bits as the ranks that receive it.
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

    The vector's length must be a multiple of the number of ranks. We use an all-to-all followed by
    a local sum, which is what a reduce-scatter over MPI amounts to anyway. `lax.psum_scatter` isn't
    an option, because it scatters the wrong dimension under two nested `vmap`s.
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

    If there are several axes, the last one varies fastest. With no axes, this only adds the new
    axis.
    """
    rows = x[None]
    # Gather over one axis after the other, because `vmap` can't gather over two at once.
    for name in reversed(axes if isinstance(axes, tuple) else (axes,)):
        rows = jax.lax.all_gather(rows, name, tiled=True)
    return rows


def _where(condition: jax.Array, a: Arrays, b: Arrays) -> Arrays:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
