"""Merges small sums into a single message if no other exchange comes between them.

**Problem.** The ranks wait for one another once per message. When a rank's cores are busy with
another job's computation, its exchange thread has to wait for a core before it can join in, and
that happens for every single message. What matters is therefore the number of messages, not their
size. Without merging, exchanging the gradients of ResNet-50 at 500 Mbit/s takes 1.78 s on an idle
machine, but 3.15 s alongside a computation. If we merge sums of up to 4 MiB, it takes 1.73 s and
1.85 s, respectively (measured with MPICH, see benchmarks/results/benchmarks.md).

**Idea.** `groups` walks through the equations and collects sums until it reaches some other
exchange. Pure computation in between doesn't stop it: such an equation is moved ahead of the merged
message, or behind it if it reads the result of a collected sum. Sums over the same ranks and with
the same element type then share a message.

**All ranks merge the same sums.** If one rank merged two sums and another sent them separately,
they'd end up waiting for messages that are never sent. So what we merge is a pure function of the
program's equations, which makes it identical across ranks without any communication.

**Why the program's shared buffers aren't enough.** `program/assemble` has already packed exchanges
smaller than `bucket_bytes` (1 MB by default) into shared buffers. It does so as part of the program
because, on an accelerator, each shared buffer is then a single transfer to the host, so packing has
to happen before the arrays get to the wire. But users choose the size of these buffers, and a
buffer only contains exchanges from the same level. Here we also merge the buffers with one another
and with individual sums of up to `SMALL_BYTES`, even inside loops.
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

# Beyond `SMALL_BYTES`, copying a sum into a merged message and back out takes longer than waiting
# for the other ranks once more. In the benchmark above, limits of 64 KiB, 1 MiB and 4 MiB gave 1.97
# s, 1.83 s and 1.85 s, so the exact value doesn't matter much. `MESSAGE_BYTES` limits the memory
# taken up by a merged message.
SMALL_BYTES = 4 * 2**20
MESSAGE_BYTES = 32 * 2**20


def groups(eqns: Sequence[compat.Equation], axes: Mapping[str, int]) -> Iterator[list[Any]]:
    """Yields the equations in lists. Sums in the same list can be sent as one message.

    The equations are reordered, but never ahead of an equation whose result they read. Suppose that
    some pure computation (e.g. filling or emptying a shared buffer) comes between two sums. If it
    reads the first sum's result, it's moved behind both sums, otherwise ahead of both, and the sums
    can be merged. Callbacks with `ordered=True` stay where they are, so sums on either side aren't
    merged.
    """
    run: list[tuple[Any, Exchange]] = []
    behind: list[list[Any]] = []
    written: set[Any] = set()  # written by the run's sums or by equations moved behind them
    for eqn in eqns:
        exchange = sum_of(eqn, axes)
        reads = not written.isdisjoint(v for v in eqn.invars if not isinstance(v, compat.Literal))
        ordered = any(map(compat.is_ordered_effect, eqn.effects))
        # Collect consecutive sums that can share a message (`run`). A sum that reads the result of
        # an earlier sum in the run can't, so it ends the run and starts a new one. Any other
        # exchange or ordered callback ends the run too.
        if run and not (exchange and not reads) and (ordered or involves_axes(eqn, axes)):
            yield from (*_messages(run, axes), *behind)
            run = []
            behind = []
            written = set()
            reads = False
        # Pure computation between two sums of a run goes behind the message if it reads the result
        # of one of them. Otherwise it goes ahead of the message, because a later sum may need what
        # it computes.
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
    """Concatenates the elements of all values into one vector.

    Zero-pads each value to a multiple of `multiple` elements.
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
    """The inverse of `packed`: splits a vector into values shaped like those in `like`."""
    pieces = shared_buffers.split(flat, [value.size + -value.size % multiple for value in like])
    return [
        piece[: value.size].reshape(value.shape) for piece, value in zip(pieces, like, strict=True)
    ]


def sum_of(eqn: compat.Equation, axes: Mapping[str, int]) -> Exchange | None:
    """Returns the equation's exchange if it's a single sum, else None."""
    exchanges = recognise(eqn, axes)
    return exchanges[0] if exchanges is not None and [x.op for x in exchanges] == ["psum"] else None


def _messages(run: Sequence[tuple[Any, Exchange]], axes: Mapping[str, int]) -> list[list[Any]]:
    lists: list[list[Any]] = []
    # The message we're currently filling and its size in bytes, for each combination of axes,
    # groups and element type.
    open_lists: dict[Any, tuple[list[Any], int]] = {}
    for eqn, exchange in run:
        params = dict(exchange.params)
        dtype = jnp.dtype(exchange.dtype)
        nbytes = exchange.count * dtype.itemsize
        if is_narrow_float(dtype):
            # A tiny sum of 8- or 16-bit floats is sent as a single all-gather, a larger sum as an
            # all-to-all followed by an all-gather. Merging tiny sums could push them over the
            # limit, and they'd be sent in a different way, with a different number of bytes. So
            # leave them alone.
            fits = not gathers(exchange.count, dtype.itemsize, group_size(exchange, axes))
        else:
            fits = dtype.kind in "iufc"
        # Also keep sums separate if they reduce dimensions of the array itself ("positions").
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
