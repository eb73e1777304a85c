"""JAX's named-axis collectives built from messages: one function per collective.

Each function takes the equation's operand and, by name, the equation's parameters, and returns a
result of the shape that JAX expects. It is traced inside a wire region and communicates when the
region runs. All ranks of the channel trace the same function.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross.wire import mpi_messages
from jaxcross.wire.mpi_messages import Channel

# Up to this size, latency dominates, so a 16-bit sum is a single all-gather of all operands instead
# of an all-to-all followed by an all-gather.
GATHER_BYTES = 64 * 1024
# Adding the ranks one after the other fixes the order of a float sum. Beyond this many ranks, the
# unrolled program would become too long.
_UNROLLED_RANKS = 64


def gathers(count: int, itemsize: int, size: int) -> bool:
    """Whether a sum of 8- or 16-bit floats of this size is computed from a single all-gather."""
    return count * itemsize * size <= GATHER_BYTES


def psum(x: jax.Array, channel: Channel) -> jax.Array:
    """Sum over ranks. Floats of 8 and 16 bits are summed in float32 and rounded once."""
    if mpi_messages.is_narrow_float(x.dtype):
        return _sum_narrow(x, channel)
    from mpi4py import MPI

    mpi_messages.carrier(x.dtype)
    if x.dtype == np.bool_:
        return mpi_messages.allreduce(x, MPI.LOR, channel)
    return mpi_messages.allreduce(x, MPI.SUM, channel)


def pmax(x: jax.Array, channel: Channel) -> jax.Array:
    """Maximum over ranks. NaN wins, as in XLA."""
    return _extreme(x, channel, largest=True)


def pmin(x: jax.Array, channel: Channel) -> jax.Array:
    """Minimum over ranks. NaN wins, as in XLA."""
    return _extreme(x, channel, largest=False)


def all_gather(x: jax.Array, channel: Channel, *, dimension: int, tiled: bool) -> jax.Array:
    """Every rank's `x` along a new axis or, if `tiled`, concatenated along the existing one."""
    parts = jnp.moveaxis(mpi_messages.allgather(x, channel), 0, dimension)
    if not tiled:
        return parts
    shape = list(x.shape)
    shape[dimension] *= channel.size
    return parts.reshape(shape)


def reduce_scatter(x: jax.Array, channel: Channel, *, dimension: int, tiled: bool) -> jax.Array:
    """This rank's block of the sum, by an all-to-all and a local sum in rank order."""
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
    """Sends block `j` of `split_axis` to rank `j` and joins received blocks along `concat_axis`."""
    block = x.shape[split_axis] // channel.size
    blocks = x.reshape(*x.shape[:split_axis], channel.size, block, *x.shape[split_axis + 1 :])
    received = mpi_messages.alltoall(jnp.moveaxis(blocks, split_axis, 0), channel)
    shape = list(received.shape[1:])
    shape[concat_axis] *= channel.size
    return jnp.moveaxis(received, 0, concat_axis).reshape(shape)


def ppermute(x: jax.Array, channel: Channel, *, perm: tuple[tuple[int, int], ...]) -> jax.Array:
    """Returns the operand of this rank's source, or zeros if the permutation names no source."""
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
    """Sums along the first axis, lowest rank first.

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
    # This type has no sign, so its bits are already in order, with NaN last.
    if x.dtype == jnp.float8_e8m0fnu:
        # For a minimum, adding 1 wraps NaN around to 0, so that it comes first.
        keys = jax.lax.bitcast_convert_type(x, jnp.uint8) + jnp.uint8(not largest)
        keys = mpi_messages.allreduce(keys, op, channel) - jnp.uint8(not largest)
        return jax.lax.bitcast_convert_type(keys, x.dtype)
    # In these types NaN lies among the numbers, and neither end of the range is free for it.
    if x.dtype.name.endswith("fnuz"):
        return _extreme(x.astype(jnp.float32), channel, largest=largest).astype(x.dtype)
    # MPI's maximum of NaN and a number depends on which of them comes first. So we map floats to
    # integers of the same order, with NaN at the end that wins. This gives XLA's answer, bit for
    # bit the same on every rank.
    signed = np.dtype(f"int{wire.itemsize * 8}")
    bits = jax.lax.bitcast_convert_type(x, signed)
    limits = jnp.iinfo(signed)
    keys = jnp.where(jnp.isnan(x), limits.max if largest else limits.min, _flip(bits))
    return jax.lax.bitcast_convert_type(_flip(mpi_messages.allreduce(keys, op, channel)), x.dtype)


def _flip(bits: jax.Array) -> jax.Array:
    """Maps a float's bits to signed integers of the same order; it is its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def reduce_locally(op: str, x: jax.Array, positions: tuple[int, ...]) -> jax.Array:
    """Does the local part of a reduction that also names positional array dimensions.

    A step inside `vmap` creates such reductions.
    """
    if not positions:
        return x
    if op == "psum":
        return jnp.sum(x, axis=positions, dtype=x.dtype)
    return (jnp.max if op == "pmax" else jnp.min)(x, axis=positions)
