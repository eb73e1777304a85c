"""Turns a jaxpr with exchanges into one with messages.

A message is either an mpi4jax call or an equation that the host carries out. We retrace the jaxpr:
each equation is evaluated as it is, except that exchanges are replaced by the functions of
`mpi_collectives`, and loops and conditionals that contain exchanges are retraced with new bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED
from jaxcross.errors import ExchangeError
from jaxcross.program import Exchange, holds, shared_buffers, struct_of
from jaxcross.wire import coalesce, mpi_collectives
from jaxcross.wire.mpi4jax_calls import CommKey, with_communicators
from jaxcross.wire.mpi_messages import Channel, is_narrow_float
from jaxcross.wire.rank_grid import RankGrid
from jaxcross.wire.recognition import (
    LOCAL_PRIMITIVES,
    REDUCTIONS,
    group_of,
    names_axis,
    names_axis_inside,
    recognise,
)

# Returns the channel on which the exchanges of these axes and groups are sent.
Connect = Callable[[Sequence[str], Any], Channel]

_LOOPS = ("scan", "while", "cond")


def lower(
    jaxpr: compat.Jaxpr,
    mesh: RankGrid,
    connect: Connect,
    comms: Mapping[CommKey, Any] | None = None,
) -> Any:
    """Returns a closed jaxpr in which every exchange has become one or several messages.

    Arguments and results stay the same. Messages are sent in equation order, with one exception:
    sums with no other exchange between them may be joined into a single message, which is sent in
    the place of the last sum. This function makes the communicators that are missing, so all
    members of a group must lower the jaxpr. If `comms` has a replacement for the communicator of an
    mpi4jax call, the call uses the replacement.
    """
    if comms:
        jaxpr = compat.close(with_communicators(compat.open_jaxpr(jaxpr)[0], comms))
    return _retrace(jaxpr, mesh, connect)


def calls_mpi4jax(jaxpr: compat.Jaxpr) -> bool:
    """Whether a jaxpr, or one nested inside it, calls mpi4jax."""
    return holds(jaxpr, lambda eqn: eqn.primitive.name.endswith("_mpi"))


def _retrace(jaxpr: compat.Jaxpr, mesh: RankGrid, connect: Connect) -> Any:
    structs = map(struct_of, jaxpr.in_avals)
    return jax.make_jaxpr(lambda *args: _evaluate(jaxpr, args, mesh, connect))(*structs)


def _evaluate(
    jaxpr: compat.Jaxpr, args: Sequence[Any], mesh: RankGrid, connect: Connect
) -> list[Any]:
    inner, consts = compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(
        zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True)
    )

    def read(atom: compat.Atom) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else env[atom]

    for eqns in coalesce.groups(inner.eqns, mesh.sizes):
        values = [read(v) for eqn in eqns for v in eqn.invars]
        with compat.in_place_of(eqns[0]):
            if len(eqns) == 1:
                results = _equation(eqns[0], values, mesh, connect)
            else:
                results = _sums(eqns, values, mesh, connect)
        env.update(zip([v for eqn in eqns for v in eqn.outvars], results, strict=True))
    return [read(v) for v in inner.outvars]


def _equation(
    eqn: compat.Equation, values: list[Any], mesh: RankGrid, connect: Connect
) -> Sequence[Any]:
    name = eqn.primitive.name
    exchanges = recognise(eqn, mesh.sizes)
    if exchanges is not None and not name.endswith("_mpi"):
        results = [_exchange(x, v, mesh, connect) for x, v in zip(exchanges, values, strict=True)]
        # JAX's type of a result may contain more than ours (that it's weakly typed), but the
        # element type is always the same.
        return [
            jnp.asarray(r, dtype=compat.array_type(o).dtype)
            for r, o in zip(results, eqn.outvars, strict=True)
        ]
    if name == "axis_index" and names_axis(eqn, mesh.sizes):
        axis = eqn.params["axis_name"]
        return [jnp.int32(mesh.index(axis if isinstance(axis, str) else axis[0]))]
    if name in LOCAL_PRIMITIVES and names_axis(eqn, mesh.sizes):
        return values
    if name == "split" and values[0].ndim == 1:
        return shared_buffers.split(values[0], eqn.params["sizes"])
    inside = [j for j in compat.sub_jaxprs(eqn) if names_axis_inside(j, mesh.sizes)]
    if inside and name in _LOOPS:
        return compat.bind_equation(
            eqn, values, _map_closed(eqn.params, lambda j: _retrace(j, mesh, connect))
        )
    if inside and name not in INLINED:
        raise ExchangeError(
            f"An exchange inside `{name}` cannot be reached, at {compat.source_of(eqn)}. "
            "Move it out of that transformation."
        )
    if inside:
        return _evaluate(inside[0], values, mesh, connect)
    return compat.bind_equation(eqn, values, eqn.params)


def _sums(
    eqns: Sequence[compat.Equation], values: list[Any], mesh: RankGrid, connect: Connect
) -> Sequence[Any]:
    """Computes several sums over the same ranks with a single message."""
    exchange = coalesce.sum_of(eqns[0], mesh.sizes)
    assert exchange is not None
    values = [jnp.asarray(value) for value in values]
    ranks = connect(*group_of(exchange, mesh)).size
    if ranks == 1:
        return values
    # A sum of narrow floats is cut into one block per rank. We fill these blocks one after the
    # other, and pad each value to a multiple of the number of ranks, so that a joined message takes
    # as many bytes as its values would take separately.
    blocks = ranks if is_narrow_float(values[0].dtype) else 1
    # The barriers make XLA treat the message like a call, and compile what is around it separately.
    # Otherwise one executable of a whole step and the step's segments would differ in their last
    # bits.
    flat = jax.lax.optimization_barrier(
        coalesce.packed(jax.lax.optimization_barrier(values), blocks)
    )
    sums = coalesce.unpacked(_exchange(exchange, flat, mesh, connect), values, blocks)
    return jax.lax.optimization_barrier(sums)


def _exchange(exchange: Exchange, x: Any, mesh: RankGrid, connect: Connect) -> Any:
    params = {name: value for name, value in exchange.params if name != "groups"}
    positions = params.pop("positions", ())
    channel = connect(*group_of(exchange, mesh))
    if exchange.op in REDUCTIONS:
        x = mpi_collectives.reduce_locally(exchange.op, jnp.asarray(x), positions)
    return getattr(mpi_collectives, exchange.op)(jnp.asarray(x), channel, **params)


def _map_closed(params: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        # We compare the exact type: the named tuples of loops hold no jaxprs, and their
        # constructors take separate arguments.
        if type(value) in (tuple, list):
            return type(value)(convert(v) for v in value)
        return function(value) if compat.is_closed_jaxpr(value) else value

    return {name: convert(value) for name, value in params.items()}
