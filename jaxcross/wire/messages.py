"""Messages of any element type that JAX has and of any number of elements, by mpi4jax's calls or
the host's.

Every function is traced inside a wire region, communicates over `channel` when the region runs, and
must be reached by all of the channel's ranks in the same order. Nothing is copied unless a message
has to be split.
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
    """A communicator, this rank's position in it, and the longest message that it takes.

    Attributes:
        calls: What has the calls: mpi4jax, or `jaxcross.wire.host_calls`.
        comm: The mpi4py communicator; None in a group of one, where nothing is ever sent.
        rank: This rank's position in the group.
        size: Ranks in the group.
        max_count: Elements that one message may have; longer ones are split.
    """

    calls: Any
    comm: Any
    rank: int
    size: int
    max_count: int = MAX_COUNT


def split_counts(count: int, max_count: int = MAX_COUNT) -> tuple[int, ...]:
    """Returns the element counts of the messages that carry `count` elements: as few as possible,
    nearly equal.
    """
    if count == 0:
        return ()
    pieces = -(-count // max_count)
    base, longer = divmod(count, pieces)
    return (base + 1,) * longer + (base,) * (pieces - longer)


def is_narrow_float(dtype: Any) -> bool:
    """Whether MPI has no such float, so that it travels bit-cast and is summed in float32."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits in (8, 16)


def carrier(dtype: Any) -> np.dtype:
    """The element type that MPI sees for elements of `dtype`.

    Raises:
        ExchangeError: No MPI type has its size.
    """
    if is_narrow_float(dtype):
        return np.dtype(f"uint{jnp.finfo(dtype).bits}")
    plain = np.dtype(dtype) if not jnp.issubdtype(dtype, jax.dtypes.extended) else None
    if plain is None or plain.kind not in "biufc" or plain.itemsize > 16:
        raise ExchangeError(
            f"An exchange of `{dtype}` cannot be made: MPI has no such element type. Convert it "
            "first, as with `astype(jnp.int8)`."
        )
    return plain


def allreduce(x: jax.Array, op: Any, channel: Channel) -> jax.Array:
    """Elementwise reduction by an MPI operator; the element type must be one that MPI reduces."""
    if channel.size == 1 or x.size == 0:
        return x
    return _in_pieces(
        lambda piece: channel.calls.allreduce(piece, op, comm=channel.comm), x, channel
    )


def allgather(x: jax.Array, channel: Channel) -> jax.Array:
    """Every rank's `x`, stacked along a new first axis."""
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
    """Block `j` of the first axis goes to rank `j`; block `i` of the result came from rank `i`."""
    if channel.size == 1 or x.size == 0:
        return x

    def send(bits: jax.Array) -> jax.Array:
        blocks = bits.reshape(channel.size, -1)
        counts = split_counts(blocks.shape[1], channel.max_count)
        if len(counts) == 1:
            return channel.calls.alltoall(bits, comm=channel.comm)
        pieces = jnp.split(blocks, np.cumsum(counts)[:-1], axis=1)
        received = [channel.calls.alltoall(piece, comm=channel.comm) for piece in pieces]
        return jnp.concatenate(received, axis=1).reshape(bits.shape)

    return _as_carrier(x, send)


def bcast(x: jax.Array, root: int, channel: Channel) -> jax.Array:
    """The root's `x`."""
    if channel.size == 1 or x.size == 0:
        return x
    return _as_carrier(
        x,
        lambda bits: _in_pieces(
            lambda piece: channel.calls.bcast(piece, root, comm=channel.comm), bits, channel
        ),
    )


def sendrecv(x: jax.Array, *, source: int | None, dest: int | None, channel: Channel) -> jax.Array:
    """`source`'s `x`, or zeros where there is no source; sends to `dest` where there is one."""
    if x.size == 0 or (source is None and dest is None):
        return jnp.zeros_like(x)
    if source == channel.rank and dest == channel.rank:
        return x
    from mpi4py import MPI

    null = MPI.PROC_NULL

    def one(piece: jax.Array) -> jax.Array:
        # MPI leaves the buffer of a receive from PROC_NULL untouched, so an empty one will do.
        buffer = jnp.zeros((0,), piece.dtype) if source is None else piece
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
    """Move bits: the element type does not matter to who receives them."""
    wire = carrier(x.dtype)
    if wire == x.dtype:
        return send(x)
    return jax.lax.bitcast_convert_type(send(jax.lax.bitcast_convert_type(x, wire)), x.dtype)


def _in_pieces(
    send: Callable[[jax.Array], jax.Array], x: jax.Array, channel: Channel, *, stacked: bool = False
) -> jax.Array:
    """One message where it fits, else the flat array in pieces; `stacked` results have a leading
    rank axis.
    """
    counts = split_counts(x.size, channel.max_count)
    if len(counts) == 1:
        return send(x)
    pieces = jnp.split(x.reshape(-1), np.cumsum(counts)[:-1])
    flat = jnp.concatenate([send(piece) for piece in pieces], axis=int(stacked))
    return flat.reshape((channel.size, *x.shape) if stacked else x.shape)
