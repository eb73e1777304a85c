"""Decides which work between two exchanges stays on an accelerator's host (cut rule 4).

There's usually some work to do between two exchanges. On the accelerator, it would have to wait for
two transfers and for whatever other jobs have queued up there. On the host, it blocks the thread
that makes the exchanges, so it mustn't take longer than the exchanges themselves. We estimate both
costs from shapes:

- A pass over memory costs as many bytes as it touches. Since XLA fuses elementwise operations with
  their readers, only reductions, dot products, gathers and the operands of exchanges cost anything.
  Matrix products run on the accelerator.
- Arrays that the accelerator would have to transfer just for this work count as well.
- Constants are free: the host gets its own copy of each constant that it reads, just once
  (`stages.compile`).
- The host may touch `MOST_TOUCHED` bytes per exchanged byte. If a host touches 6 GB/s (an
  assumption that no result file backs up), the work is done before the exchanges are on networks of
  up to 6 Gbit/s.
- The first `ROUND_TRIP_BYTES` are free, because even transferring a small array there and back
  takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross.program.graph import Graph, nbytes, variables
from jaxcross.program.op_cost import ARITHMETIC, EXACT, FREE, HOST_OPS, MOST_TOUCHED, RESHAPED

ROUND_TRIP_BYTES = 5_000_000
"""How many bytes a host touches in 0.8 ms, at 6 GB/s.

That's how long it takes an H100 to transfer 1 MB in each direction (gpu_transfers.json).
"""
_SHIFTS = frozenset({"shift_left", "shift_right_arithmetic", "shift_right_logical"})
_PASSES = frozenset(
    {
        "argmax",
        "concatenate",
        "cumsum",
        "dot_general",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_sum",
        "split",
        "stack",
    }
)
_ALLOWED = HOST_OPS | _SHIFTS | _PASSES
# For these operations, the operands' shapes determine the result's shape, but not vice versa.
_FORWARDS = (RESHAPED | _PASSES) - {"stack"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """An equation, possibly from inside a call."""

    name: str
    gets: Sequence[Any]
    makes: Sequence[Any]
    params: dict[str, Any]


@final
class HostWork:
    """Weighs the work between the exchanges of one step.

    Args:
        graph: The graph of the step.
    """

    __slots__ = ("_constant", "_graph")

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._constant = _made_of_constants(graph)

    def costs_less(
        self,
        between: Collection[int],
        exchanges: Sequence[int],
        *,
        inside: Collection[int],
        known: set[Any],
        moved: int,
    ) -> bool:
        """Whether the host gets this work done faster than the accelerator, including transfers.

        Identical across ranks, because it only depends on shapes that follow from the exchanges.

        Args:
            between: The equations that make up the work.
            exchanges: The exchanges that need the work.
            inside: Equations whose results are already on the host.
            known: Arrays whose shapes follow from the exchanges. Any others that we find are added.
            moved: Bytes exchanged right before and after the work.
        """
        eqns = [self._graph.eqns[i] for i in sorted(between)]
        ops = list(_opened(eqns))
        if any(map(_has_effects, eqns)) or any(
            op.name not in _ALLOWED or _reuses(op) for op in ops
        ):
            return False
        # The shape of a gather's result depends on its index. Constant indices are fine, even
        # though they may differ between ranks (`_made_of_constants`).
        known |= {
            v for op in ops if op.name == "gather" for v in variables(op.gets[1:])
        } & self._constant
        if not _sized(ops, known, self._constant):
            return False
        made = {v for op in ops for v in op.makes}
        sent = {v for i in exchanges for v in variables(self._graph.eqns[i].invars)}
        # The accelerator would have to transfer the remaining operands just for this work.
        brought = {v for op in ops for v in variables(op.gets)} - made - self._constant
        brought = {v for v in brought if self._graph.maker.get(v) not in inside}
        # Operands of exchanges have to be written to memory, even if the operation that computes
        # them would otherwise be fused.
        touched = sum(map(_touched, ops)) + sum(map(nbytes, (made & sent) | brought))
        return touched <= max(MOST_TOUCHED * moved, ROUND_TRIP_BYTES)

    def repeated(self, between: Collection[int]) -> frozenset[int]:
        """Returns the operations on nothing but constants whose results this work reads.

        These compute things like indices, masks or the rank's number. We repeat them on the host,
        because otherwise the accelerator would have to transfer their results on every step.
        """
        found: set[int] = set()
        stack = [p for i in between for p in self._graph.makers(i)]
        while stack:
            i = stack.pop()
            if (
                i not in found
                and i not in between
                and not self._constant.isdisjoint(self._graph.eqns[i].outvars)
            ):
                found.add(i)
                stack.extend(self._graph.makers(i))
        return frozenset(found)


def _made_of_constants(graph: Graph) -> set[Any]:
    """Returns the step's constants, and whatever can be computed exactly from them alone.

    Constants may differ between ranks, because a step may derive them from the shape of its batch.
    If such a constant is used as an index between two exchanges, ranks might come to different
    decisions about the work there. They'd notice this, because they compare their exchanges before
    the first step.
    """
    inner, _ = compat.open_jaxpr(graph.traced.jaxpr)
    found = set(inner.invars[: len(graph.traced.consts)])
    for eqn in graph.eqns:
        if (
            found.issuperset(variables(eqn.invars))
            and not _has_effects(eqn)
            and all(map(_exact, _opened([eqn])))
        ):
            found.update(eqn.outvars)
    return found


def _has_effects(eqn: compat.Equation) -> bool:
    return any(not compat.is_named_axis_effect(e) for e in eqn.effects)


def _exact(op: _Op) -> bool:
    whole = all(jnp.issubdtype(v.aval.dtype, np.integer) or v.aval.dtype == bool for v in op.makes)
    return (
        op.name in EXACT
        or op.name == "axis_index"
        or (whole and op.name in ARITHMETIC | _SHIFTS | {"rem"})
    )


def _opened(eqns: Sequence[Any]) -> Iterator[_Op]:
    """Yields equations, replacing each call with the equations inside it."""
    for eqn in eqns:
        name = eqn.primitive.name
        body = next(compat.sub_jaxprs(eqn), None) if name in compat.INLINED else None
        if body is None:
            yield _Op(name=name, gets=eqn.invars, makes=eqn.outvars, params=eqn.params)
            continue
        inner, _ = compat.open_jaxpr(body)
        # Rename the variables inside, because another call may have the same body.
        names = dict(zip(inner.invars, eqn.invars, strict=True))
        for op in _opened(inner.eqns):
            names.update((v, compat.new_var(v.aval)) for v in op.makes)
            yield _Op(
                name=op.name,
                gets=[_renamed(a, names) for a in op.gets],
                makes=[names[v] for v in op.makes],
                params=op.params,
            )
        for made, result in zip(inner.outvars, eqn.outvars, strict=True):
            yield _Op(name="copy", gets=[_renamed(made, names)], makes=[result], params={})


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, compat.Literal) else names.get(atom, atom)


def _sized(ops: Sequence[_Op], known: set[Any], constant: Collection[Any]) -> bool:
    """Whether all shapes except those of constants follow from the shapes in `known`.

    Adds the arrays for which that's the case to `known`.
    """
    arrays = [
        ([a for a in variables(op.gets) if a.aval.shape], [v for v in op.makes if v.aval.shape])
        for op in ops
    ]
    before = -1
    while len(known) != before:
        before = len(known)
        for op, (gets, makes) in zip(ops, arrays, strict=True):
            # If a broadcast enlarges its operand, we can't tell where its result gets its shape
            # from.
            enlarges = op.name in FREE and sum(map(nbytes, makes)) != sum(map(nbytes, gets))
            if op.name in _FORWARDS or (op.name in FREE and not enlarges):
                known.update(makes if known.issuperset(gets) else ())
            elif not enlarges and not known.isdisjoint([*gets, *makes]):
                known.update(gets, makes)
    return all(v in known or v in constant for gets, makes in arrays for v in (*gets, *makes))


def _touched(op: _Op) -> int:
    """Returns the bytes that an operation touches; 0 if it's fused with its reader."""
    if op.name not in _PASSES:
        return 0
    if op.name == "gather":  # reads no more of its operand than it returns
        return 2 * sum(map(nbytes, op.makes)) + sum(map(nbytes, variables(op.gets[1:])))
    return sum(map(nbytes, (*variables(op.gets), *op.makes)))


def _reuses(op: _Op) -> bool:
    """Whether an operation uses its operands' elements more than once, like a matrix product.

    Its bytes don't tell us how expensive such an operation is, because it performs more
    multiplications than its operands have elements.
    """
    if op.name != "dot_general":
        return False
    (contracted, _), _ = op.params["dimension_numbers"]
    length = math.prod(op.gets[0].aval.shape[d] for d in contracted)
    return length * sum(math.prod(v.aval.shape) for v in op.makes) > sum(
        math.prod(a.aval.shape) for a in op.gets
    )
