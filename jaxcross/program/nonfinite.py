"""Detection of NaNs and infinities that an exchange made, by the first exchange that made one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross.program.graph import Graph, Group, exchanges_of, variables
from jaxcross.program.ir import Exchange, Program, Segment

# What they make of a value that is not finite is not finite either, `div` of its numerator.
_CARRY = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "div",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "mul",
        "neg",
        "optimization_barrier",
        "pbroadcast",
        "ppermute",
        "psum",
        "psum_invariant",
        "psum_scatter",
        "reduce_precision",
        "reduce_scatter",
        "reshape",
        "slice",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "sub",
        "transpose",
    }
)


def masked_by(graph: Graph, group: Group, body: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Returns exchanged values that may be nonfinite although all outputs of their segment are
    finite.

    Only this segment reads them, by an operation that can hide a NaN, as a norm that gradients are
    divided by.
    """
    exchanged = {
        v
        for i in group.exchanges
        for v in graph.eqns[i].outvars
        if jnp.issubdtype(v.aval.dtype, jnp.inexact)
    }
    if (
        group.as_written
    ):  # what leaves it may be anything that the step computes: only what is exchanged is looked at
        return [v for e in body for v in e.outvars if v in exchanged and v not in outs]
    masked: set[Any] = set()
    leaving = set(outs)
    for e in reversed(body):
        carries = e.primitive.name in _CARRY and all(
            jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in e.outvars
        )
        lost = not masked.isdisjoint(e.outvars) and not exchanges_of(
            e, graph.traced
        )  # else it is looked at itself
        if lost or not carries:
            masked.update(variables(e.invars))
        elif e.primitive.name == "div":
            masked.update(variables(e.invars[1:]))
    return [
        v for e in body for v in e.outvars if v in exchanged and v in masked and v not in leaving
    ]


def nonfinite(program: Program, segment: Segment, results: Sequence[Any]) -> str | None:
    """Describes the first exchange of a collective segment whose results are not all finite. Waits
    for the results.

    Args:
        program: Whose segment it is.
        segment: A collective one.
        results: What it made, on the host.
    """
    bad = [
        place
        for place, value in enumerate(results)
        if not is_finite(value) and (not program.is_unit or _is_exchanged(program, segment, place))
    ]
    if not bad:
        return None
    _, exchange = min(
        (_exchange_behind(program, segment, place) for place in bad), key=lambda found: found[0]
    )
    return f"`{exchange.line()}` at {exchange.source} made values that are not finite"


def is_finite(value: jax.Array | np.ndarray) -> bool:
    """Whether an array holds no infinity and no NaN. One pass over it: a sum is finite only if all
    its terms are.
    """
    if not isinstance(value.dtype, np.dtype):
        return True  # random keys
    array = np.asarray(value)
    if array.dtype.kind == "V":
        array = array.astype(np.float32)  # bfloat16 and narrower, which NumPy cannot sum at speed
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(array)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())  # the sum may have overflowed


def _is_exchanged(program: Program, segment: Segment, place: int) -> bool:
    """Whether a result is what an exchange made, and not computed from it."""
    inner, _ = compat.open_jaxpr(segment.jaxpr)
    result = inner.outvars[place]
    return any(
        result is v and exchanges_of(e, program.traced) for e in inner.eqns for v in e.outvars
    )


def _exchange_behind(program: Program, segment: Segment, place: int) -> tuple[int, Exchange]:
    """Returns the nearest exchange that a result comes from, and the position of its equation."""
    inner, _ = compat.open_jaxpr(segment.jaxpr)
    maker = {v: (at, eqn) for at, eqn in enumerate(inner.eqns) for v in eqn.outvars}
    queue = [inner.outvars[place]]
    for var in queue:  # grows while it is read
        if isinstance(var, compat.Literal) or var not in maker:
            continue
        at, eqn = maker[var]
        found = exchanges_of(eqn, program.traced)
        if found:
            return at, found[min(eqn.outvars.index(var), len(found) - 1)]
        queue += eqn.invars
    return 0, segment.exchanges[0]
