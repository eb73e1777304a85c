"""Finds gradients that are exchanged once per micro-batch, although one exchange would do.

A forward pass over the flat jaxpr tracks which values are sums of exchange results, up to constant
factors. If the results of one source line are only ever added up, adding first and exchanging the
sum gives the same total, to rounding.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from jaxcross import _jax_compat as compat
from jaxcross.program.jaxpr_utils import forward
from jaxcross.program.trace import Traced

_KEEPS = frozenset({"convert_element_type", "copy", "neg", "reshape", "squeeze", "transpose"})
_ADDS = frozenset({"add", "add_any", "sub"})


class RepeatedSum(NamedTuple):
    """Exchanges of one source line whose results are only added up.

    Attributes:
        source: The user's line.
        times: How often each array is exchanged.
        nbytes: Bytes that exchanging every array once hands to the wire.
    """

    source: str
    times: int
    nbytes: int


class _Value(NamedTuple):
    """What the pass has found out about a value. Exchanges are numbered in their order.

    Attributes:
        terms: The sums over ranks that the value is a sum of, up to constant factors.
        needs: All exchanges that it depends on, as a bit set.
    """

    terms: frozenset[int] = frozenset()
    needs: int = 0


def repeated_sums(traced: Traced) -> list[RepeatedSum]:
    """Returns the lines that exchange a gradient more than once per step and add up the results.

    A sum of exchange results counts under three conditions:

    - None of its terms depends on another term. If each micro-batch updates the parameters, they
      do.
    - No term is also used separately, e.g. to compute the gradients' noise scale.
    - It has the shape of an argument that the step returns, as gradients have.

    A line is returned only if it accounts for most of the bytes that the step sends.
    """
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    lines: list[str] = []
    sizes: list[int] = []
    needs: list[int] = []
    alone: set[int] = set()  # exchanges whose result isn't only used in a sum
    sums: dict[
        str, dict[int, frozenset[int]]
    ] = {}  # line -> (a sum's first exchange -> all its terms)
    state = {v.aval.shape for v in inner.outvars} & {a.shape for a in traced.in_avals}

    def rule(eqn: compat.Equation, operands: Sequence[_Value]) -> list[_Value]:
        needed = functools.reduce(operator.or_, (o.needs for o in operands), 0)
        exchanges = traced.wire.recognise(eqn, traced.axes)
        if exchanges and len(exchanges) == len(eqn.outvars) == len(operands):
            made = []
            for x, operand in zip(exchanges, operands, strict=True):
                number = len(lines)
                lines.append(compat.source_of(eqn))
                sizes.append(x.nbytes)
                needs.append(operand.needs)
                made.append(
                    _Value(
                        frozenset({number} if x.op == "psum" else ()), operand.needs | 1 << number
                    )
                )
            return made
        terms = _terms(eqn, operands)
        if not terms:
            alone.update(*(o.terms for o in operands if len(o.terms) == 1))
        if (
            len(operands) == 2
            and all(o.terms for o in operands)
            and compat.array_type(eqn.outvars[0]).shape in state
        ):
            bits = sum(1 << n for n in terms)
            if len({lines[n] for n in terms}) == 1 and not any(needs[n] & bits for n in terms):
                mine = sums.setdefault(lines[min(terms)], {})
                mine[min(terms)] = terms | mine.get(min(terms), frozenset())
        return [_Value(terms, needed)] * len(eqn.outvars)

    results = forward(
        inner, [_Value()] * (len(traced.consts) + len(traced.in_avals)), rule, constant=_Value()
    )
    alone.update(*(r.terms for r in results if len(r.terms) == 1))
    found = []
    for line, every in sums.items():
        groups = {n: group for n, group in every.items() if not group & alone}
        if not groups:
            continue
        times = max(map(len, groups.values()))
        once = sum(sizes[n] for n in groups)
        if times > 1 and 2 * sum(sizes[n] for group in groups.values() for n in group) > sum(sizes):
            found.append(RepeatedSum(line, times, once))
    return found


def _terms(eqn: compat.Equation, operands: Sequence[_Value]) -> frozenset[int]:
    name = eqn.primitive.name
    if name in _ADDS:
        return operands[0].terms | operands[1].terms
    if name in _KEEPS:
        return operands[0].terms
    if name == "div":
        return operands[0].terms if _is_literal(eqn.invars[1]) else frozenset()
    if name == "mul":
        return next(
            (
                o.terms
                for o, a in zip(operands, reversed(eqn.invars), strict=True)
                if _is_literal(a)
            ),
            frozenset(),
        )
    return frozenset()


def _is_literal(atom: compat.Atom) -> bool:
    return isinstance(atom, compat.Literal)
