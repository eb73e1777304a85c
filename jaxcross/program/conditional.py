"""Conditionals that exchange: their predicate where the host can know it, and their split where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError
from jaxcross.program import decision
from jaxcross.program.jaxprs import drop_unread
from jaxcross.program.lockstep import ends_on_zeros

if TYPE_CHECKING:
    from jaxcross.program.flatten import Flattener

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
    jaxpr: Any
    branches: int


def predicate_of(flat: Flattener, index: Any, branches: int) -> Predicate | None:
    """The backward slice of `index`, if it reads nothing but scalar integers and booleans of the input."""
    producer = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    needed, stack, leaves = set(), [index], []
    while stack:
        atom = stack.pop()
        if isinstance(atom, compat.Literal):
            continue
        integer = any(jnp.issubdtype(atom.aval.dtype, kind) for kind in (jnp.integer, jnp.bool_))
        if atom.aval.shape != () or not integer:
            return None
        if atom in producer:
            eqn = producer[atom]
            if flat.exchanges(eqn) or any(not compat.is_named_axis_effect(e) for e in eqn.effects):
                return None
            if eqn.primitive.name == "axis_index" or any(_speaks_of_rank(j) for j in compat.sub_jaxprs(eqn)):
                return None
            if id(eqn) not in needed:
                needed.add(id(eqn))
                stack.extend(eqn.invars)
        elif atom in flat.invars:
            if atom not in leaves:
                leaves.append(atom)
        else:
            return None
    positions = {v: i for i, v in enumerate(flat.invars)}
    leaves.sort(key=positions.__getitem__)
    eqns = [e for e in flat.eqns if id(e) in needed]
    jaxpr = compat.make_jaxpr_of(leaves, [index], eqns, flat.like)
    return Predicate(inputs=tuple(positions[v] for v in leaves), jaxpr=jaxpr, branches=branches)


def _speaks_of_rank(jaxpr: Any) -> bool:
    inner, _ = compat.open_jaxpr(jaxpr)
    return any(compat.is_named_axis_effect(e) for e in inner.effects)


def split(flat: Flattener, eqn: Any, index: Any, operands: list[Any], branches: list[Any]) -> list[Any]:
    """`cond(p, pre; X; post | other)` -> `cond(p, pre | zeros)`, X, `cond(p, post | other)`, repeated.

    X is always made, with zeros where its branch is not taken, so that ranks cannot disagree about who takes part.
    Only the branch taken contributes to the result. Beside it, ranks count who takes it. Follows cut rule 5.
    """
    counts = decision.count(flat, eqn, index, [eqns for _, eqns, _ in branches])
    consts = [v for v in flat.consts if any(v in e.invars for _, eqns, _ in branches for e in eqns)
              or any(v is o for _, _, outs in branches for o in outs)]  # fmt: skip
    shared = [*operands, *consts]
    work = [([*invars, *consts], eqns, outs) for invars, eqns, outs in branches]
    while True:
        which = next((i for i, (_, eqns, _) in enumerate(work) if any(map(flat.exchanges, eqns))), None)
        if which is None:
            return _emit(flat, eqn, index, shared, [_close(flat, *branch) for branch in work])
        invars, eqns, outs = work[which]
        at = next(i for i, e in enumerate(eqns) if flat.exchanges(e))
        pre, exchange, post = eqns[:at], eqns[at], eqns[at + 1 :]
        if not ends_on_zeros(exchange, flat.present):
            # X runs on zeros where its branch is not taken, and nothing says that the loop would ever end on them.
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
        made = {v for e in pre for v in e.outvars}
        sent = [a for a in exchange.invars if not isinstance(a, compat.Literal)]
        later = {a for e in post for a in e.invars if not isinstance(a, compat.Literal)}
        later |= {a for a in outs if not isinstance(a, compat.Literal)}
        residuals = [v for v in dict.fromkeys(v for e in pre for v in e.outvars) if v in later and v in made]
        handed = [*sent, *residuals]
        first = [
            _close(flat, invars, pre, handed) if i == which else _close(flat, ivs, [], handed, zeros=True)
            for i, (ivs, _, _) in enumerate(work)
        ]
        values = _emit(flat, eqn, index, shared, first)
        packed = iter(values)
        received = [compat.new_var(v.aval) for v in exchange.outvars]
        flat.renamed(exchange.outvars, received)
        for group in decision.groups_of(flat, exchange):
            flat.counted.setdefault(counts[group], set()).update(received)
        args = [a if isinstance(a, compat.Literal) else next(packed) for a in exchange.invars]
        flat.present.update(a for a, v in zip(values, sent, strict=False) if v in flat.present)
        flat.eqns.append(exchange.replace(invars=args, outvars=received))
        # The rest of this branch reads the residuals and what was received; the other branches ignore them.
        extra = [*values[len(sent) :], *received]
        local = [*residuals, *exchange.outvars]
        shared = [*shared, *extra]
        work = [
            ([*ivs, *(local if i == which else [compat.new_var(v.aval) for v in local])],
             post if i == which else body, res)
            for i, (ivs, body, res) in enumerate(work)
        ]  # fmt: skip


def _acts(flat: Flattener, eqn: Any) -> bool:
    """Whether an equation does more than to compute and to exchange: it calls back."""
    if flat.wire.recognise(eqn, flat.axes) is not None or all(map(compat.is_named_axis_effect, eqn.effects)):
        return False
    inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
    return not inside or any(_acts(flat, e) for e in inside)


def _close(flat: Flattener, invars: list[Any], eqns: list[Any], outs: list[Any], *, zeros: bool = False) -> Any:
    """A closed branch whose variables are its own; with `zeros`, one that returns zeros shaped like `outs`."""
    if zeros:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
        like = [(o.aval.shape, o.aval.dtype) for o in outs]
        return jax.make_jaxpr(lambda *_: [jnp.zeros(s, d) for s, d in like])(*shapes)
    kept = drop_unread(eqns, outs)
    return compat.make_jaxpr_of(invars, outs, kept, flat.like)


def _emit(flat: Flattener, eqn: Any, index: Any, operands: list[Any], branches: list[Any]) -> list[Any]:
    outs = [compat.new_var(a.aval) for a in compat.open_jaxpr(branches[0])[0].outvars]
    params = dict(eqn.params, branches=tuple(branches))
    effects = set().union(*(compat.open_jaxpr(b)[0].effects for b in branches))
    flat.eqns.append(eqn.replace(invars=[index, *operands], outvars=outs, params=params, effects=effects))
    return list(outs)
