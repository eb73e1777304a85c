"""Loops that exchange and may make another number of iterations on each rank, rewritten so that all make the same.

The result is that of `jax.vmap` over ranks. A rank that is through runs the body on its last carry, contributes that to
the exchanges, and discards what it gets, until all ranks are through. Before each iteration ranks vote on that by a
maximum of four bytes, over the axes that the loop exchanges over. There is no vote where the predicate is known to be
equal on all of them (`jaxcross.program.equality`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ref import AbstractRef

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError
from jaxcross.program.equality import Equality, Known, fingerprint
from jaxcross.program.jaxprs import INLINED, holds_exchange

if TYPE_CHECKING:
    from jaxcross.program.flatten import Flattener

FROZEN = 1_000
"""Iterations after which a rank that is through with an outer loop no longer votes to continue an inner one. On the
carry that it left the outer loop with, the inner one might never end: under `vmap` it would not. It goes on as long as
other ranks do.
"""
FROZEN_LOCAL = 1_000_000
"""Iterations after which such a rank leaves an inner loop that exchanges nothing."""


@dataclass(frozen=True, slots=True)
class Role:
    """What this rank's results in a jaxpr are good for.

    Attributes:
        active: Whether they are kept; None: always.
        present: 0 on a rank that takes no part in the step, 1 elsewhere; None where every rank takes part.
        always: Whether all loops need a vote.
    """

    active: Any = None
    present: Any = None
    always: bool = False


def emit(flat: Flattener, eqn: Any, args: list[Any]) -> list[Any]:
    """Emits a loop that exchanges, rewritten where ranks may make different numbers of its iterations."""
    equality, known = Equality(flat.axes, flat.wire), flat.known(args)
    equality.results(eqn, known)
    named = any(x.axes for x in equality.exchanges(eqn))
    if not (equality.apart or (named and flat.always and _holds_while(eqn))):
        outs = flat.keep(eqn, args)
        if equality.how:
            flat.until[outs[0]] = fingerprint(equality.how)
        return outs

    def rewritten(present: Any, *values: Any) -> Sequence[Any]:
        role = Role(present=present, always=flat.always)
        return list(_Rewriter(Equality(flat.axes, flat.wire)).equation(eqn, list(values), known, role))

    atoms, before = [flat.presence(), *args], len(flat.eqns)
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in atoms]
    closed = jax.make_jaxpr(rewritten, axis_env=list(flat.axes.items()))(*types)
    outs = flat.inline(closed, atoms, flat.keep)
    if equality.how:
        flat.until.update((e.outvars[0], fingerprint(equality.how)) for e in flat.eqns[before:] if flat.exchanges(e))
    return outs


def ends_on_zeros(eqn: Any, present: Collection[Any]) -> bool:
    """Whether an equation ends on a rank whose operands are all zero: it has no loops that a value ends, but those that
    ranks vote on.

    Args:
        eqn: Of a flat jaxpr.
        present: Variables that are zero then and 1 elsewhere, an operand of each vote.
    """
    here = [n for n, a in enumerate(eqn.invars) if not isinstance(a, compat.Literal) and a in present]
    if eqn.primitive.name == "while":
        return bool(here)
    for jaxpr in compat.sub_jaxprs(eqn):
        inner, _ = compat.open_jaxpr(jaxpr)
        handed = {inner.invars[n] for n in here} if eqn.primitive.name == "scan" else ()
        if not all(ends_on_zeros(e, handed) for e in inner.eqns):
            return False
    return True


def _holds_while(eqn: Any) -> bool:
    return eqn.primitive.name == "while" or any(
        _holds_while(e) for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns
    )


def _calls_back(eqn: Any) -> bool:
    """Whether an equation, or one inside it, does more than compute, exchange and write to a mutable array."""
    if eqn.primitive.name.endswith("_mpi") or any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        return False
    inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
    if inside:
        return any(map(_calls_back, inside))
    return any(not compat.is_named_axis_effect(e) for e in eqn.effects)


@dataclass(frozen=True, slots=True)
class _Rewriter:
    """Traces equations once more, with a vote in the loops that need one."""

    equality: Equality

    def jaxpr(self, jaxpr: Any, args: Sequence[Any], known: Sequence[Known], role: Role) -> list[Any]:
        inner, consts = compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=False))
        rest = [*inner.constvars[len(consts) :], *inner.invars]
        env.update(zip(rest, args, strict=True))
        facts: dict[Any, Known] = dict(zip(rest, known, strict=True))
        for eqn in inner.eqns:
            values = [a.val if isinstance(a, compat.Literal) else env[a] for a in eqn.invars]
            about = [self.equality.read(facts, a) for a in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, values, about, role), strict=True))
            facts.update(zip(eqn.outvars, self.equality.results(eqn, about), strict=True))
        return [a.val if isinstance(a, compat.Literal) else env[a] for a in inner.outvars]

    def equation(self, eqn: Any, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        name, inside = eqn.primitive.name, list(compat.sub_jaxprs(eqn))
        calls_back = role.active is not None and _calls_back(eqn)
        exchanges = any(holds_exchange(j, self.equality.sizes, self.equality.wire) for j in inside)
        if not (exchanges or calls_back or (role.active is not None and _holds_while(eqn))):
            return compat.bind_equation(eqn, values, eqn.params)
        with compat.in_place_of(eqn):
            if name == "while":
                return self._while(eqn, values, known, role)
            if name == "scan":
                return self._scan(eqn, values, known, role)
            if name == "cond":
                parts = exchanges and not self.equality.needed(eqn) <= known[0].axes
                return (self._parted if parts else self._cond)(eqn, values, known, role)
            if name in INLINED:
                return self.jaxpr(inside[0], values, known, role)
            if calls_back:
                return _guarded(eqn, values, role)
        return compat.bind_equation(eqn, values, eqn.params)

    def _while(self, eqn: Any, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        params, equality = eqn.params, self.equality
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried, more = equality.carried(eqn, known)
        made, needed = equality.exchanges(eqn), equality.needed(eqn)
        votes = any(x.axes for x in made) and (role.always or not needed <= more.axes)
        inner = replace(role, present=None, always=False) if votes else replace(role, present=None)
        # Where ranks decide together, one that is through ends as the others do. How many calls of mpi4jax's each makes
        # is the step's affair.
        speaks = needed or any(not x.axes for x in made)
        limited = role.active is not None and (votes or not (speaks or equality.together(eqn, more)))
        if votes:
            _check_no_refs(eqn)

        def goes_on(carry: Sequence[Any], active: Any) -> Any:
            facts = [*known[:n], *carried]
            (going,) = self.jaxpr(params["cond_jaxpr"], [*values[:n], *carry], facts, replace(inner, active=active))
            return going

        def cond(state: tuple[list[Any], Any, Any]) -> Any:
            _, count, going = state
            going = _any(going)
            if limited:
                within = lax.lt(count, jnp.int32(FROZEN if votes else FROZEN_LOCAL))
                going = lax.bitwise_and(going, lax.bitwise_or(role.active, within))
            return self._vote(eqn, going, role) if votes else going

        def body(state: tuple[list[Any], Any, Any]) -> tuple[list[Any], Any, Any]:
            carry, count, going = state
            active = _both(role.active, _any(going)) if votes else role.active
            facts = [*known[n:m], *carried]
            new = self.jaxpr(params["body_jaxpr"], [*values[n:m], *carry], facts, replace(inner, active=active))
            if votes or jnp.ndim(going):
                new = [x if y is x else lax.select_n(_like(x, going), x, y) for x, y in zip(carry, new, strict=True)]
            count = lax.add(count, jnp.int32(1)) if limited else count
            return new, count, goes_on(new, active)

        init, zero = [jnp.asarray(v) for v in values[m:]], jnp.int32(0) if limited else ()
        carry, _, going = lax.while_loop(cond, body, (init, zero, goes_on(init, role.active)))
        # What this rank has not computed to its end must not pass for a number in a later exchange.
        return [_nan_where(going, x) for x in carry] if limited else carry

    def _vote(self, eqn: Any, going: Any, role: Role) -> Any:
        """Whether any rank goes on; none does where one takes no part in the step, which fails on all of them then."""
        going = lax.convert_element_type(going, jnp.int32)
        if role.present is not None:
            going = lax.select(lax.eq(role.present, jnp.int32(1)), going, jnp.int32(2))
        return lax.eq(self._max(eqn, going), jnp.int32(1))

    def _max(self, eqn: Any, value: Any) -> Any:
        """The maximum over the ranks that exchange with one another in `eqn`."""
        needed = self.equality.needed(eqn)
        made = [x for x in self.equality.exchanges(eqn) if x.axes]
        over = {(x.axes, dict(x.params).get("groups")) for x in made if not needed or needed & set(x.axes)}
        if len(over) == 1:
            ((axes, groups),) = over
        else:
            named = {a for x in made for a in x.axes}
            axes, groups = tuple(a for a in self.equality.sizes if a in (needed or named)), None
        return lax.pmax(value, axes, axis_index_groups=groups)

    def _scan(self, eqn: Any, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        params, (n_consts, n_carry) = eqn.params, compat.scan_counts(eqn)
        carried, _ = self.equality.repeated(eqn, known)
        facts = [*known[:n_consts], *carried, *known[n_consts + n_carry :]]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = self.jaxpr(params["jaxpr"], [*values[:n_consts], *carry, *xs], facts, role)
            return outs[:n_carry], outs[n_carry:]

        init, xs = values[n_consts:][:n_carry], values[n_consts + n_carry :]
        carry, ys = lax.scan(body, init, xs, params["length"], reverse=params["reverse"], unroll=params["unroll"])
        return [*carry, *ys]

    def _cond(self, eqn: Any, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        return lax.switch(
            _index(eqn, values), [self._branch(b, known, role) for b in eqn.params["branches"]], *values[1:]
        )

    def _branch(self, branch: Any, known: Sequence[Known], role: Role) -> Callable[..., list[Any]]:
        return lambda *operands: self.jaxpr(branch, operands, known[1:], role)

    def _parted(self, eqn: Any, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        """A conditional at which ranks may part: each branch that exchanges is run by all of them if any takes it, as
        under `vmap`, where all branches are. Ranks agree on that by another maximum.
        """
        branches, operands, index = eqn.params["branches"], values[1:], _index(eqn, values)
        equality = self.equality
        takers = [n for n, b in enumerate(branches) if holds_exchange(b, equality.sizes, equality.wire)]
        if any(not x.axes for x in equality.exchanges(eqn)):
            raise CutError(
                f"the conditional at {compat.source_of(eqn)} calls mpi4jax and exchanges over named axes, and ranks may"
                " decide it differently: their exchanges would be taken for one another's. Let all ranks decide alike,"
                " as by `jax.lax.pmax(predicate, axis)`, or move the calls or the exchanges out of it."
            )
        zeros = lambda *_: [lax.full(v.aval.shape, 0, v.aval.dtype) for v in eqn.outvars]  # noqa: E731
        mine = [lax.eq(index, jnp.int32(n)) for n in takers]
        anyone = self._max(eqn, lax.convert_element_type(jnp.stack(mine), jnp.int32)) == jnp.int32(1)
        outs = lax.switch(
            index, [zeros if n in takers else self._branch(b, known, role) for n, b in enumerate(branches)], *operands
        )
        for place, (n, own) in enumerate(zip(takers, mine, strict=True)):
            branch = self._branch(branches[n], known, replace(role, active=_both(role.active, own)))
            there = lax.cond(lax.index_in_dim(anyone, place, keepdims=False), branch, zeros, *operands)
            outs = [lax.select_n(own, x, y) for x, y in zip(outs, there, strict=True)]
        return outs


def _check_no_refs(eqn: Any) -> None:
    if any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        raise CutError(
            f"the loop at {compat.source_of(eqn)} exchanges, writes to a mutable array from outside of it, and may make"
            " another number of iterations on each rank: a rank that is through would go on writing. Carry the array"
            " through the loop as a value."
        )


def _index(eqn: Any, values: Sequence[Any]) -> Any:
    last = len(eqn.params["branches"]) - 1
    return lax.clamp(jnp.int32(0), lax.convert_element_type(values[0], jnp.int32), jnp.int32(last))


def _any(going: Any) -> Any:
    """Whether a loop goes on, if it does so for some of the elements of an inner `vmap`."""
    return lax.reduce_or(going, tuple(range(jnp.ndim(going)))) if jnp.ndim(going) else going


def _both(active: Any, going: Any) -> Any:
    return going if active is None else lax.bitwise_and(active, going)


def _nan_where(mask: Any, x: Any) -> Any:
    """NaN in the place of numbers, where there is one for their type."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return lax.select_n(jnp.broadcast_to(_like(x, mask), x.shape), x, lax.full_like(x, jnp.nan))


def _like(x: Any, mask: Any) -> Any:
    """A mask, of no dimensions or the leading ones of `x`, as `x` is selected by."""
    if jnp.ndim(mask) in (0, jnp.ndim(x)):
        return mask
    return lax.broadcast_in_dim(mask, jnp.shape(x), tuple(range(jnp.ndim(mask))))


def _guarded(eqn: Any, values: list[Any], role: Role) -> Sequence[Any]:
    """A callback, made where this rank's results are kept alone."""
    if list(compat.sub_jaxprs(eqn)) or not all(isinstance(v, compat.DropVar) for v in eqn.outvars):
        raise CutError(
            f"a callback that returns values cannot be made at {compat.source_of(eqn)}: it stands in a loop that"
            " exchanges and may make another number of iterations on each rank, and a rank that is through would call"
            " back. Move the callback out of the loop, or let all ranks make as many iterations, as by"
            " `jax.lax.pmax(n, axis)`."
        )
    zeros = lambda *_: [lax.full(v.aval.shape, 0, v.aval.dtype) for v in eqn.outvars]  # noqa: E731
    called = lambda *args: compat.bind_equation(eqn, args, eqn.params)  # noqa: E731
    return lax.cond(role.active, called, zeros, *values)
