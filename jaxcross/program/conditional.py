"""Conditionals that exchange: their predicate where the host can know it, and their split where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError
from jaxcross.program import decision
from jaxcross.program.emitter import Emitter
from jaxcross.program.jaxpr_utils import drop_unread, ends_on_zeros

# Which branch of a `cond` is taken, or None where the host cannot know. Gets the equations of the predicate.
Choose = Callable[["Predicate"], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicate:
    """The index of a `cond` as a function of scalar step inputs alone.

    Attributes:
        inputs: Positions among the step's inputs that it reads.
        jaxpr: Closed; maps those inputs to the branch index.
        branches: How many branches there are.
    """

    inputs: tuple[int, ...]
    jaxpr: compat.Jaxpr
    branches: int


def predicate_of(flat: Emitter, index: Any, branches: int) -> Predicate | None:
    """The backward slice of `index`, if it reads nothing but scalar integers and booleans of the input."""
    makers, positions = flat.makers(), flat.positions
    needed: set[int] = set()
    leaves: set[Any] = set()
    stack = [index]
    while stack:
        atom = stack.pop()
        if isinstance(atom, compat.Literal):
            continue
        integer = any(jnp.issubdtype(atom.aval.dtype, kind) for kind in (jnp.integer, jnp.bool_))
        if atom.aval.shape != () or not integer:
            return None
        if (place := makers.get(atom)) is not None:
            eqn = flat.eqns[place]
            if flat.exchanges(eqn) or any(not compat.is_named_axis_effect(e) for e in eqn.effects):
                return None
            if eqn.primitive.name == "axis_index" or any(_speaks_of_rank(j) for j in compat.sub_jaxprs(eqn)):
                return None
            if place not in needed:
                needed.add(place)
                stack.extend(eqn.invars)
        elif atom in positions:
            leaves.add(atom)
        else:
            return None
    inputs = sorted(leaves, key=positions.__getitem__)
    eqns = [flat.eqns[place] for place in sorted(needed)]
    jaxpr = compat.make_jaxpr_of(inputs, [index], eqns, flat.like)
    return Predicate(inputs=tuple(positions[v] for v in inputs), jaxpr=jaxpr, branches=branches)


def _speaks_of_rank(jaxpr: compat.Jaxpr) -> bool:
    inner, _ = compat.open_jaxpr(jaxpr)
    return any(compat.is_named_axis_effect(e) for e in inner.effects)


def split(flat: Emitter, eqn: compat.Equation, index: Any, operands: list[Any], branches: list[Any]) -> list[Any]:
    """`cond(p, pre; X; post | other)` -> `cond(p, pre | zeros)`, X, `cond(p, post | other)`, repeated.

    X are all exchanges that need no other one of the branch. They are always made, with zeros where the branch is not
    taken, so that ranks cannot disagree about who takes part. Only the branch taken contributes to the result. Next to
    them, ranks count who takes it. Follows cut rule 5.
    """
    counts = decision.count(flat, eqn, index, [eqns for _, eqns, _ in branches])
    read = {a for _, eqns, outs in branches for a in (*(a for e in eqns for a in e.invars), *outs)
            if not isinstance(a, compat.Literal)}  # fmt: skip
    consts = [v for v in flat.consts if v in read]
    shared = [*operands, *consts]
    work = [([*invars, *consts], eqns, outs) for invars, eqns, outs in branches]
    while True:
        which = next((i for i, (_, eqns, _) in enumerate(work) if any(map(flat.exchanges, eqns))), None)
        if which is None:
            return _emit(flat, eqn, index, shared, [_close(flat, *branch) for branch in work])
        invars, eqns, outs = work[which]
        pre, exchanges, post = _part(flat, eqns)
        for exchange in exchanges:
            _check_exchange(flat, exchange)
        sent = [a for e in exchanges for a in e.invars if not isinstance(a, compat.Literal)]
        later = {a for e in post for a in e.invars if not isinstance(a, compat.Literal)}
        later |= {a for a in outs if not isinstance(a, compat.Literal)}
        residuals = [v for v in dict.fromkeys(v for e in pre for v in e.outvars) if v in later]
        handed = [*sent, *residuals]
        first = [
            _close(flat, invars, pre, handed) if i == which else _close(flat, ivs, [], handed, zeros=True)
            for i, (ivs, _, _) in enumerate(work)
        ]
        values = _emit(flat, eqn, index, shared, first)
        packed = iter(values)
        made = [v for e in exchanges for v in e.outvars]
        received = [compat.new_var(v.aval) for v in made]
        flat.rename(made, received)
        names = dict(zip(made, received, strict=True))
        for exchange in exchanges:
            new = [names[v] for v in exchange.outvars]
            for group in decision.groups_of(flat, exchange):
                for v in new:
                    flat.counters.setdefault(v, set()).add(counts[group])
            args = [a if isinstance(a, compat.Literal) else next(packed) for a in exchange.invars]
            flat.eqns.append(exchange.replace(invars=args, outvars=new))
        flat.present.update(a for a, v in zip(values, sent, strict=False) if v in flat.present)
        # The rest of this branch reads the residuals and what was received; the other branches ignore them.
        extra = [*values[len(sent) :], *received]
        local = [*residuals, *made]
        shared = [*shared, *extra]
        work = [
            ([*ivs, *(local if i == which else [compat.new_var(v.aval) for v in local])],
             post if i == which else body, res)
            for i, (ivs, body, res) in enumerate(work)
        ]  # fmt: skip


def _part(flat: Emitter, eqns: Sequence[compat.Equation]) -> tuple[list[Any], list[Any], list[Any]]:
    """Parts the equations of a branch: the exchanges that need no other one, what is before them, and what is after.

    Before are those that are written before the first exchange, and those that an exchange needs.
    """
    first = next(i for i, e in enumerate(eqns) if flat.exchanges(e))
    behind: set[Any] = set()  # made by an exchange, or after one
    exchanges: dict[int, Any] = {}
    acted = False  # whether something that lasts, such as a callback, is after the exchanges: order is kept
    for i, eqn in enumerate(eqns[first:], first):
        exchange, lasting = flat.exchanges(eqn), any(not compat.is_named_axis_effect(e) for e in eqn.effects)
        after = any(a in behind for a in eqn.invars if not isinstance(a, compat.Literal))
        after = after or (lasting and (acted or not exchange))
        if exchange and not after:
            exchanges[i] = eqn
        if exchange or after:
            behind.update(eqn.outvars)
        acted = acted or (lasting and after)
    needed = {a for e in exchanges.values() for a in e.invars if not isinstance(a, compat.Literal)}
    pre, post = [], []
    for i, eqn in reversed([*enumerate(eqns)]):
        if i in exchanges:
            continue
        if i < first or not needed.isdisjoint(eqn.outvars):
            pre.append(eqn)
            needed.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
        else:
            post.append(eqn)
    return pre[::-1], [*exchanges.values()], post[::-1]


def _check_exchange(flat: Emitter, exchange: compat.Equation) -> None:
    """Refuses an exchange of a branch that cannot be made where the branch is not taken.

    Raises:
        CutError: It is in a loop that might not end, or that does more than exchange.
    """
    if not ends_on_zeros(exchange, flat.present):
        # It runs on zeros where its branch is not taken, and nothing says that the loop would ever end on them.
        raise CutError(
            f"a `while` loop next to an exchange inside `cond` cannot be cut at {compat.source_of(exchange)}: the"
            " host cannot know the predicate, and the loop might not end where its branch is not taken. Use"
            " `lax.scan`, or a predicate made of counters alone."
        )
    if exchange.primitive.name != "while" and _acts(flat, exchange):  # a `while` makes no iteration on zeros
        raise CutError(
            f"an exchange and a callback inside one loop inside `cond` cannot be cut at"
            f" {compat.source_of(exchange)}: the loop runs on zeros where its branch is not taken, and would"
            " call back. Move the callback out of the loop, or use a predicate made of counters alone."
        )


def _acts(flat: Emitter, eqn: compat.Equation) -> bool:
    """Whether an equation does more than to compute and to exchange: it calls back."""
    if flat.wire.recognise(eqn, flat.axes) is not None or all(map(compat.is_named_axis_effect, eqn.effects)):
        return False
    inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
    return not inside or any(_acts(flat, e) for e in inside)


def _close(
    flat: Emitter, invars: list[Any], eqns: list[compat.Equation], outs: list[Any], *, zeros: bool = False
) -> Any:
    """A closed branch whose variables are its own; with `zeros`, one that returns zeros shaped like `outs`."""
    if zeros:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
        like = [(o.aval.shape, o.aval.dtype) for o in outs]
        return jax.make_jaxpr(lambda *_: [jnp.zeros(s, d) for s, d in like])(*shapes)
    kept = drop_unread(eqns, outs)
    return compat.make_jaxpr_of(invars, outs, kept, flat.like)


def _emit(flat: Emitter, eqn: compat.Equation, index: Any, operands: list[Any], branches: list[Any]) -> list[Any]:
    outs = [compat.new_var(a.aval) for a in compat.open_jaxpr(branches[0])[0].outvars]
    params = dict(eqn.params, branches=tuple(branches))
    effects = set().union(*(compat.open_jaxpr(b)[0].effects for b in branches))
    flat.eqns.append(eqn.replace(invars=[index, *operands], outvars=outs, params=params, effects=effects))
    return list(outs)
