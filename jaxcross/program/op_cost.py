"""Costs of operations: which may run on the host, and which are worth recomputing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import Var
from jaxcross.program.graph import Graph, by_place, nbytes, variables

# Bitwise identical wherever they're compiled, because they only move, compare or convert values.
EXACT = frozenset(
    {
        "abs",
        "and",
        "argmax",
        "broadcast_in_dim",
        "clamp",
        "convert_element_type",
        "copy",
        "eq",
        "expand_dims",
        "ge",
        "gt",
        "iota",
        "is_finite",
        "le",
        "lt",
        "max",
        "min",
        "ne",
        "neg",
        "not",
        "or",
        "pad",
        "reduce_precision",
        "rev",
        "reshape",
        "select_n",
        "sign",
        "slice",
        "squeeze",
        "stop_gradient",
        "transpose",
        "xor",
    }
)
# Elementwise arithmetic, whose results may depend on where it's compiled. If XLA fuses a
# multiplication with an operation that reads its result, e.g. an addition, it may contract the two
# into a single operation, which can change the last bit.
ARITHMETIC = frozenset(
    {"add", "add_any", "div", "integer_pow", "mul", "rsqrt", "sqrt", "square", "sub"}
)
# May stay on the host between two exchanges, as long as they touch few enough bytes.
HOST_OPS = frozenset(
    {
        *EXACT,
        *ARITHMETIC,
        "axis_index",
        "bitcast_convert_type",
        "concatenate",
        "dynamic_slice",
        "dynamic_update_slice",
        "exp",
        "log",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_sum",
        "rem",
        "round",
        "split",
    }
)
MOST_TOUCHED = 8
"""How many bytes host operations may touch per exchanged byte.

Beyond that, they would take longer than we can hide.
"""
# Slow enough to hide an exchange. Everything else is just a pass over memory.
_COSTLY = frozenset(
    {
        "cholesky",
        "conv_general_dilated",
        "custom_linear_solve",
        "dot_general",
        "eig",
        "eigh",
        "fft",
        "lu",
        "qr",
        "scan",
        "sort",
        "svd",
        "triangular_solve",
        "while",
    }
)
FREE = frozenset({"broadcast_in_dim", "iota"})  # their shapes don't follow from their operands
RESHAPED = frozenset(
    {
        "argmax",
        "bitcast_convert_type",
        "concatenate",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "pad",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_sum",
        "reshape",
        "slice",
        "split",
        "squeeze",
        "transpose",
    }
)


def is_costly(eqn: compat.Equation) -> bool:
    """Whether an equation, or any equation inside it, does more than pass over memory."""
    name = eqn.primitive.name
    return (
        name in _COSTLY
        or any(not compat.is_named_axis_effect(e) for e in eqn.effects)
        or "callback" in name
        or any(is_costly(e) for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns)
    )


def exchanged_arrays(graph: Graph, exchanges: Sequence[int]) -> set[Any]:
    """Returns the arrays that these exchanges read or produce, leaving out scalars."""
    return {v for i in exchanges for v in _arrays((*graph.eqns[i].invars, *graph.eqns[i].outvars))}


def sized_by_exchanges(graph: Graph, between: Collection[int], known: set[Any]) -> bool:
    """Whether all shapes in these equations follow from the shapes of exchanged arrays.

    Some decisions must come out the same on all ranks, so they may only depend on shapes that are
    the same as well. That's true of exchanged arrays, whereas other shapes may depend on the rank's
    batch. We start from the exchanged arrays and work our way from array to array: in an
    elementwise equation, for example, a single known shape determines all others.

    Args:
        graph: The step's graph.
        between: Indices of the equations.
        known: Arrays whose shapes follow from the exchanges. This function adds those arrays in the
            equations for which that's true as well.
    """
    eqns = [graph.eqns[i] for i in sorted(between)]
    before = -1
    while len(known) != before:
        before = len(known)
        for eqn in eqns:
            gets = _arrays(eqn.invars)
            makes = _arrays(eqn.outvars)
            name = eqn.primitive.name
            if name in RESHAPED:
                known.update(makes if gets <= known else ())
            elif name not in FREE and not known.isdisjoint(gets | makes):
                known.update(gets, makes)
    return all(_arrays((*eqn.invars, *eqn.outvars)) <= known for eqn in eqns)


def _arrays(atoms: Sequence[Any]) -> set[Any]:
    return {v for v in variables(atoms) if v.aval.shape != ()}


def recompute(graph: Graph, place: Mapping[int, int], *, exact: bool) -> dict[int, set[int]]:
    """Chooses equations that a compute position runs again to save memory (cut rule 2).

    A value that's read by a later segment has to stay in memory until then. If that segment
    recomputes it instead, the inputs of the computation have to stay. So recomputing pays off if
    these are kept anyway, or if those that aren't take up at most half as many bytes as the value
    itself.

    With `exact`, we only recompute operations that give the same bits wherever they run; otherwise,
    elementwise arithmetic as well.

    Returns:
        Position -> equations it runs a second time.
    """
    allowed = EXACT if exact else EXACT | ARITHMETIC

    def recomputable(i: int) -> bool:
        eqn = graph.eqns[i]
        return (
            eqn.primitive.name in allowed
            and not eqn.effects
            and len(eqn.outvars) == 1
            and place[i] % 2 == 0
        )

    copies: dict[int, set[int]] = {}
    for here, members in sorted(by_place(place).items()):
        if here % 2:
            continue
        reads = {v for i in members for v in variables(graph.eqns[i].invars)}
        foreign = {v for v in reads if v in graph.maker and place[graph.maker[v]] < here}
        # Whatever is read here and can't be recomputed is kept anyway.
        kept: set[Any] = {v for v in foreign if not recomputable(graph.maker[v])}
        mine: set[int] = set()
        # Recomputing a value may mean keeping more inputs in memory, which in turn makes other
        # values cheaper to recompute. So the result depends on the order in which we consider the
        # values; we go by the order of their equations.
        for var in sorted(foreign - kept, key=lambda v: graph.maker[v]):
            chain, leaves = _chain(graph, var, recomputable, kept)
            extra = sum(nbytes(v) for v in leaves if v in graph.maker and v not in kept)
            if extra == 0 or (extra * 2 <= nbytes(var)):
                mine |= chain
                kept |= {v for v in leaves if v in graph.maker}
            else:
                kept.add(var)
        if mine:
            copies[here] = mine
    return copies


def _chain(
    graph: Graph, var: Var, recomputable: Callable[[int], bool], kept: set[Any]
) -> tuple[set[int], set[Any]]:
    """Returns the recomputable equations leading to `var`, and the values they start from."""
    chain: set[int] = set()
    leaves: set[Any] = set()
    stack = [var]
    while stack:
        v = stack.pop()
        maker = graph.maker.get(v)
        if maker is None or (v is not var and v in kept) or not recomputable(maker):
            leaves.add(v)
        elif maker not in chain:
            chain.add(maker)
            stack.extend(variables(graph.eqns[maker].invars))
    return chain, leaves
