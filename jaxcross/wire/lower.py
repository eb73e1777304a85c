"""Turns a jaxpr with exchanges into one with messages.

We evaluate the jaxpr equation by equation under a new trace. Most equations are bound again
unchanged. For an exchange, we call the corresponding function in `mpi_collectives`, which adds
messages to the trace, either as mpi4jax calls or as equations for the host to execute. Loops and
conditionals that contain exchanges are bound again with a body that has been retraced in the same
manner.
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

# Maps axes and groups to a channel for exchanges over them.
Connect = Callable[[Sequence[str], Any], Channel]

_LOOPS = ("scan", "while", "cond")


def lower(
    jaxpr: compat.Jaxpr,
    mesh: RankGrid,
    connect: Connect,
    comms: Mapping[CommKey, Any] | None = None,
) -> Any:
    """Returns a closed jaxpr in which each exchange is replaced by one or more messages.

    The arguments and results of the jaxpr stay the same. Messages are sent in the order of the
    equations, except that several sums may be merged into one message if there's no other exchange
    between them. That message goes where the last of these sums was.

    Ranks that exchange with one another form a group, which needs an MPI communicator. If a group
    doesn't have one yet, this creates it and waits for the group's other members, which must be
    lowering the same jaxpr.

    The user's own mpi4jax calls come with their own communicators, which `comms` maps to
    replacements. Calls with a communicator that isn't in `comms` are left unchanged.
    """
    if comms:
        jaxpr = compat.close(with_communicators(compat.open_jaxpr(jaxpr)[0], comms))
    return _retrace(jaxpr, mesh, connect)


def calls_mpi4jax(jaxpr: compat.Jaxpr) -> bool:
    """Whether a jaxpr calls mpi4jax, at any depth."""
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
        # The original result may have had a weak type, which ours doesn't. Equations that read it
        # were traced with the weak type, but that makes no difference to them, because the element
        # type is the same.
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
            f"An exchange inside `{name}` is not supported, at {compat.source_of(eqn)}. Move the "
            "exchange out of that transformation."
        )
    if inside:
        return _evaluate(inside[0], values, mesh, connect)
    return compat.bind_equation(eqn, values, eqn.params)


def _sums(
    eqns: Sequence[compat.Equation], values: list[Any], mesh: RankGrid, connect: Connect
) -> Sequence[Any]:
    """Performs several sums over the same ranks in a single message."""
    exchange = coalesce.sum_of(eqns[0], mesh.sizes)
    assert exchange is not None
    values = [jnp.asarray(value) for value in values]
    ranks = connect(*group_of(exchange, mesh)).size
    if ranks == 1:
        return values
    # A sum of 8- or 16-bit floats is sent as one block per rank, so it has to be padded to a
    # multiple of the number of ranks. When sent separately, each value gets padded. We do the same
    # in a merged message, so that it takes exactly as many bytes as `wire_bytes` predicts for the
    # separate sums.
    blocks = ranks if is_narrow_float(values[0].dtype) else 1
    # The barriers keep XLA from fusing the packing of the merged message with the computation
    # around it. It couldn't do that anyway if the step is cut into segments, so without barriers,
    # the last bits of the results would depend on whether the step is cut.
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
        # Only convert plain tuples and lists, hence the exact type check. A loop's parameters also
        # include named tuples, which can't be constructed from an iterator and don't contain any
        # jaxprs.
        if type(value) in (tuple, list):
            return type(value)(convert(v) for v in value)
        return function(value) if compat.is_closed_jaxpr(value) else value

    return {name: convert(value) for name, value in params.items()}
