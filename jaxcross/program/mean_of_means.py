"""Finds losses that each rank divides by a count of its own, and that are then averaged with equal weights.

With masks or padding, `sum(losses) / sum(mask)` is the mean over one rank's examples, and `pmean` of it, or of its
gradient, is the mean of the ranks' means: a rank with few examples weighs as much as one with many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxcross import _jax_compat as compat
from jaxcross.program.jaxpr_utils import forward
from jaxcross.program.trace import Traced

# Equations that lead from a batch's mask, labels or lengths to a count.
_COUNTING = frozenset({
    "and", "broadcast_in_dim", "convert_element_type", "copy", "eq", "ge", "gt", "le", "lt", "max", "mul", "ne", "not",
    "or", "reduce_sum", "reshape", "select_n", "slice", "squeeze", "transpose",
})  # fmt: skip


class _Value(NamedTuple):
    """What is known of a value.

    Attributes:
        plain: Whether it comes from the arguments by `_COUNTING` alone.
        constant: Whether it comes from constants alone.
        counted: Whether it is a number that is summed up from an argument.
        divided: Lines that divide by such a count, on the way to the value.
    """

    plain: bool = False
    constant: bool = False
    counted: bool = False
    divided: frozenset[str] = frozenset()


_CONSTANT, _INPUT = _Value(plain=True, constant=True), _Value(plain=True)


def means_of_means(traced: Traced) -> Iterator[str]:
    """Yields the user's lines that divide a loss by a count, if the loss or its gradient is averaged by `pmean`."""
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    averaged = set(_averaged(traced))
    found: dict[str, None] = {}

    def rule(eqn: compat.Equation, operands: Sequence[_Value]) -> list[_Value]:
        if eqn in averaged:
            found.update(dict.fromkeys(sorted(line for o in operands for line in o.divided)))
        if any(traced.wire.recognise(eqn, traced.axes) or ()):
            return [_Value()] * len(eqn.outvars)
        divided = frozenset(line for o in operands for line in o.divided)
        plain = eqn.primitive.name in _COUNTING and all(o.plain for o in operands)
        counted = plain and any(o.counted for o in operands)
        shape = compat.array_type(eqn.outvars[0]).shape if eqn.outvars else ()
        counted |= plain and eqn.primitive.name == "reduce_sum" and not shape
        # A gradient is divided in the backward pass, which begins with the number 1.
        divides = eqn.primitive.name == "div" and operands[1].counted and not shape
        if divides and (operands[0].constant or not operands[0].plain):
            divided |= {compat.source_of(eqn)}
        if eqn.primitive.name == "mul" and any(o.counted for o in operands):
            divided = frozenset()  # weighed by the count again
        constant = all(o.constant for o in operands)
        return [_Value(plain, constant, counted, divided)] * len(eqn.outvars)

    inputs = [*(_CONSTANT for _ in traced.consts), *(_INPUT for _ in traced.in_avals)]
    forward(inner, inputs, rule, constant=_CONSTANT)
    yield from found


def _averaged(traced: Traced) -> Iterator[compat.Equation]:
    """Yields the sums over ranks whose result is divided by the number of ranks, as that of `pmean`."""
    makers = {v: eqn for eqn in compat.open_jaxpr(traced.jaxpr)[0].eqns for v in eqn.outvars}
    for eqn in compat.open_jaxpr(traced.jaxpr)[0].eqns:
        made = makers.get(eqn.invars[0]) if eqn.primitive.name == "div" and _is_var(eqn.invars[0]) else None
        exchanges = () if made is None else traced.wire.recognise(made, traced.axes) or ()
        if made is not None and any(x.op == "psum" for x in exchanges):
            ranks = math.prod(traced.axes[a] for a in exchanges[0].axes)
            if isinstance(eqn.invars[1], compat.Literal) and eqn.invars[1].val == ranks:
                yield made


def _is_var(atom: compat.Atom) -> bool:
    return not isinstance(atom, compat.Literal)
