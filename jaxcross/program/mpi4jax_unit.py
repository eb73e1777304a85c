"""Handles programs that call mpi4jax; all their calls end up in a single segment, the unit.

The calls may differ between ranks: what one rank sends, another receives. If they were spread over
several segments, the ranks couldn't agree on an order for these. So we put all calls, and the work
between them, into one segment, where each rank makes its calls in the order they're written, as
under `jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross.program.graph import Graph, Group
from jaxcross.program.ir import Segment
from jaxcross.program.jaxpr_utils import holds_exchange
from jaxcross.program.mpi4jax_lists import is_call
from jaxcross.program.op_cost import is_costly

if TYPE_CHECKING:
    from jaxcross.program.trace import Traced


def calls_mpi4jax(graph: Graph) -> bool:
    """Whether the step calls mpi4jax."""
    return any(is_call(x) for found in graph.wires.values() for x in found)


def unit_of(graph: Graph) -> Group:
    """Returns all of a step's exchanges, and the equations that lie between any two of them."""
    wires = sorted(graph.wires)
    needed = graph.ancestors(wires, {})
    after = set(wires)
    for i in range(len(graph.eqns)):
        if not after.isdisjoint(graph.makers(i)):
            after.add(i)
    return Group((tuple(wires),), frozenset((needed & after) - set(wires)), as_written=True)


def with_host_ops(graph: Graph, unit: Group, place: Mapping[int, int]) -> Group:
    """Adds the equations before the unit, and those after it, to the unit if they're cheap.

    The unit is the segment that contains all mpi4jax calls. If everything around it is cheap, the
    step becomes a single executable, as under `jit`. Callbacks don't count as cheap, because a rank
    that fails in a callback still has to make its calls. In a step with a commit flag, the
    equations after the unit are never added.
    """
    joined = set(unit.between)
    for here in (0, 2):
        members = [i for i, p in place.items() if p == here]
        late = here == 2 and graph.traced.commit_flag_inputs
        if not late and not any(is_costly(graph.eqns[i]) for i in members):
            joined.update(members)
    return replace(unit, between=frozenset(joined))


def zero_calls(segment: Segment, traced: Traced) -> Callable[[], Sequence[Any]]:
    """Compiles what a failed rank runs instead of its unit: the same calls, but on zeros.

    The peers of a failed rank wait for its calls, so it makes all of them, in the same order. The
    computation in between is skipped, because on zeros, a loop whose end depends on its values
    might never finish. The returned function waits for the peers, and returns zeros in place of the
    segment's results.
    """

    def calls() -> list[Any]:
        _make_calls(segment.jaxpr, traced)
        return []

    jaxpr = jax.make_jaxpr(calls, axis_env=list(traced.axes.items()))()
    host = jax.local_devices(backend="cpu")[0]
    run = traced.wire.lower(jaxpr, dict(traced.axes)).compile(
        [], name="calls", host=host, place=None
    )
    zeros = [jax.lax.full(v.aval.shape, 0, v.aval.dtype) for v in segment.jaxpr.jaxpr.outvars]

    def run_calls() -> list[Any]:
        run()
        return zeros

    return run_calls


def _make_calls(jaxpr: compat.Jaxpr, traced: Traced) -> None:
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        inside = [j for j in compat.sub_jaxprs(eqn) if holds_exchange(j, traced.axes, traced.wire)]
        if traced.wire.recognise(eqn, traced.axes) is not None:
            zeros = [jax.lax.full(a.aval.shape, 0, a.aval.dtype) for a in eqn.invars]
            compat.bind_equation(eqn, zeros, eqn.params)
        elif inside and eqn.primitive.name == "scan":
            _repeat(inside[0], eqn.params["length"], traced)
        else:
            for j in inside:
                _make_calls(j, traced)


def _repeat(body: compat.Jaxpr, length: int, traced: Traced) -> None:
    def iteration(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        _make_calls(body, traced)
        return carry, None

    jax.lax.scan(iteration, jnp.zeros(()), None, length=length)
