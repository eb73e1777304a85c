"""Finds losses that are divided by a rank-local count and then averaged with equal weights.

With masks or padding, `sum(losses) / sum(mask)` is the mean over one rank's examples. `pmean` of
that loss, or of its gradient, is therefore a mean of means: a rank with few examples weighs as much
as a rank with many.

`means_of_means` makes one forward pass over the flat jaxpr. It tracks which values are counts
(`reduce_sum` of something derived from the arguments by comparisons, casts and the like) and which
values were divided by a count on the way. If such a value reaches a `psum` whose result is divided
by the number of ranks, the line of the division is reported. Multiplying by a count again clears
the suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxcross import _jax_compat as compat
from jaxcross.program.jaxpr_utils import forward
from jaxcross.program.trace import Traced

# Equations that may lie between a batch's mask, labels or lengths and a count.
_COUNTING = frozenset(
    {
        "and",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "eq",
        "ge",
        "gt",
        "le",
        "lt",
        "max",
        "mul",
        "ne",
        "not",
        "or",
        "reduce_sum",
        "reshape",
        "select_n",
        "slice",
        "squeeze",
        "transpose",
    }
)


class _Value(NamedTuple):
    """What the pass has found out about a value.

    Attributes:
        plain: Whether it's computed from the arguments and constants by `_COUNTING` equations only.
        constant: Whether it's computed from constants only.
        counted: Whether it's a scalar that was summed up from an argument, or derived from one.
        divided: Source lines of the divisions by such a count that the value has been through.
    """

    plain: bool = False
    constant: bool = False
    counted: bool = False
    divided: frozenset[str] = frozenset()


_NONE: frozenset[str] = frozenset()
_CONSTANT = _Value(plain=True, constant=True)
_INPUT = _Value(plain=True)


def means_of_means(traced: Traced) -> Iterator[str]:
    """Yields the user's lines that divide a loss by a count before it, or its gradient, is
    averaged.
    """
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    averaged = {id(eqn) for eqn in _averaged(traced)}
    found: dict[str, None] = {}

    def rule(eqn: compat.Equation, operands: Sequence[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        lines = [o.divided for o in operands if o.divided]
        divided = lines[0].union(*lines[1:]) if lines else _NONE
        if traced.wire.recognise(eqn, traced.axes):
            if id(eqn) in averaged:
                found.update(dict.fromkeys(sorted(divided)))
            return [_Value()] * len(eqn.outvars)
        plain = name in _COUNTING and all(o.plain for o in operands)
        counted = plain and any(o.counted for o in operands)
        if plain and name == "reduce_sum":
            counted |= not compat.array_type(eqn.outvars[0]).shape
        # In the backward pass the numerator is a constant: the cotangent starts as the number 1.
        if (
            name == "div"
            and operands[1].counted
            and (operands[0].constant or not operands[0].plain)
        ):
            if not compat.array_type(eqn.outvars[0]).shape:
                divided |= {compat.source_of(eqn)}
        elif name == "mul" and any(o.counted for o in operands):
            divided = _NONE  # the mean is weighted by its count again
        constant = all(o.constant for o in operands)
        return [_Value(plain, constant, counted, divided)] * len(eqn.outvars)

    inputs = [*(_CONSTANT for _ in traced.consts), *(_INPUT for _ in traced.in_avals)]
    forward(inner, inputs, rule, constant=_CONSTANT)
    yield from found


def _averaged(traced: Traced) -> Iterator[compat.Equation]:
    """Yields each `psum` whose result is divided by the number of ranks, as `pmean` does."""
    makers: dict[compat.Atom, tuple[compat.Equation, int]] = {}
    for eqn in compat.open_jaxpr(traced.jaxpr)[0].eqns:
        exchanges = traced.wire.recognise(eqn, traced.axes)
        if exchanges and exchanges[0].op == "psum":
            ranks = math.prod(traced.axes[a] for a in exchanges[0].axes)
            makers.update(dict.fromkeys(eqn.outvars, (eqn, ranks)))
        elif eqn.primitive.name == "div" and not isinstance(eqn.invars[0], compat.Literal):
            made, ranks = makers.get(eqn.invars[0], (None, 0))
            if (
                made is not None
                and isinstance(eqn.invars[1], compat.Literal)
                and eqn.invars[1].val == ranks
            ):
                yield made
