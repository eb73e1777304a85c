"""Joins small sums into one message if there is no other exchange between them.

**Problem.** The ranks wait for each other once per message. If a rank's cores are busy with another
job's computation, its exchange thread has to wait for a core before it can take part, and it does
so for every single message. What matters is therefore how many messages there are, rather than how
large they are. Exchanging the gradients of ResNet-50 at 500 Mbit/s without joining takes 1.78 s
when nothing else runs, but 3.15 s alongside a computation. If sums of up to 4 MiB are joined, it
takes 1.73 s and 1.85 s (measured with MPICH, see benchmarks/results/benchmarks.md).

**Idea.** `groups` goes through the equations in order, and collects sums until it reaches a
different exchange. An equation that only computes doesn't end the collection: we move it in front
of the joint message, or behind it if it reads the result of a collected sum. Sums over the same
ranks and with the same element type then share a message.

**All ranks join the same sums.** If one rank joined two sums while another rank sent them
separately, they'd wait for messages that are never sent. So what we join depends on nothing but the
program's equations, which makes it identical across ranks without any communication. This module is
pure.

**Why the program's shared buffers aren't enough.** `program/assemble` has already packed exchanges
smaller than `bucket_bytes` (1 MB by default) into shared buffers. These are part of the program,
because an accelerator transfers one array per shared buffer to the host, so the arrays must be
packed before they get to the wire. But users choose the size of these buffers, and a buffer
contains only exchanges of one level. Here we also join the buffers with one another, and with
single sums of up to `SMALL_BYTES`, even inside loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross.program import Exchange, shared_buffers
from jaxcross.wire.bytes import group_size
from jaxcross.wire.mpi_collectives import gathers
from jaxcross.wire.mpi_messages import is_narrow_float
from jaxcross.wire.recognition import involves_axes, recognise

# For sums larger than `SMALL_BYTES`, copying them into a joint message and out of it takes longer
# than waiting for the other ranks once more. In the benchmark above, joining sums of up to 64 KiB,
# 1 MiB or 4 MiB took 1.97 s, 1.83 s and 1.85 s, so the exact value isn't important.
# `MESSAGE_BYTES` limits how much memory a joint message takes.
SMALL_BYTES = 4 * 2**20
MESSAGE_BYTES = 32 * 2**20


def groups(eqns: Sequence[compat.Equation], axes: Mapping[str, int]) -> Iterator[list[Any]]:
    """Yields the equations in lists. The sums in a list can be sent as one message.

    The equations are reordered, but each one still comes after the equations whose results it
    reads. Suppose that an equation which only computes (e.g. fills or empties a shared buffer) is
    between two sums. If it reads the result of the first sum, it's moved behind both sums,
    otherwise in front of them, so they can be joined. A callback with `ordered=True` isn't moved,
    so sums before and after it aren't joined.
    """
    run: list[tuple[Any, Exchange]] = []
    behind: list[list[Any]] = []
    written: set[Any] = set()  # written by the sums of the run and by what is behind them
    for eqn in eqns:
        exchange = sum_of(eqn, axes)
        reads = not written.isdisjoint(v for v in eqn.invars if not isinstance(v, compat.Literal))
        ordered = any(map(compat.is_ordered_effect, eqn.effects))
        # Collect consecutive sums that may share a message (`run`). If a sum reads the result of an
        # earlier sum in the run, it can't share a message with it, so we end the run and start a
        # new one. Any other exchange and any ordered callback ends the run as well.
        if run and not (exchange and not reads) and (ordered or involves_axes(eqn, axes)):
            yield from (*_messages(run, axes), *behind)
            run = []
            behind = []
            written = set()
            reads = False
        # An equation that only computes may stand between two sums that share a message. If it
        # reads the result of one of the sums, it has to come after the message. Otherwise we move
        # it in front of the message, because a later sum may need what it computes.
        if exchange:
            run.append((eqn, exchange))
        elif reads:
            behind.append([eqn])
        else:
            yield [eqn]
            continue
        written.update(eqn.outvars)
    yield from (*_messages(run, axes), *behind)


def packed(values: Sequence[jax.Array], multiple: int = 1) -> jax.Array:
    """Returns the elements of all values in one vector, value after value.

    Pads each value with zeros so that its length is a multiple of `multiple`.
    """
    return shared_buffers.packed(
        [
            jnp.pad(jnp.ravel(value), (0, -value.size % multiple))
            if value.size % multiple
            else value
            for value in values
        ]
    )


def unpacked(flat: jax.Array, like: Sequence[jax.Array], multiple: int = 1) -> list[jax.Array]:
    """Splits a vector into the values that `packed` joined."""
    pieces = shared_buffers.split(flat, [value.size + -value.size % multiple for value in like])
    return [
        piece[: value.size].reshape(value.shape) for piece, value in zip(pieces, like, strict=True)
    ]


def sum_of(eqn: compat.Equation, axes: Mapping[str, int]) -> Exchange | None:
    """Returns the equation's exchange if it is a single sum, else None."""
    exchanges = recognise(eqn, axes)
    return exchanges[0] if exchanges is not None and [x.op for x in exchanges] == ["psum"] else None


def _messages(run: Sequence[tuple[Any, Exchange]], axes: Mapping[str, int]) -> list[list[Any]]:
    lists: list[list[Any]] = []
    # For each combination of axes, groups and element type, the message that we're filling and its
    # size in bytes so far.
    open_lists: dict[Any, tuple[list[Any], int]] = {}
    for eqn, exchange in run:
        params = dict(exchange.params)
        dtype = jnp.dtype(exchange.dtype)
        nbytes = exchange.count * dtype.itemsize
        if is_narrow_float(dtype):
            # A tiny sum of 8- or 16-bit floats is sent as a single all-gather, a larger one as an
            # all-to-all and an all-gather. If we joined a tiny sum with others, the message would
            # be too large for a single all-gather. The sum would then be sent in a different way,
            # with a different number of bytes.
            fits = not gathers(exchange.count, dtype.itemsize, group_size(exchange, axes))
        else:
            fits = dtype.kind in "iufc"
        # A sum that also reduces dimensions of the array itself ("positions") stays separate, too.
        if not (fits and 0 < nbytes <= SMALL_BYTES) or "positions" in params:
            lists.append([eqn])
            continue
        key = exchange.axes, params.get("groups"), dtype
        message, filled = open_lists.get(key, ([], MESSAGE_BYTES))
        if filled + nbytes > MESSAGE_BYTES:
            message = []
            filled = 0
            lists.append(message)
        message.append(eqn)
        open_lists[key] = message, filled + nbytes
    return lists
