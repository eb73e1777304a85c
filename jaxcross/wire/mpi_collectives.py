"""JAX's named-axis collectives, built from messages: one function per collective.

Each function takes a collective's operand, and its parameters as keyword arguments, and returns a
result of the shape JAX expects. Calling a function while a program is traced only adds messages to
the program; they're sent when it runs. All ranks in the channel (the communicator) must trace the
same functions in the same order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross.wire import mpi_messages
from jaxcross.wire.mpi_messages import Channel

# Summing 8- or 16-bit floats normally takes two messages, an all-to-all and an all-gather. If all
# ranks' operands together are no larger than this, a second message costs more than the extra
# bytes, so we send everyone's operand to everyone in a single all-gather.
GATHER_BYTES = 64 * 1024
# The result of a float sum depends on the order of additions. Up to this many ranks, we fix the
# order by unrolling the sum, starting with the lowest rank. Any more ranks would make the program
# too long.
_UNROLLED_RANKS = 64


def gathers(count: int, itemsize: int, size: int) -> bool:
    """Whether a sum of 8- or 16-bit floats of this size is done in a single all-gather."""
    return count * itemsize * size <= GATHER_BYTES


def psum(x: jax.Array, channel: Channel) -> jax.Array:
    """Returns the sum over ranks. Sums 8- and 16-bit floats in float32 and rounds once."""
    if mpi_messages.is_narrow_float(x.dtype):
        return _sum_narrow(x, channel)
    from mpi4py import MPI

    mpi_messages.carrier(x.dtype)
    if x.dtype == np.bool_:
        return mpi_messages.allreduce(x, MPI.LOR, channel)
    return mpi_messages.allreduce(x, MPI.SUM, channel)


def pmax(x: jax.Array, channel: Channel) -> jax.Array:
    """Returns the maximum over ranks. Like XLA, returns NaN if any rank's value is NaN."""
    return _extreme(x, channel, largest=True)


def pmin(x: jax.Array, channel: Channel) -> jax.Array:
    """Returns the minimum over ranks. Like XLA, returns NaN if any rank's value is NaN."""
    return _extreme(x, channel, largest=False)


def all_gather(x: jax.Array, channel: Channel, *, dimension: int, tiled: bool) -> jax.Array:
    """Stacks all ranks' `x` along a new axis or, if `tiled`, concatenates along an existing axis.

    In either case, the axis is `dimension`.
    """
    parts = jnp.moveaxis(mpi_messages.allgather(x, channel), 0, dimension)
    if not tiled:
        return parts
    shape = list(x.shape)
    shape[dimension] *= channel.size
    return parts.reshape(shape)


def reduce_scatter(x: jax.Array, channel: Channel, *, dimension: int, tiled: bool) -> jax.Array:
    """Returns this rank's block of the sum.

    Each rank receives its blocks from all ranks in an all-to-all and adds them up in rank order.
    """
    if tiled:
        shape = (
            *x.shape[:dimension],
            channel.size,
            x.shape[dimension] // channel.size,
            *x.shape[dimension + 1 :],
        )
        x = x.reshape(shape)
    return _sum_ranks(mpi_messages.alltoall(jnp.moveaxis(x, dimension, 0), channel))


def all_to_all(x: jax.Array, channel: Channel, *, split_axis: int, concat_axis: int) -> jax.Array:
    """Sends block `j` of `split_axis` to rank `j`.

    Concatenates the received blocks along `concat_axis`.
    """
    block = x.shape[split_axis] // channel.size
    blocks = x.reshape(*x.shape[:split_axis], channel.size, block, *x.shape[split_axis + 1 :])
    received = mpi_messages.alltoall(jnp.moveaxis(blocks, split_axis, 0), channel)
    shape = list(received.shape[1:])
    shape[concat_axis] *= channel.size
    return jnp.moveaxis(received, 0, concat_axis).reshape(shape)


def ppermute(x: jax.Array, channel: Channel, *, perm: tuple[tuple[int, int], ...]) -> jax.Array:
    """Returns the operand of this rank's source, or zeros if it has no source."""
    source = next((s for s, d in perm if d == channel.rank), None)
    dest = next((d for s, d in perm if s == channel.rank), None)
    return mpi_messages.sendrecv(x, source=source, dest=dest, channel=channel)


def pbroadcast(x: jax.Array, channel: Channel, *, source: int) -> jax.Array:
    """Returns the source rank's `x`."""
    return mpi_messages.bcast(x, source, channel)


def _sum_narrow(x: jax.Array, channel: Channel) -> jax.Array:
    if channel.size == 1 or x.size == 0:
        return x
    if gathers(x.size, x.dtype.itemsize, channel.size):
        return _sum_ranks(mpi_messages.allgather(x, channel))
    block = -(-x.size // channel.size)
    flat = jnp.pad(x.reshape(-1), (0, block * channel.size - x.size))
    mine = _sum_ranks(mpi_messages.alltoall(flat.reshape(channel.size, block), channel))
    return mpi_messages.allgather(mine, channel).reshape(-1)[: x.size].reshape(x.shape)


def _sum_ranks(parts: jax.Array) -> jax.Array:
    """Sums along the first axis, starting with the lowest rank.

    Floats narrower than float32 are summed in float32 and rounded once.
    """
    narrow = mpi_messages.is_narrow_float(parts.dtype)
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

    wire = mpi_messages.carrier(x.dtype)
    op = MPI.MAX if largest else MPI.MIN
    if wire == np.bool_:
        return mpi_messages.allreduce(x, MPI.LOR if largest else MPI.LAND, channel)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = mpi_messages.allgather(x, channel)
        pick = jax.lax.max if largest else jax.lax.min
        return functools.reduce(pick, [parts[i] for i in range(channel.size)])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return mpi_messages.allreduce(x, op, channel)
    # `float8_e8m0fnu` doesn't have a sign bit. Read as unsigned integers, its bit patterns are in
    # the same order as the numbers, with NaN the largest, so we can let MPI compare integers.
    if x.dtype == jnp.float8_e8m0fnu:
        # For a minimum, NaN has to be the smallest, so add 1 to wrap it around to 0.
        keys = jax.lax.bitcast_convert_type(x, jnp.uint8) + jnp.uint8(not largest)
        keys = mpi_messages.allreduce(keys, op, channel) - jnp.uint8(not largest)
        return jax.lax.bitcast_convert_type(keys, x.dtype)
    # In the `fnuz` types, NaN has the bit pattern of negative zero and every other pattern is a
    # number. That leaves no integer below or above all numbers to map NaN to, so compare the
    # numbers as float32 instead.
    if x.dtype.name.endswith("fnuz"):
        return _extreme(x.astype(jnp.float32), channel, largest=largest).astype(x.dtype)
    # MPI's maximum of NaN and a number depends on which comes first, whereas XLA always returns
    # NaN. So we let MPI compare integers instead: we map floats to signed integers in the same
    # order, and NaN to the largest integer (for a maximum) or the smallest (for a minimum). The
    # result is the same as XLA's, and bit for bit the same on every rank.
    signed = np.dtype(f"int{wire.itemsize * 8}")
    bits = jax.lax.bitcast_convert_type(x, signed)
    limits = jnp.iinfo(signed)
    keys = jnp.where(jnp.isnan(x), limits.max if largest else limits.min, _flip(bits))
    return jax.lax.bitcast_convert_type(_flip(mpi_messages.allreduce(keys, op, channel)), x.dtype)


def _flip(bits: jax.Array) -> jax.Array:
    """Maps the bits of floats to signed integers in the same order. It's its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def reduce_locally(op: str, x: jax.Array, positions: tuple[int, ...]) -> jax.Array:
    """Reduces over any dimensions of `x` that a reduction names in addition to axes of ranks.

    Such reductions occur in steps that use `vmap`.
    """
    if not positions:
        return x
    if op == "psum":
        return jnp.sum(x, axis=positions, dtype=x.dtype)
    return (jnp.max if op == "pmax" else jnp.min)(x, axis=positions)
