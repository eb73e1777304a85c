"""Finds exchanges that are legal but probably mistakes. `step/advice` writes the warnings.

`means_of_means` finds losses that are divided by a rank-local count and then averaged with equal
weights. With masks or padding, `sum(losses) / sum(mask)` is the mean over one rank's examples.
Calling `pmean` on that loss or its gradient gives a mean of means, in which a rank with few
examples carries as much weight as a rank with many.

To find such losses, we make a single forward pass over the flat jaxpr, tracking which values are
counts (a `reduce_sum` of something derived from the arguments by comparisons, casts and the like),
and which values have been divided by a count. If such a value reaches a `psum` whose result is
divided by the number of ranks, we report the line of the division, unless the value has been
multiplied by a count again in between.

`repeated_sums` finds gradients that are exchanged once per micro-batch where a single exchange
would do. A forward pass over the flat jaxpr tracks which values are sums of exchange results, up to
constant factors. If the results of a source line are only ever added up, the step could add first
and exchange the sum instead, for the same total up to rounding.

`repeated_exchanges` finds exchanges made in every mini-step of `optax.MultiSteps`, even though it
only uses the last result.

`own_derivatives` finds optimizers that differentiate the loss themselves without exchanging the
derivatives. For example, `optax.lbfgs` evaluates the loss and its gradient in a line search, and
`optax.contrib.sophia` evaluates the curvature of the loss.

By the rules of `pmap`, the gradient of a loss is rank-local even if the loss is averaged over
ranks, so each rank takes a different step and the replicas drift apart.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Exchange, Wire
from jaxcross.program.jaxpr_utils import forward, holds_exchange, is_shard_map
from jaxcross.program.trace import Traced

# Equations that may come between a batch's mask, labels or lengths and a count.
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


class _CountFacts(NamedTuple):
    """What we know about a value.

    Attributes:
        plain: Whether it's computed from arguments and constants through `_COUNTING` equations
            only.
        constant: Whether it's computed from constants alone.
        counted: Whether it's a scalar that was summed up from an argument, or is derived from such
            a scalar.
        divided: Source lines where the value has been divided by such a count.
    """

    plain: bool = False
    constant: bool = False
    counted: bool = False
    divided: frozenset[str] = frozenset()


_NONE: frozenset[str] = frozenset()
_CONSTANT = _CountFacts(plain=True, constant=True)
_INPUT = _CountFacts(plain=True)


def means_of_means(traced: Traced) -> Iterator[str]:
    """Yields the user's lines that divide a loss by a count.

    A line only counts if the loss or its gradient is averaged over ranks afterwards.
    """
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    averaged = {id(eqn) for eqn in _averaged(traced)}
    found: dict[str, None] = {}

    def rule(eqn: compat.Equation, operands: Sequence[_CountFacts]) -> list[_CountFacts]:
        name = eqn.primitive.name
        lines = [o.divided for o in operands if o.divided]
        divided = lines[0].union(*lines[1:]) if lines else _NONE
        if traced.wire.recognise(eqn, traced.axes):
            if id(eqn) in averaged:
                found.update(dict.fromkeys(sorted(divided)))
            return [_CountFacts()] * len(eqn.outvars)
        plain = name in _COUNTING and all(o.plain for o in operands)
        counted = plain and any(o.counted for o in operands)
        # Summing up e.g. a mask to a scalar gives a count.
        if plain and name == "reduce_sum":
            counted |= not compat.array_type(eqn.outvars[0]).shape
        # In the backward pass, the numerator is a constant, because the loss's cotangent starts out
        # as the number 1.
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
        return [_CountFacts(plain, constant, counted, divided)] * len(eqn.outvars)

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


_KEEPS = frozenset({"convert_element_type", "copy", "neg", "reshape", "squeeze", "transpose"})
_ADDS = frozenset({"add", "add_any", "sub"})


class RepeatedSum(NamedTuple):
    """Exchanges on a single source line whose results are only ever added up.

    Attributes:
        source: The user's line.
        times: How often each array is exchanged.
        nbytes: How many bytes it would take to exchange each array only once.
    """

    source: str
    times: int
    nbytes: int


class _SumFacts(NamedTuple):
    """What we know about a value. Exchanges are numbered in order.

    Attributes:
        terms: The sums over ranks that add up to this value, up to constant factors.
        needs: All exchanges it depends on, as a bit set.
    """

    terms: frozenset[int] = frozenset()
    needs: int = 0


def repeated_sums(traced: Traced) -> list[RepeatedSum]:
    """Returns the lines that exchange a gradient more than once per step and add up the results.

    A sum of exchange results only counts if

    - no term depends on another term. This rules out loops in which each micro-batch already
      updates the parameters, which makes every gradient depend on the previous gradient;
    - no term is used on its own as well, e.g. to compute the gradients' noise scale;
    - the sum has the shape of an argument that the step returns, as gradients do.

    Lines are only returned if they account for most of the bytes that the step exchanges.
    """
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    lines: list[str] = []
    sizes: list[int] = []
    needs: list[int] = []
    outside_sums: set[int] = set()  # exchanges whose result is also used elsewhere
    sums: dict[
        str, dict[int, frozenset[int]]
    ] = {}  # line -> (a sum's first exchange -> all its terms)
    state = {v.aval.shape for v in inner.outvars} & {a.shape for a in traced.in_avals}

    def rule(eqn: compat.Equation, operands: Sequence[_SumFacts]) -> list[_SumFacts]:
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
                    _SumFacts(
                        frozenset({number} if x.op == "psum" else ()), operand.needs | 1 << number
                    )
                )
            return made
        terms = _terms(eqn, operands)
        # An exchange's result is used for something other than a sum, so exchanging just the sum
        # wouldn't be enough.
        if not terms:
            outside_sums.update(*(o.terms for o in operands if len(o.terms) == 1))
        if (
            len(operands) == 2
            and all(o.terms for o in operands)
            and compat.array_type(eqn.outvars[0]).shape in state
        ):
            # All terms must be exchanged on the same line, and none may depend on another.
            bits = sum(1 << n for n in terms)
            if len({lines[n] for n in terms}) == 1 and not any(needs[n] & bits for n in terms):
                mine = sums.setdefault(lines[min(terms)], {})
                mine[min(terms)] = terms | mine.get(min(terms), frozenset())
        return [_SumFacts(terms, needed)] * len(eqn.outvars)

    results = forward(
        inner,
        [_SumFacts()] * (len(traced.consts) + len(traced.in_avals)),
        rule,
        constant=_SumFacts(),
    )
    outside_sums.update(*(r.terms for r in results if len(r.terms) == 1))
    found = []
    for line, every in sums.items():
        groups = {n: group for n, group in every.items() if not group & outside_sums}
        if not groups:
            continue
        times = max(map(len, groups.values()))
        once = sum(sizes[n] for n in groups)
        if times > 1 and 2 * sum(sizes[n] for group in groups.values() for n in group) > sum(sizes):
            found.append(RepeatedSum(line, times, once))
    return found


def _terms(eqn: compat.Equation, operands: Sequence[_SumFacts]) -> frozenset[int]:
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


# In optax, `MultiSteps.update` calls `lax.cond(skip, _skip_update, _do_update, ...)`. The only part
# of the user's step inside the second branch is the optimizer, so any exchange in there belongs to
# the optimizer.
_UPDATE = re.compile(r"optax[/\\]transforms[/\\]_accumulation\.py:.*\(MultiSteps\.update\)$")
_DO_UPDATE = re.compile(r"optax[/\\]transforms[/\\]_accumulation\.py:.*_do_update\)$")
_LIBRARIES = re.compile(r"[/\\](optax|jaxcross[/\\]exchange)[/\\]")


def repeated_exchanges(
    jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire, outer: Sequence[compat.Equation] = ()
) -> Iterator[str]:
    """Yields the user's line of each `optax.MultiSteps` that exchanges in more than one mini-step.

    Args:
        jaxpr: Open or closed, not flat.
        axes: Axis name -> size.
        wire: Recognises exchanges.
        outer: The equations that contain `jaxpr`, outermost first. An inner equation's stack may
            lack the lines that called it, which include the user's.
    """
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        inside = list(compat.sub_jaxprs(eqn))
        path = (*outer, eqn)
        if not (
            eqn.primitive.name == "cond" and any(map(_UPDATE.search, compat.stack_of(eqn)[:1]))
        ):
            for inner in inside:
                yield from repeated_exchanges(inner, axes, wire, path)
        elif any(holds_exchange(j, axes, wire) for j in inside) and not any(
            map(_is_one_step, inside)
        ):
            stack = [line for e in reversed(path) for line in compat.stack_of(e)]
            yield next((line for line in stack if not _LIBRARIES.search(line)), stack[0])


def _is_one_step(branch: compat.Jaxpr) -> bool:
    """Whether a branch of `MultiSteps.update` completes its cycle in every mini-step, i.e. k = 1.

    In that case, `_do_update` compares `mini_step` with the literal 0.
    """
    return any(
        eqn.primitive.name == "eq"
        and any(isinstance(a, compat.Literal) and a.val == 0 for a in eqn.invars)
        and any(_DO_UPDATE.search(line) for line in compat.stack_of(eqn)[:1])
        for eqn in compat.open_jaxpr(branch)[0].eqns
    )


# The derivative is either in the line search's loop or in a branch that's taken on every k-th step.
_OPTIMIZERS = {
    "optax.lbfgs": re.compile(r"optax[/\\]_src[/\\]linesearch\.py:.*zoom_linesearch"),
    "optax.contrib.sophia": re.compile(r"optax[/\\]contrib[/\\]_sophia\.py:.*scale_by_sophia"),
}
_OPTAX = re.compile(r"[/\\]optax[/\\]")


def own_derivatives(
    jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire
) -> Iterator[tuple[str, str]]:
    """Yields optimizers that differentiate the loss but exchange no array, with the user's lines.

    Args:
        jaxpr: Open or closed, not flat.
        axes: Axis name -> size.
        wire: Recognises exchanges.
    """
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if is_shard_map(eqn, axes):
            continue  # with `check_vma=True`, JAX itself inserts the gradient exchanges
        stack = compat.stack_of(eqn) if eqn.primitive.name in ("while", "cond") else []
        name = next(
            (n for n, place in _OPTIMIZERS.items() if any(map(place.search, stack[:1]))), None
        )
        inside = list(compat.sub_jaxprs(eqn))
        if name is None:
            for inner in inside:
                yield from own_derivatives(inner, axes, wire)
        elif not any(holds_exchange(j, axes, wire, only=_moves_array) for j in inside):
            yield name, next((line for line in stack if not _OPTAX.search(line)), stack[0])


def _moves_array(exchange: Exchange) -> bool:
    """Whether an exchange moves more than a single number, such as the loss."""
    return bool(exchange.shape)
