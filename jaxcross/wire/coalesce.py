"""Small sums with no other exchange between them travel as one message.

Ranks wait for each other once a message, and a rank whose core computes takes its time to answer;
what joining them gains is in benchmarks/results/benchmarks.md. Pure; the same on every rank, as it
follows from the equations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross.program import buffers
from jaxcross.program.ir import Exchange
from jaxcross.wire import offsets
from jaxcross.wire.bytes import group_size
from jaxcross.wire.collectives import gathers
from jaxcross.wire.messages import is_narrow_float
from jaxcross.wire.recognise import involves_axes, recognise

# What is larger is not worth the copy into the common message and out of it; messages are limited
# for their memory.
SMALL_BYTES = 4 * 2**20
MESSAGE_BYTES = 32 * 2**20


def groups(eqns: Sequence[compat.Equation], axes: Mapping[str, int]) -> Iterator[list[Any]]:
    """The equations, in an order in which each follows those that it reads; sums of one list may be
    one message.

    What only computes (a shared buffer that is filled or emptied) does not part the sums before it
    from those behind: it comes before all of them, or behind them where it reads one. Callbacks of
    `ordered=True` do part them.
    """
    run: list[tuple[Any, Exchange]] = []
    behind: list[list[Any]] = []
    written: set[Any] = set()  # by the sums of the run and what comes behind them
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
    """Returns all elements in one vector, value by value, each padded with zeros to a multiple of
    elements.
    """
    return buffers.packed(
        [
            jnp.pad(jnp.ravel(value), (0, -value.size % multiple))
            if value.size % multiple
            else value
            for value in values
        ]
    )


def unpacked(flat: jax.Array, like: Sequence[jax.Array], multiple: int = 1) -> list[jax.Array]:
    """Returns the values that `packed` joined."""
    pieces = offsets.split(flat, [value.size + -value.size % multiple for value in like])
    return [
        piece[: value.size].reshape(value.shape) for piece, value in zip(pieces, like, strict=True)
    ]


def sum_of(eqn: compat.Equation, axes: Mapping[str, int]) -> Exchange | None:
    """The equation's exchange, if it is one sum and nothing else."""
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
            # else it travels another way, by other bytes
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
