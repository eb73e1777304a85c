"""What is cheap: equations light enough to run between two exchanges, and values cheaper to make twice than to keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxcross.program.graph import Graph, by_place, nbytes, variables

# Give the same bits wherever they stand: they move, compare or convert, and compute nothing.
EXACT = frozenset({
    "abs", "and", "argmax", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "eq", "expand_dims", "ge",
    "gt", "iota", "is_finite", "le", "lt", "max", "min", "ne", "neg", "not", "or", "pad", "reduce_precision", "rev",
    "reshape", "select_n", "sign", "slice", "squeeze", "stop_gradient", "transpose", "xor",
})  # fmt: skip
# Elementwise arithmetic: fused with its reader, a multiplication may be contracted into its last bit.
ARITHMETIC = frozenset({"add", "add_any", "div", "integer_pow", "mul", "rsqrt", "sqrt", "square", "sub"})
# May stay between two exchanges, on the host, when few enough bytes are touched.
LIGHT = EXACT | ARITHMETIC | frozenset({
    "bitcast_convert_type", "concatenate", "dynamic_slice", "dynamic_update_slice", "reduce_max", "reduce_min",
    "reduce_or", "reduce_and", "reduce_sum", "rem", "round", "split", "axis_index", "exp", "log",
})  # fmt: skip
_FREE = frozenset({"broadcast_in_dim", "iota"})  # their shapes follow from none of their operands
_RESHAPED = frozenset({
    "argmax", "bitcast_convert_type", "concatenate", "dynamic_slice", "dynamic_update_slice", "expand_dims", "pad",
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "reshape", "slice", "split", "squeeze",
    "transpose",
})  # fmt: skip


def exchanged_arrays(graph: Graph, exchanges: Sequence[int]) -> set[Any]:
    """Returns what these exchanges read and make, scalars apart."""
    return {v for i in exchanges for v in _arrays((*graph.eqns[i].invars, *graph.eqns[i].outvars))}


def sized_by_exchanges(graph: Graph, between: Collection[int], known: set[Any]) -> bool:
    """Whether the shapes in these light equations follow from the exchanges', which are the same on every rank.

    Others may follow from this rank's batch. Elementwise, an operand of a known shape tells those of all others.

    Args:
        graph: Of the step.
        between: The equations.
        known: Arrays whose shapes follow from the exchanges; those of the equations are added to it.
    """
    eqns = [graph.eqns[i] for i in sorted(between)]
    before = -1
    while len(known) != before:
        before = len(known)
        for eqn in eqns:
            gets, makes, name = _arrays(eqn.invars), _arrays(eqn.outvars), eqn.primitive.name
            if name in _RESHAPED:
                known.update(makes if gets <= known else ())
            elif name not in _FREE and not known.isdisjoint(gets | makes):
                known.update(gets, makes)
    return all(_arrays((*eqn.invars, *eqn.outvars)) <= known for eqn in eqns)


def _arrays(atoms: Sequence[Any]) -> set[Any]:
    return {v for v in variables(atoms) if v.aval.shape != ()}


def recompute(graph: Graph, place: Mapping[int, int], *, exact: bool) -> dict[int, set[int]]:
    """Which equations each compute place makes again instead of reading them from an earlier one (cut rule 2).

    A value is made again if that keeps no byte alive that would not be alive anyway. Scalars and moves only where
    `exact`, elementwise arithmetic as well elsewhere.

    Returns:
        Place -> equations that it runs a second time.
    """
    allowed = EXACT if exact else EXACT | ARITHMETIC

    def cheap(i: int) -> bool:
        eqn = graph.eqns[i]
        return eqn.primitive.name in allowed and not eqn.effects and len(eqn.outvars) == 1 and place[i] % 2 == 0

    copies: dict[int, set[int]] = {}
    for here, members in sorted(by_place(place).items()):
        if here % 2:
            continue
        reads = {v for i in members for v in variables(graph.eqns[i].invars)}
        foreign = {v for v in reads if v in graph.maker and place[graph.maker[v]] < here}
        # Kept in any case: what is read here and cannot be made again.
        kept: set[Any] = {v for v in foreign if not cheap(graph.maker[v])}
        mine: set[int] = set()
        for var in sorted(foreign - kept, key=lambda v: graph.maker[v]):
            chain, leaves = _chain(graph, var, cheap, kept)
            extra = sum(nbytes(v) for v in leaves if v in graph.maker and v not in kept)
            if extra == 0 or (extra * 2 <= nbytes(var)):
                mine |= chain
                kept |= {v for v in leaves if v in graph.maker}
            else:
                kept.add(var)
        if mine:
            copies[here] = mine
    return copies


def _chain(graph: Graph, var: Any, cheap: Any, kept: set[Any]) -> tuple[set[int], set[Any]]:
    """The cheap equations behind `var`, back to values that are kept or cannot be made again."""
    chain: set[int] = set()
    leaves: set[Any] = set()
    stack = [var]
    while stack:
        v = stack.pop()
        maker = graph.maker.get(v)
        if maker is None or (v is not var and v in kept) or not cheap(maker):
            leaves.add(v)
        elif maker not in chain:
            chain.add(maker)
            stack.extend(variables(graph.eqns[maker].invars))
    return chain, leaves
