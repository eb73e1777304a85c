"""Joins small sums into one message if there is no other exchange between them.

Ranks wait for each other once per message, and a rank whose core is busy computing is slow to
answer, so fewer messages mean fewer waits. The measured gain is in
benchmarks/results/benchmarks.md. This module is pure, and its result is identical across ranks
because it depends on the equations alone.

`program/assemble` has packed small exchanges before, below `bucket_bytes` (1 MB by default), into
shared buffers that are part of the program. Both are needed. An accelerator hands over one array
per shared buffer, so these must exist before the wire gets them, users set their size, and they
hold only exchanges of one level. Here, shared buffers are joined with one another and with single
sums of up to `SMALL_BYTES`, even inside loops, but only once they're on the host.
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

# Above `SMALL_BYTES`, copying a value into the joint message and out of it costs more than it
# saves. `MESSAGE_BYTES` limits the memory of a joint message.
SMALL_BYTES = 4 * 2**20
MESSAGE_BYTES = 32 * 2**20


def groups(eqns: Sequence[compat.Equation], axes: Mapping[str, int]) -> Iterator[list[Any]]:
    """Yields the equations in lists; the sums of one list may travel as one message.

    The order is valid: every equation comes after those whose results it reads. An equation that
    only computes (e.g. fills or empties a shared buffer) doesn't separate the sums before it from
    those after it. If it reads the result of one of these sums, it's moved behind all of them,
    otherwise it's moved in front of them. Callbacks with `ordered=True` do separate sums.
    """
    run: list[tuple[Any, Exchange]] = []
    behind: list[list[Any]] = []
    written: set[Any] = set()  # written by the sums of the run and by what is behind them
    for eqn in eqns:
        exchange = sum_of(eqn, axes)
        reads = not written.isdisjoint(v for v in eqn.invars if not isinstance(v, compat.Literal))
        ordered = any(map(compat.is_ordered_effect, eqn.effects))
        if run and not (exchange and not reads) and (ordered or involves_axes(eqn, axes)):
            yield from (*_messages(run, axes), *behind)
            run = []
            behind = []
            written = set()
            reads = False
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
    """Returns all elements in one vector, value after value.

    Each value is padded with zeros so that its length is a multiple of `multiple`.
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
    open_lists: dict[Any, tuple[list[Any], int]] = {}
    for eqn, exchange in run:
        params = dict(exchange.params)
        dtype = jnp.dtype(exchange.dtype)
        nbytes = exchange.count * dtype.itemsize
        if is_narrow_float(dtype):
            # Otherwise joining would change how the value is sent, and therefore how many bytes it
            # takes.
            fits = not gathers(exchange.count, dtype.itemsize, group_size(exchange, axes))
        else:
            fits = dtype.kind in "iufc"
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
