"""Finds carried exchanges, which need no result of this step's computation.

Some exchange strategies apply the mean one step late. They keep the operand of the exchange, e.g.
the previous step's gradients, in their state, so the exchange depends only on the step's inputs. It
can then run while this step computes something else.

We call such an exchange *carried* if the step really contains costly work that doesn't need the
result of the exchange (cut rule 8).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.program.graph import Graph, nbytes, variables
from jaxcross.program.op_cost import ARITHMETIC, HOST_OPS, MOST_TOUCHED, is_costly

# The operand of e.g. a slice may be larger than its result. So even if the result has the same size
# on all ranks, the size of the operand may depend on a rank's batch. We mustn't base a decision on
# such a size, because all ranks have to decide the same.
_SHRINKING = frozenset({"argmax", "dynamic_slice", "slice", "split"})


def carried_exchanges(graph: Graph) -> tuple[int, ...]:
    """Returns the step's carried exchanges, which are identical across ranks.

    They are among the exchanges that don't depend on another exchange.
    """
    # Two kinds of exchanges can't be carried: those in a loop, because the loop computes something
    # as well, and mpi4jax calls, because they must keep their order.
    first = [
        i
        for i in graph.wires
        if graph.level[i] == 0 and i not in graph.opaque and i not in graph.ordered
    ]
    given = {i: graph.ancestors([i], {}) for i in first if _from_inputs(graph, i)}
    costly = [i for i in range(len(graph.eqns)) if _is_work(graph, i)]
    found = _with_other_work(graph, list(given), costly)
    # Whether an exchange is carried may depend on another one. If the host computes a value by
    # arithmetic, everything that reads the value has to run on the host as well (`may_repeat`).
    # When an exchange is rejected, its operand is no longer computed there, so another exchange may
    # have to be rejected, too. We repeat the check until nothing changes.
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
    """Whether the host may compute the operands of these exchanges with these operations.

    The host runs these operations ahead of the exchanges. If other equations read the results as
    well, a compute segment has to repeat the operations for them, and must get the same bits. With
    arithmetic, that isn't certain: XLA may contract an operation with the one that reads its
    result, which rounds differently.

    So an arithmetic operation is only allowed if it doesn't have to be repeated, i.e. if everything
    that reads its result runs on the host as well. `inside` contains these equations.
    """
    names = {graph.eqns[i].primitive.name for i in ops}
    # All ranks must decide the same, even if their batches have different sizes. So we only accept
    # operations on arrays whose sizes follow from the exchanges, and reject those that may read an
    # array of any other size, such as slices and reductions.
    if (
        not names <= HOST_OPS
        or not names.isdisjoint(_SHRINKING)
        or any(name.startswith("reduce_") and name != "reduce_precision" for name in names)
    ):
        return False
    # Too much work on the host would take longer than the exchanges, so it wouldn't be hidden.
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

    These are the costly equations that don't depend on any exchange, together with everything they
    need.

    We also add cheap operations that follow them, as long as they don't increase memory use. For
    example, a gradient often ends with a transpose or a sum over the batch. If such an operation
    ran after the commit, it would have to read the result of a costly equation from memory, in an
    order that doesn't match the result's layout.
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
    """Whether an equation can be added to the work before the commit without more memory.

    The equation may only read results of the work that's already done before the commit, and its
    own results may be no larger than the operands that are freed after it. An operand is freed if
    nothing outside of this work reads it and the step doesn't return it.
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
    # We also accept results that have at most an eighth of the operands' bytes. A typical example
    # is the sum of an array that something else reads, so that the array can't be freed. The sum
    # then takes additional memory, but too little to matter.
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
    """Returns the exchanges for which there's costly work that doesn't need the result.

    A set of exchanges is represented by an integer, with one bit per exchange.
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
