"""Finds carried exchanges, which don't need anything that this step computes.

Some exchange strategies apply the mean one step late: they stash the operand (e.g. the previous
step's gradients) in their state, so the exchange depends on nothing but the step's inputs and can
run while the step computes something else.

We call such an exchange *carried* if the step also contains some costly work that doesn't need its
result (cut rule 8).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.program.graph import Graph, nbytes, variables
from jaxcross.program.op_cost import ARITHMETIC, HOST_OPS, MOST_TOUCHED, is_costly

# A slice, for example, can be smaller than its operand. So even if the result has the same size on
# all ranks, the operand's size might depend on a rank's batch. We can't base any decision on it,
# because all ranks must decide alike.
_SHRINKING = frozenset({"argmax", "dynamic_slice", "slice", "split"})


def carried_exchanges(graph: Graph) -> tuple[int, ...]:
    """Returns the step's carried exchanges, which are identical across ranks.

    None of them depends on another exchange.
    """
    # Exchanges inside loops can't be carried, because the loop does some computing as well. Neither
    # can mpi4jax calls, because they have to stay in order.
    first = [
        i
        for i in graph.wires
        if graph.level[i] == 0 and i not in graph.opaque and i not in graph.ordered
    ]
    given = {i: graph.ancestors([i], {}) for i in first if _from_inputs(graph, i)}
    costly = [i for i in range(len(graph.eqns)) if _is_work(graph, i)]
    found = _with_other_work(graph, list(given), costly)
    # If the host computes a value by arithmetic, everything that reads the value has to run on the
    # host, too (`may_repeat`). Rejecting an exchange means that its operand is no longer computed
    # on the host, which can rule out other exchanges in turn. Repeat until nothing changes.
    while found:
        inside = {*found, *(n for i in found for n in given[i])}
        kept = [i for i in found if may_repeat(graph, given[i], [i], inside)]
        if len(kept) == len(found):
            break
        found = kept
    return tuple(found)


def host_ops_before(graph: Graph, exchanges: Sequence[int]) -> frozenset[int]:
    """Returns the host operations that compute carried exchanges' operands from the inputs."""
    return frozenset(graph.ancestors(exchanges, {}))


def may_repeat(
    graph: Graph, ops: Collection[int], exchanges: Sequence[int], inside: Collection[int]
) -> bool:
    """Whether the host may run these operations to compute the operands of these exchanges.

    The host runs the operations ahead of the exchanges. If other equations read the results as
    well, a compute segment has to repeat the operations and get exactly the same bits. Arithmetic
    doesn't guarantee that: XLA may contract an operation with its reader, which changes the
    rounding.

    So arithmetic is only allowed if it doesn't have to be repeated, i.e. if everything that reads
    its result runs on the host as well (and is in `inside`).
    """
    names = {graph.eqns[i].primitive.name for i in ops}
    # All ranks must come to the same decision, even if their batches differ in size. So we reject
    # operations such as slices and reductions, which can read arrays whose sizes don't follow from
    # the exchanges.
    if (
        not names <= HOST_OPS
        or not names.isdisjoint(_SHRINKING)
        or any(name.startswith("reduce_") and name != "reduce_precision" for name in names)
    ):
        return False
    # Too much work would keep the host busy for longer than the exchanges take, so it wouldn't be
    # hidden.
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

    These are the costly equations that don't depend on any exchange, along with everything they
    need.

    Cheap operations that follow are included as well, as long as they don't increase memory use.
    For example, computing a gradient often ends with a transpose or a sum over the batch. After the
    commit, such an operation would have to read the costly equation's result back from memory, in
    an order that doesn't match its layout.
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
    """Whether an equation can join the work before the commit without using more memory.

    The equation may only read results of that work, and its own results mustn't be larger than the
    operands that it allows us to free. An operand can be freed if the step doesn't return it and
    nothing outside of that work reads it.
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
    # Also accept results of at most an eighth of the operands' size, even if no operand can be
    # freed. A typical example is summing an array that's still needed elsewhere: the sum takes up
    # additional memory, but too little to matter.
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
    """Returns the exchanges for which there's costly work that doesn't depend on the result.

    Sets of exchanges are represented as integers with one bit per exchange.
    """
    bit = {i: 1 << n for n, i in enumerate(exchanges)}
    waits: list[int] = []
    # For each equation, collect the exchanges that it depends on.
    for i in range(len(graph.eqns)):
        before = bit.get(i, 0)
        for p in graph.makers(i):
            before |= waits[p]
        waits.append(before)
    free = 0
    for i in costly:
        free |= ~waits[i]
    return [i for i in exchanges if free & bit[i]]
