"""Finds carried exchanges, which need no result of this step's computation.

Some exchange strategies apply the mean one step late. They keep the operand of the exchange, e.g.
the previous step's gradients, in their state, so the exchange depends only on the step's inputs. We
call such an exchange *carried* if the step also contains costly work that doesn't need its result,
because that work can then run while the exchange is in flight (cut rule 8).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.program.graph import Graph, nbytes, variables
from jaxcross.program.op_cost import ARITHMETIC, HOST_OPS, MOST_TOUCHED, is_costly

# An operation such as a slice may read an operand that's larger than its result. The operand's size
# can then depend on the batch and differ between ranks, even if the exchanged array has the same
# size everywhere.
_SHRINKING = frozenset({"argmax", "dynamic_slice", "slice", "split"})


def carried_exchanges(graph: Graph) -> tuple[int, ...]:
    """Returns the step's carried exchanges, which are identical across ranks.

    They are among the exchanges that don't depend on another exchange.
    """
    # A loop computes something as well, and mpi4jax calls must keep their order, so neither can be
    # carried.
    first = [
        i
        for i in graph.wires
        if graph.level[i] == 0 and i not in graph.opaque and i not in graph.ordered
    ]
    given = {i: graph.ancestors([i], {}) for i in first if _from_inputs(graph, i)}
    costly = [i for i in range(len(graph.eqns)) if _is_work(graph, i)]
    found = _with_other_work(graph, list(given), costly)
    # If an exchange isn't carried after all, the host doesn't compute its operand either. Another
    # exchange may have relied on this, so we repeat the check until nothing changes.
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

    Other equations may read the results of these operations as well. A compute segment then runs
    the operations a second time for them, and must get the same bits. With arithmetic, that isn't
    certain: XLA may contract an operation with the one that reads its result, which rounds
    differently. So an arithmetic operation is only allowed if everything that reads its result is
    in `inside`.
    """
    names = {graph.eqns[i].primitive.name for i in ops}
    # All ranks must decide the same, even if their batches have different sizes. So we reject
    # operations that may read an array of any size, such as slices and reductions. All other arrays
    # have sizes that follow from the exchanges.
    if (
        not names <= HOST_OPS
        or not names.isdisjoint(_SHRINKING)
        or any(name.startswith("reduce_") and name != "reduce_precision" for name in names)
    ):
        return False
    # Too much work on the host would take longer than the exchanges can hide.
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
    need. We add cheap operations at the end of this work, as long as they don't increase memory
    use: a gradient often ends with e.g. a transpose or a sum over the batch. If such an operation
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
    """Whether an equation reads only results of this work and doesn't increase memory use.

    If we add an equation to the work that overlaps with carried exchanges, its results may be no
    larger than the operands that it frees. An operand is freed if nothing outside of this work
    reads it and the step doesn't return it.
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
    # A result is also accepted if it has at most an eighth of the operands' bytes. For example,
    # something else may read the operand of a sum, so that it can't be freed. But the sum is so
    # small that this hardly matters.
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
    """Returns the exchanges for which some costly equation doesn't need the result.

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
