"""Finds *carried* exchanges: they need no computation of this step, so they can overlap with it.

A strategy that applies the mean one step late keeps the operand of the exchange in its state. The
exchange then depends on the step's inputs alone. It's *carried* if the step also has costly work
that doesn't wait for it (cut rule 8): that work can run while the exchange is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.program.graph import Graph, nbytes, variables
from jaxcross.program.op_cost import ARITHMETIC, HOST_OPS, MOST_TOUCHED, is_costly

# The operands of these may be larger than their results, and may differ in size between ranks,
# because they can depend on the batch.
_SHRINKING = frozenset({"argmax", "dynamic_slice", "slice", "split"})


def carried_exchanges(graph: Graph) -> tuple[int, ...]:
    """Returns the carried exchanges, among those that need no other. Identical across ranks."""
    first = [
        i
        for i in graph.wires
        if graph.level[i] == 0 and i not in graph.opaque and i not in graph.ordered
    ]
    given = {i: graph.ancestors([i], {}) for i in first if _from_inputs(graph, i)}
    costly = [i for i in range(len(graph.eqns)) if _is_work(graph, i)]
    found = _with_other_work(graph, list(given), costly)
    while found:
        inside = {*found, *(n for i in found for n in given[i])}
        kept = [i for i in found if may_repeat(graph, given[i], [i], inside)]
        if len(kept) == len(found):
            break
        found = kept
    return tuple(found)


def host_ops_before(graph: Graph, exchanges: Sequence[int]) -> frozenset[int]:
    """Returns the operations from the step's inputs to carried exchanges; the host runs them."""
    return frozenset(graph.ancestors(exchanges, {}))


def may_repeat(
    graph: Graph, ops: Collection[int], exchanges: Sequence[int], inside: Collection[int]
) -> bool:
    """Whether the host may run these operations for these exchanges.

    Other readers of the results have them computed a second time, elsewhere. That must give the
    same bits, but arithmetic may be contracted with its reader and then rounds differently.
    Therefore all readers of arithmetic must be in `inside`.
    """
    names = {graph.eqns[i].primitive.name for i in ops}
    # All ranks must reach the same decision, so no array may count whose size doesn't follow from
    # the shapes of the exchanges.
    if (
        not names <= HOST_OPS
        or not names.isdisjoint(_SHRINKING)
        or any(name.startswith("reduce_") and name != "reduce_precision" for name in names)
    ):
        return False
    moved = sum(x.nbytes for i in exchanges for x in graph.wires[i])
    if sum(nbytes(v) for i in ops for v in graph.eqns[i].outvars) > MOST_TOUCHED * moved:
        return False
    arithmetic = [i for i in ops if graph.eqns[i].primitive.name in ARITHMETIC]
    return all(
        r in inside
        for i in arithmetic
        for v in graph.eqns[i].outvars
        for r in graph.readers.get(v, ())
    )


def work_before_commit(graph: Graph) -> set[int]:
    """Returns the equations to compute before the commit, while carried exchanges are in flight.

    These are the costly equations that no exchange delays, everything they need, and the cheap
    operations that finish this work without adding bytes. The last operations of a gradient are
    cheap, e.g. a transpose or a sum over the batch. After the commit they would have to read the
    results of the costly equations from memory, in an order that differs from their layout there.
    """
    costly = [i for i in range(len(graph.eqns)) if graph.level[i] == 0 and _is_work(graph, i)]
    inside = {*costly, *graph.ancestors(costly, {})}
    returned = {*variables(compat.open_jaxpr(graph.traced.jaxpr)[0].outvars)}
    rest = [i for i in range(len(graph.eqns)) if i not in inside and _may_end_work(graph, i)]
    before = -1
    while len(inside) != before:
        before = len(inside)
        for i in rest:
            if i not in inside and _keeps_bytes(graph, i, inside, returned):
                inside.add(i)
    return inside


def _may_end_work(graph: Graph, i: int) -> bool:
    return (
        graph.level[i] == 0
        and i not in graph.wires
        and i not in graph.opaque
        and not graph.eqns[i].effects
    )


def _keeps_bytes(graph: Graph, i: int, inside: Collection[int], returned: Collection[Any]) -> bool:
    """Whether an equation reads this work's results only, and makes no more bytes than it frees.

    An operand is freed if this equation is the last to read it.
    """
    eqn = graph.eqns[i]
    operands = variables(eqn.invars)
    if not operands or any(graph.maker.get(v) not in inside for v in operands):
        return False
    made = sum(map(nbytes, eqn.outvars))
    freed = sum(
        nbytes(v)
        for v in operands
        if v not in returned and all(r in inside or r == i for r in graph.readers[v])
    )
    # The second condition accepts e.g. a sum: it's small, even if its operand has other readers.
    return made <= freed or 8 * made <= sum(map(nbytes, operands))


def _from_inputs(graph: Graph, exchange: int) -> bool:
    return all(
        graph.eqns[i].primitive.name in HOST_OPS and not graph.eqns[i].effects
        for i in graph.ancestors([exchange], {})
    )


def _is_work(graph: Graph, i: int) -> bool:
    eqn = graph.eqns[i]
    return (
        i not in graph.wires
        and is_costly(eqn)
        and all(map(compat.is_named_axis_effect, eqn.effects))
    )


def _with_other_work(graph: Graph, exchanges: Sequence[int], costly: Collection[int]) -> list[int]:
    """Returns the exchanges that at least one costly equation doesn't wait for.

    Sets of exchanges are represented as bits of an integer.
    """
    bit = {i: 1 << n for n, i in enumerate(exchanges)}
    waits: list[int] = []
    for i in range(len(graph.eqns)):
        before = bit.get(i, 0)
        for p in graph.makers(i):
            before |= waits[p]
        waits.append(before)
    free = 0
    for i in costly:
        free |= ~waits[i]
    return [i for i in exchanges if free & bit[i]]
