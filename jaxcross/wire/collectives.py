"""JAX's named-axis collectives built from messages: one function a collective, with the shapes that
JAX gives it.

Each takes the equation's operand and its parameters by name, communicates when the region runs, and
is the same on every rank of the channel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross.wire import messages
from jaxcross.wire.messages import Channel

# Up to here a 16-bit sum is one all-gather of everything instead of an all-to-all and an
# all-gather: latency counts.
GATHER_BYTES = 64 * 1024
# Adding rank after rank fixes the order of a float sum; beyond this many ranks the program would
# grow too long.
_UNROLLED_RANKS = 64


def gathers(count: int, itemsize: int, size: int) -> bool:
    """Whether the sum of a 16-bit message is made by one all-gather."""
    return count * itemsize * size <= GATHER_BYTES


def psum(x: jax.Array, channel: Channel) -> jax.Array:
    """Sum over ranks. 8 and 16-bit floats are summed in float32 and rounded once."""
    if messages.is_narrow_float(x.dtype):
        return _sum_narrow(x, channel)
    from mpi4py import MPI

    messages.carrier(x.dtype)
    if x.dtype == np.bool_:
        return messages.allreduce(x, MPI.LOR, channel)
    return messages.allreduce(x, MPI.SUM, channel)


def pmax(x: jax.Array, channel: Channel) -> jax.Array:
    """Maximum over ranks; NaN wins, as in XLA."""
    return _extreme(x, channel, largest=True)


def pmin(x: jax.Array, channel: Channel) -> jax.Array:
    """Minimum over ranks; NaN wins, as in XLA."""
    return _extreme(x, channel, largest=False)


def all_gather(x: jax.Array, channel: Channel, *, dimension: int, tiled: bool) -> jax.Array:
    """Every rank's `x` along a new axis, or along an old one when tiled."""
    parts = jnp.moveaxis(messages.allgather(x, channel), 0, dimension)
    if not tiled:
        return parts
    shape = list(x.shape)
    shape[dimension] *= channel.size
    return parts.reshape(shape)


def reduce_scatter(x: jax.Array, channel: Channel, *, dimension: int, tiled: bool) -> jax.Array:
    """This rank's block of the sum: an all-to-all and a local sum in rank order."""
    if tiled:
        shape = (
            *x.shape[:dimension],
            channel.size,
            x.shape[dimension] // channel.size,
            *x.shape[dimension + 1 :],
        )
        x = x.reshape(shape)
    return _sum_ranks(messages.alltoall(jnp.moveaxis(x, dimension, 0), channel))


def all_to_all(x: jax.Array, channel: Channel, *, split_axis: int, concat_axis: int) -> jax.Array:
    """Block `j` of `split_axis` goes to rank `j`; received blocks are joined along
    `concat_axis`.
    """
    block = x.shape[split_axis] // channel.size
    blocks = x.reshape(*x.shape[:split_axis], channel.size, block, *x.shape[split_axis + 1 :])
    received = messages.alltoall(jnp.moveaxis(blocks, split_axis, 0), channel)
    shape = list(received.shape[1:])
    shape[concat_axis] *= channel.size
    return jnp.moveaxis(received, 0, concat_axis).reshape(shape)


def ppermute(x: jax.Array, channel: Channel, *, perm: tuple[tuple[int, int], ...]) -> jax.Array:
    """Returns the operand of this rank's source; zeros where the permutation names none."""
    source = next((s for s, d in perm if d == channel.rank), None)
    dest = next((d for s, d in perm if s == channel.rank), None)
    return messages.sendrecv(x, source=source, dest=dest, channel=channel)


def pbroadcast(x: jax.Array, channel: Channel, *, source: int) -> jax.Array:
    """Returns the source rank's `x`."""
    return messages.bcast(x, source, channel)


def _sum_narrow(x: jax.Array, channel: Channel) -> jax.Array:
    if channel.size == 1 or x.size == 0:
        return x
    if gathers(x.size, x.dtype.itemsize, channel.size):
        return _sum_ranks(messages.allgather(x, channel))
    block = -(-x.size // channel.size)
    flat = jnp.pad(x.reshape(-1), (0, block * channel.size - x.size))
    mine = _sum_ranks(messages.alltoall(flat.reshape(channel.size, block), channel))
    return messages.allgather(mine, channel).reshape(-1)[: x.size].reshape(x.shape)


def _sum_ranks(parts: jax.Array) -> jax.Array:
    """Sum along the first axis, first rank first; floats narrower than float32 in float32, rounded
    once.
    """
    narrow = messages.is_narrow_float(parts.dtype)
    wide = parts.astype(jnp.float32) if narrow else parts
    if parts.shape[0] <= _UNROLLED_RANKS:
        total = functools.reduce(jax.lax.add, [wide[i] for i in range(parts.shape[0])])
    else:
        total = jnp.sum(wide, axis=0, dtype=wide.dtype)
    return total.astype(parts.dtype)


def _extreme(x: jax.Array, channel: Channel, *, largest: bool) -> jax.Array:
    if channel.size == 1 or x.size == 0:
        return x
    from mpi4py import MPI

    wire = messages.carrier(x.dtype)
    op = MPI.MAX if largest else MPI.MIN
    if wire == np.bool_:
        return messages.allreduce(x, MPI.LOR if largest else MPI.LAND, channel)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = messages.allgather(x, channel)
        pick = jax.lax.max if largest else jax.lax.min
        return functools.reduce(pick, [parts[i] for i in range(channel.size)])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return messages.allreduce(x, op, channel)
    if x.dtype == jnp.float8_e8m0fnu:  # without a sign: ordered as they are, NaN last
        keys = jax.lax.bitcast_convert_type(x, jnp.uint8) + jnp.uint8(
            not largest
        )  # first, where the smallest wins
        keys = messages.allreduce(keys, op, channel) - jnp.uint8(not largest)
        return jax.lax.bitcast_convert_type(keys, x.dtype)
    if x.dtype.name.endswith("fnuz"):  # NaN lies among the numbers, and neither end is free for it
        return _extreme(x.astype(jnp.float32), channel, largest=largest).astype(x.dtype)
    # MPI's maximum of NaN and a number depends on which comes first. Integers that are ordered as
    # the floats are, with NaN at the end that wins, give XLA's answer and the same bits on every
    # rank.
    signed = np.dtype(f"int{wire.itemsize * 8}")
    bits = jax.lax.bitcast_convert_type(x, signed)
    limits = jnp.iinfo(signed)
    keys = jnp.where(jnp.isnan(x), limits.max if largest else limits.min, _flip(bits))
    return jax.lax.bitcast_convert_type(_flip(messages.allreduce(keys, op, channel)), x.dtype)


def _flip(bits: jax.Array) -> jax.Array:
    """Order-preserving map between a float's bits and signed integers; its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def reduce_locally(op: str, x: jax.Array, positions: tuple[int, ...]) -> jax.Array:
    """The local half of a reduction that also names array dimensions (a step inside `vmap` makes
    such).
    """
    if not positions:
        return x
    if op == "psum":
        return jnp.sum(x, axis=positions, dtype=x.dtype)
    return (jnp.max if op == "pmax" else jnp.min)(x, axis=positions)
