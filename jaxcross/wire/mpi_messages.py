"""Messages of any JAX element type and any length, sent by mpi4jax or the host.

**Problem.** MPI lacks JAX's 8- and 16-bit floats, and mpi4jax can't send more than 2**31 - 1
elements at once. All collectives in `mpi_collectives` are built from the five calls in this module,
so this is where we hide both limitations.

**Element types.** All calls except `allreduce` merely move bits. If MPI lacks an array's element
type, they send it bit-cast to unsigned integers of the same width. (Converting to float32 would
double or even quadruple the bytes on the wire.) `allreduce`, however, computes with the elements,
and after a bit-cast, MPI would add up the bits as integers. That's why `mpi_collectives` computes
sums of narrow floats itself, from calls that only move bits.

**Long messages.** An array that's too long is flattened and split into as few messages as possible,
all of about the same length. Shapes are the same on all ranks, so everyone splits in the same way
and the messages match up. An array that fits into one message isn't copied.

**When it communicates.** Calling these functions while a program is traced only adds messages to
it. The messages are sent when that part of the program runs, over `channel`, which wraps a
communicator. All ranks in the channel must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross.errors import ExchangeError

# mpi4jax casts element counts to a C int.
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A communicator, this rank's position in it, and its maximum message length.

    Attributes:
        calls: The module that makes the calls: mpi4jax or `jaxcross.wire.host_calls`.
        comm: The mpi4py communicator. Unused in a single-rank group, where nothing is ever sent.
        rank: This rank's position in the group.
        size: Number of ranks in the group.
        max_count: Maximum number of elements per message. Longer messages are split.
    """

    calls: Any
    comm: Any
    rank: int
    size: int
    max_count: int = MAX_COUNT


def split_counts(count: int, max_count: int = MAX_COUNT) -> tuple[int, ...]:
    """Splits `count` elements into as few messages as possible, and returns their lengths.

    The lengths differ by at most one.
    """
    if count == 0:
        return ()
    pieces = -(-count // max_count)
    base, longer = divmod(count, pieces)
    return (base + 1,) * longer + (base,) * (pieces - longer)


def is_narrow_float(dtype: Any) -> bool:
    """Whether this is an 8- or 16-bit float.

    MPI lacks these types, so we send them bit-cast to integers and sum them in float32.
    """
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits in (8, 16)


def carrier(dtype: Any) -> np.dtype:
    """Returns the element type that we use to send `dtype` over MPI.

    Raises:
        ExchangeError: MPI has no suitable element type for `dtype`.
    """
    if is_narrow_float(dtype):
        return np.dtype(f"uint{jnp.finfo(dtype).bits}")
    # JAX's extended types, such as random keys, don't have a NumPy type at all.
    plain = np.dtype(dtype) if not jnp.issubdtype(dtype, jax.dtypes.extended) else None
    if plain is None or plain.kind not in "biufc" or plain.itemsize > 16:
        raise ExchangeError(
            f"Arrays of type `{dtype}` cannot be exchanged, because MPI has no such element type. "
            "Convert the array before the exchange, for example with `x.astype(jnp.int8)`."
        )
    return plain


def allreduce(x: jax.Array, op: Any, channel: Channel) -> jax.Array:
    """Reduces `x` elementwise over the ranks with an MPI operator.

    MPI must be able to do arithmetic on the element type.
    """
    # There's nothing to send in a single-rank group or for an empty array. Shapes are the same on
    # all ranks, so either all of them skip the message or none do.
    if channel.size == 1 or x.size == 0:
        return x
    return _in_pieces(
        lambda piece: channel.calls.allreduce(piece, op, comm=channel.comm), x, channel
    )


def allgather(x: jax.Array, channel: Channel) -> jax.Array:
    """Returns every rank's `x`, stacked along a new first axis."""
    if channel.size == 1 or x.size == 0:
        return jnp.broadcast_to(x[None], (channel.size, *x.shape))
    return _as_carrier(
        x,
        lambda bits: _in_pieces(
            lambda piece: channel.calls.allgather(piece, comm=channel.comm),
            bits,
            channel,
            stacked=True,
        ),
    )


def alltoall(x: jax.Array, channel: Channel) -> jax.Array:
    """Sends block `j` of the first axis to rank `j`. Block `i` of the result is from rank `i`."""
    if channel.size == 1 or x.size == 0:
        return x

    def send(bits: jax.Array) -> jax.Array:
        blocks = bits.reshape(channel.size, -1)
        counts = split_counts(blocks.shape[1], channel.max_count)
        if len(counts) == 1:
            return channel.calls.alltoall(bits, comm=channel.comm)
        # Each message again needs a block for every rank, so split within the blocks.
        pieces = jnp.split(blocks, np.cumsum(counts)[:-1], axis=1)
        received = [channel.calls.alltoall(piece, comm=channel.comm) for piece in pieces]
        return jnp.concatenate(received, axis=1).reshape(bits.shape)

    return _as_carrier(x, send)


def bcast(x: jax.Array, root: int, channel: Channel) -> jax.Array:
    """Returns the root's `x`."""
    if channel.size == 1 or x.size == 0:
        return x
    return _as_carrier(
        x,
        lambda bits: _in_pieces(
            lambda piece: channel.calls.bcast(piece, root, comm=channel.comm), bits, channel
        ),
    )


def sendrecv(x: jax.Array, *, source: int | None, dest: int | None, channel: Channel) -> jax.Array:
    """Sends `x` to rank `dest` and returns the `x` of rank `source`.

    If `dest` is None, nothing is sent. If `source` is None, returns zeros.
    """
    if x.size == 0 or (source is None and dest is None):
        return jnp.zeros_like(x)
    if source == channel.rank and dest == channel.rank:
        return x
    from mpi4py import MPI

    null = MPI.PROC_NULL

    def one(piece: jax.Array) -> jax.Array:
        # A rank that doesn't receive anything passes MPI's PROC_NULL as the source, and MPI leaves
        # the receive buffer untouched. So an empty buffer will do, and we return zeros.
        buffer = jnp.zeros((0,), piece.dtype) if source is None else piece
        # If we split `x` into several messages, they all have the same tag. They can't get mixed
        # up, because MPI delivers messages between two ranks in the order they were sent.
        got = channel.calls.sendrecv(
            piece,
            buffer,
            np.int64(null if source is None else source),
            np.int64(null if dest is None else dest),
            recvtag=0,
            comm=channel.comm,
        )
        return jnp.zeros_like(piece) if source is None else got

    return _as_carrier(x, lambda bits: _in_pieces(one, bits, channel))


def _as_carrier(x: jax.Array, send: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sends `x`, bit-cast to a type that MPI has if need be. `send` must only move bits."""
    wire = carrier(x.dtype)
    if wire == x.dtype:
        return send(x)
    return jax.lax.bitcast_convert_type(send(jax.lax.bitcast_convert_type(x, wire)), x.dtype)


def _in_pieces(
    send: Callable[[jax.Array], jax.Array], x: jax.Array, channel: Channel, *, stacked: bool = False
) -> jax.Array:
    """Sends `x` as a single message if it's short enough, else flattens and splits it.

    If `stacked` is true, `send` stacks a value from every rank along the first axis. We then
    concatenate the results of several messages along the second axis, i.e. separately for each
    rank.
    """
    counts = split_counts(x.size, channel.max_count)
    if len(counts) == 1:
        return send(x)
    pieces = jnp.split(x.reshape(-1), np.cumsum(counts)[:-1])
    flat = jnp.concatenate([send(piece) for piece in pieces], axis=int(stacked))
    return flat.reshape((channel.size, *x.shape) if stacked else x.shape)
