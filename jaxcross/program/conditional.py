"""Handles conditionals that contain exchanges.

If a conditional's predicate can be computed from step inputs that are available on the host, such
as counters, the host evaluates it before the step, and only the chosen branch makes it into the
program (`predicate_of`). Otherwise, we split the conditional into several, with the exchanges in
between (`split`).
"""

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

Choose = Callable[["Predicate"], int | None]
"""Picks the branch of a `cond` given its predicate, or returns None if the host can't tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicate:
    """A `cond`'s branch index as a function of nothing but scalar step inputs.

    Attributes:
        inputs: Positions of the step inputs that the predicate reads.
        jaxpr: Closed jaxpr that maps these inputs to the branch index.
        branches: The number of branches.
    """

    inputs: tuple[int, ...]
    jaxpr: compat.Jaxpr
    branches: int


def predicate_of(flat: Emitter, index: compat.Atom, branches: int) -> Predicate | None:
    """Returns the backward slice of `index` as a predicate, or None if the host can't compute it.

    The host can compute the branch index as long as everything that goes into it is a scalar
    integer or boolean derived from the step's inputs. Exchanges, callbacks, and the rank's index
    along an axis are off limits.
    """
    makers = flat.makers()
    positions = flat.positions
    # Trace the index back to the step's inputs, and bail out on anything that the host can't
    # compute.
    needed: set[int] = set()
    leaves: set[Any] = set()
    stack = [index]
    while stack:
        atom = stack.pop()
        if isinstance(atom, compat.Literal):
            continue
        kind = compat.array_type(atom)
        if kind.shape != () or not any(
            jnp.issubdtype(kind.dtype, t) for t in (jnp.integer, jnp.bool_)
        ):
            return None
        position = makers.get(atom)
        if position is not None:
            eqn = flat.eqns[position]
            if flat.exchanges(eqn) or any(not compat.is_named_axis_effect(e) for e in eqn.effects):
                return None
            if eqn.primitive.name == "axis_index" or any(
                _depends_on_rank(j) for j in compat.sub_jaxprs(eqn)
            ):
                return None
            if position not in needed:
                needed.add(position)
                stack.extend(eqn.invars)
        elif atom in positions:  # an input of the step
            leaves.add(atom)
        else:
            return None
    inputs = sorted(leaves, key=positions.__getitem__)
    eqns = [flat.eqns[position] for position in sorted(needed)]
    jaxpr = compat.make_jaxpr_of(inputs, [index], eqns, flat.like)
    return Predicate(inputs=tuple(positions[v] for v in inputs), jaxpr=jaxpr, branches=branches)


def _depends_on_rank(jaxpr: compat.Jaxpr) -> bool:
    inner, _ = compat.open_jaxpr(jaxpr)
    return any(compat.is_named_axis_effect(e) for e in inner.effects)


def split(
    flat: Emitter,
    eqn: compat.Equation,
    index: compat.Atom,
    operands: list[Any],
    branches: list[Any],
) -> list[Any]:
    """Splits a conditional around its exchanges (cut rule 5).

    `cond(p, pre; X; post | other)` becomes `cond(p, pre | zeros)`, then X, then `cond(p, post |
    other)`, where X stands for all exchanges in a branch that don't depend on another exchange in
    it, `pre` for the work that leads up to them, and `post` for the rest of the branch. This is
    repeated until no branch contains any more exchanges.

    Since the exchanges are then outside of the conditional, every rank makes them on every step. A
    rank that doesn't take the branch sends zeros, so that nobody gets stuck waiting for it. Only
    the branch that's taken contributes to the result.

    Along with the exchanges, we count how many ranks take the branch, because the step has to fail
    if they disagree.

    Args:
        flat: Receives the new equations.
        eqn: The conditional.
        index: The branch index.
        operands: The operands of all branches.
        branches: The inputs, flat equations and results of each branch.
    """
    counts = decision.count(flat, eqn, index, [eqns for _, eqns, _ in branches])
    atoms = (a for _, eqns, outs in branches for a in (*(a for e in eqns for a in e.invars), *outs))
    read = {a for a in atoms if not isinstance(a, compat.Literal)}
    consts = [v for v in flat.consts if v in read]
    # Turn constants into operands of the conditional, so that its branches are closed.
    shared = [*operands, *consts]
    work = [([*invars, *consts], eqns, outs) for invars, eqns, outs in branches]
    # Each iteration picks a branch and moves its first exchanges in front of the conditional.
    while True:
        which = next(
            (i for i, (_, eqns, _) in enumerate(work) if any(map(flat.exchanges, eqns))), None
        )
        if which is None:
            return _emit(flat, eqn, index, shared, [_close(flat, *branch) for branch in work])
        invars, eqns, outs = work[which]
        pre, exchanges, post = _partition(flat, eqns)
        for exchange in exchanges:
            _check_exchange(flat, exchange)
        sent = [a for e in exchanges for a in e.invars if not isinstance(a, compat.Literal)]
        later = {a for e in post for a in e.invars if not isinstance(a, compat.Literal)}
        later |= {a for a in outs if not isinstance(a, compat.Literal)}
        # There'll be one conditional before the exchanges and another after them. The first returns
        # the operands of the exchanges, along with any values that the rest of the branch will
        # read.
        residuals = [v for v in dict.fromkeys(v for e in pre for v in e.outvars) if v in later]
        returned = [*sent, *residuals]
        first = [
            _close(flat, invars, pre, returned)
            if i == which
            else _close(flat, ivs, [], returned, zeros=True)
            for i, (ivs, _, _) in enumerate(work)
        ]
        values = _emit(flat, eqn, index, shared, first)
        # Give the exchanges new result variables; the old variables become inputs to the rest of
        # the branch.
        packed = iter(values)
        made = [v for e in exchanges for v in e.outvars]
        received = [compat.new_var(v.aval) for v in made]
        flat.rename(made, received)
        names = dict(zip(made, received, strict=True))
        for exchange in exchanges:
            new = [names[v] for v in exchange.outvars]
            # Link each result to the variables that count the ranks per branch, so that the counts
            # are computed whenever the result is read.
            for group in decision.groups_of(flat, exchange):
                for v in new:
                    flat.counters.setdefault(v, set()).add(counts[group])
            args = [a if isinstance(a, compat.Literal) else next(packed) for a in exchange.invars]
            flat.eqns.append(exchange.replace(invars=args, outvars=new))
        flat.present.update(a for a, v in zip(values, sent, strict=False) if v in flat.present)
        # The second conditional reads the results of the exchanges and whatever the first
        # conditional returned. Only one branch needs these values, but all branches of a
        # conditional take the same operands, so we have to pass them to every branch.
        extra = [*values[len(sent) :], *received]
        local = [*residuals, *made]
        shared = [*shared, *extra]
        work = [
            ([*ivs, *local], post, res)
            if i == which
            else ([*ivs, *(compat.new_var(v.aval) for v in local)], body, res)
            for i, (ivs, body, res) in enumerate(work)
        ]


def _partition(
    flat: Emitter, eqns: Sequence[compat.Equation]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits a branch into what precedes its first exchanges, these exchanges, and the rest.

    The first exchanges are those that don't depend on any other exchange in the branch. Whatever
    they depend on comes before them, and so do any equations that the user wrote above the first
    exchange.
    """
    first = next(i for i, e in enumerate(eqns) if flat.exchanges(e))
    behind: set[Any] = set()  # results of exchanges and of equations that come after them
    exchanges: dict[int, Any] = {}
    # Callbacks must stay in order: once a callback has to wait for the exchanges, so do all
    # callbacks after it.
    acted = False
    for i, eqn in enumerate(eqns[first:], first):
        exchange = flat.exchanges(eqn)
        lasting = any(not compat.is_named_axis_effect(e) for e in eqn.effects)
        after = any(a in behind for a in eqn.invars if not isinstance(a, compat.Literal))
        after = after or (lasting and (acted or not exchange))
        if exchange and not after:
            exchanges[i] = eqn
        if exchange or after:
            behind.update(eqn.outvars)
        acted = acted or (lasting and after)
    needed = {a for e in exchanges.values() for a in e.invars if not isinstance(a, compat.Literal)}
    pre = []
    post = []
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
    """Raises if an exchange can't be made by ranks that don't take its branch.

    A rank that doesn't take the branch exchanges zeros, so that the other ranks don't wait for it
    forever. Inside a loop, that may be impossible: on zeros, the loop might never end, or it might
    call back into Python even though the branch isn't taken.
    """
    if not ends_on_zeros(exchange, flat.present):
        raise CutError(
            "a `while` loop alongside an exchange inside `cond` cannot be cut at "
            f"{compat.source_of(exchange)}: the host cannot know the predicate in advance, so a "
            "rank that does not take the branch runs it on zeros, and the loop might then never "
            "end. Use `lax.scan`, or a predicate that depends on counters alone. "
            "See docs/reference/limits-steps.md#conditionals."
        )
    # Callbacks inside a `while` loop are fine, because the check above has made sure that ranks
    # vote before each iteration. On a rank that doesn't take the branch, all operands are zeros, so
    # the vote ends the loop before the first iteration and nothing gets called.
    if exchange.primitive.name != "while" and _acts(flat, exchange):
        raise CutError(
            "an exchange and a callback in the same loop inside `cond` cannot be cut at "
            f"{compat.source_of(exchange)}: a rank that does not take the branch runs the loop on "
            "zeros, which would make the callback. Move the callback out of the loop, or use a "
            "predicate that depends on counters alone. "
            "See docs/reference/limits-steps.md#conditionals."
        )


def _acts(flat: Emitter, eqn: compat.Equation) -> bool:
    """Whether an equation does more than compute and exchange, i.e. calls back."""
    if flat.wire.recognise(eqn, flat.axes) is not None or all(
        map(compat.is_named_axis_effect, eqn.effects)
    ):
        return False
    inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
    return not inside or any(_acts(flat, e) for e in inside)


def _close(
    flat: Emitter,
    invars: list[Any],
    eqns: list[compat.Equation],
    outs: list[Any],
    *,
    zeros: bool = False,
) -> compat.Jaxpr:
    """Returns a closed branch; with `zeros`, a branch that returns zeros shaped like `outs`."""
    if zeros:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
        like = [(o.aval.shape, o.aval.dtype) for o in outs]
        return jax.make_jaxpr(lambda *_: [jnp.zeros(s, d) for s, d in like])(*shapes)
    kept = drop_unread(eqns, outs)
    return compat.make_jaxpr_of(invars, outs, kept, flat.like)


def _emit(
    flat: Emitter,
    eqn: compat.Equation,
    index: compat.Atom,
    operands: list[Any],
    branches: list[Any],
) -> list[Any]:
    outs = [compat.new_var(a.aval) for a in compat.open_jaxpr(branches[0])[0].outvars]
    params = dict(eqn.params, branches=tuple(branches))
    effects = set().union(*(compat.open_jaxpr(b)[0].effects for b in branches))
    flat.eqns.append(
        eqn.replace(invars=[index, *operands], outvars=outs, params=params, effects=effects)
    )
    return list(outs)
