"""Turns a jaxpr with exchanges into one with messages.

We evaluate the jaxpr equation by equation under a new trace. Most equations are bound again as they
are. For an exchange, we call the matching function of `mpi_collectives`, which adds the messages to
the trace, either as mpi4jax calls or as equations that the host carries out. A loop or a
conditional that contains exchanges is bound again with a body that we've retraced in the same way.
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

# Takes axes and groups, and returns the channel for exchanges over them.
Connect = Callable[[Sequence[str], Any], Channel]

_LOOPS = ("scan", "while", "cond")


def lower(
    jaxpr: compat.Jaxpr,
    mesh: RankGrid,
    connect: Connect,
    comms: Mapping[CommKey, Any] | None = None,
) -> Any:
    """Returns a closed jaxpr in which every exchange has been replaced by one or several messages.

    The jaxpr's arguments and results stay the same. The messages are sent in the order of the
    equations, with one exception: several sums may be joined into a single message if there's no
    other exchange between them. This message takes the place of the last of these sums.

    Ranks that exchange with one another form a group, and need an MPI communicator. If a group has
    none yet, this function creates it, and waits for the group's other members, which must lower
    the same jaxpr.

    The user's own mpi4jax calls already have communicators. `comms` maps these to replacements. A
    call whose communicator isn't in `comms` stays as it is.
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
        # JAX may have given the original result a weak type, which ours doesn't have. The equations
        # that read the result were traced with the weak type, but that makes no difference to them,
        # because the element type is the same.
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
    # A sum of 8- or 16-bit floats is sent as one block per rank, so its length must be a multiple
    # of the number of ranks. If it were sent separately, each value would be padded to such a
    # multiple. We pad each value of a joint message as well, so that the message takes exactly as
    # many bytes as `wire_bytes` predicts for the separate sums.
    blocks = ranks if is_narrow_float(values[0].dtype) else 1
    # Without these barriers, XLA could fuse the packing of the joint message with the computation
    # before and after it. It can't do so if the step is cut into segments, so the last bits of the
    # results would depend on whether the step is cut. With the barriers, they don't.
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
        # We only convert plain tuples and lists, which is why we compare the exact type. A loop's
        # parameters also include named tuples. These can't be constructed from an iterator, and
        # contain no jaxprs, so we leave them alone.
        if type(value) in (tuple, list):
            return type(value)(convert(v) for v in value)
        return function(value) if compat.is_closed_jaxpr(value) else value

    return {name: convert(value) for name, value in params.items()}
