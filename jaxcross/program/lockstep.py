"""Loops that exchange and may make another number of iterations on each rank, rewritten so that all make the same.

The result is that of `jax.vmap` over ranks. A rank that is through runs the body on its last carry, contributes that to
the exchanges, and discards what it gets, until all ranks are through. Before each iteration ranks vote on that by a
maximum of four bytes, over the axes that the loop exchanges over. There is no vote where the predicate is known to be
equal on all of them (`jaxcross.program.equality`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ref import AbstractRef

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED
from jaxcross.errors import CutError
from jaxcross.program import decision
from jaxcross.program.emitter import Emitter
from jaxcross.program.equality import Equality, Known, fingerprint
from jaxcross.program.jaxpr_utils import holds_exchange

FROZEN = 2_000
"""Iterations after which a rank that is through with an outer loop no longer votes to continue an inner one, of whose
result it is to exchange something. On the carry that it left the outer loop with, the inner one might never end: under
`vmap` it would not. It goes on as long as other ranks do. Where they do not, the step fails. Halving a float64 until it
is zero takes 1,075.
"""
FROZEN_LOCAL = 1_000_000
"""Iterations after which such a rank leaves an inner loop that exchanges nothing, and the step fails."""


@dataclass(frozen=True, slots=True)
class Role:
    """What this rank's results in a jaxpr are good for.

    Attributes:
        active: Whether they are kept; None: always.
        present: 0 on a rank that takes no part in the step, 1 elsewhere; None where every rank takes part.
        always: Whether all loops need a vote.
        matters: Whether something is exchanged of these results also where they are not kept.
    """

    active: Any = None
    present: Any = None
    always: bool = False
    matters: bool = False


def emit(flat: Emitter, eqn: compat.Equation, args: list[Any]) -> list[Any]:
    """Emits a loop that exchanges, rewritten where ranks may make different numbers of its iterations."""
    equality, known = Equality(flat.axes, flat.wire), flat.known(args)
    equality.results(eqn, known)
    named = any(x.axes for x in equality.exchanges(eqn))
    if not (equality.apart or (named and flat.always_vote and _holds_while(eqn))):
        outs = flat.keep(eqn, args)
        if equality.how:
            flat.until[outs[0]] = fingerprint(equality.how)
        return outs

    rewriter = _Rewriter(Equality(flat.axes, flat.wire))

    def rewritten(present: Any, *values: Any) -> Sequence[Any]:
        role = Role(present=present, always=flat.always_vote)
        outs = rewriter.equation(eqn, list(values), known, role)
        return [*outs, rewriter.stopped()] if rewriter.left else outs

    atoms, before = [flat.presence(), *args], len(flat.eqns)
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in atoms]
    closed = jax.make_jaxpr(rewritten, axis_env=list(flat.axes.items()))(*types)
    outs = flat.inline(closed, atoms, flat.keep)
    if rewriter.left:
        *outs, stopped = outs
        counted = [v for e in flat.eqns[before:] if flat.exchanges(e) for v in e.outvars]
        axes, _ = rewriter.over(eqn)
        decision.count_stopped(flat, eqn, stopped, counted, axes, tuple(rewriter.left))
    if equality.how:
        flat.until.update((e.outvars[0], fingerprint(equality.how)) for e in flat.eqns[before:] if flat.exchanges(e))
    return outs


def ends_on_zeros(eqn: compat.Equation, present: Collection[Any]) -> bool:
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


def _holds_while(eqn: compat.Equation) -> bool:
    return eqn.primitive.name == "while" or any(
        _holds_while(e) for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns
    )


def _calls_back(eqn: compat.Equation) -> bool:
    """Whether an equation, or one inside it, does more than compute, exchange and write to a mutable array."""
    if eqn.primitive.name.endswith("_mpi") or any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        return False
    inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
    if inside:
        return any(map(_calls_back, inside))
    return any(not compat.is_named_axis_effect(e) for e in eqn.effects)


@dataclass(slots=True)
class _Rewriter:
    """Traces equations once more, with a vote in the loops that need one.

    Attributes:
        left: The lines of inner loops that a rank may leave before their end although something is exchanged of what
            they made.
    """

    equality: Equality
    left: dict[str, None] = field(default_factory=dict)
    _stopped: list[Any] = field(default_factory=list)  # in what is being traced: whether this rank has left one so

    def stopped(self) -> Any:
        """1 if this rank has left such a loop in what was traced since the last call, else 0."""
        stopped, self._stopped = self._stopped, []
        return functools.reduce(lax.max, stopped, jnp.int32(0))

    def _inside(self, jaxpr: compat.Jaxpr, args: Sequence[Any], known: Sequence[Known], role: Role) -> list[Any]:
        """The results of what is traced inside of an equation, and `stopped` of it."""
        outer, self._stopped = self._stopped, []
        outs = self.jaxpr(jaxpr, args, known, role)
        stopped, self._stopped = self.stopped(), outer
        return [*outs, stopped]

    def _outside(self, outs: Sequence[Any]) -> list[Any]:
        """The results alone of an equation whose inside was traced by `_inside`."""
        self._stopped.append(outs[-1])
        return [*outs[:-1]]

    def jaxpr(self, jaxpr: compat.Jaxpr, args: Sequence[Any], known: Sequence[Known], role: Role) -> list[Any]:
        inner, consts = compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=False))
        rest = [*inner.constvars[len(consts) :], *inner.invars]
        env.update(zip(rest, args, strict=True))
        facts: dict[Any, Known] = dict(zip(rest, known, strict=True))
        exchanged = self._exchanged(inner, role)
        for eqn in inner.eqns:
            role = replace(role, matters=not exchanged.isdisjoint(eqn.outvars))
            values = [a.val if isinstance(a, compat.Literal) else env[a] for a in eqn.invars]
            about = [self.equality.read(facts, a) for a in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, values, about, role), strict=True))
            facts.update(zip(eqn.outvars, self.equality.results(eqn, about), strict=True))
        return [a.val if isinstance(a, compat.Literal) else env[a] for a in inner.outvars]

    def _exchanged(self, inner: compat.Jaxpr, role: Role) -> set[Any]:
        """The variables of a jaxpr of which something is exchanged, where this rank's results are not kept."""
        if role.active is None:
            return set()
        found = {a for a in inner.outvars if role.matters and not isinstance(a, compat.Literal)}
        for eqn in reversed(inner.eqns):
            if not found.isdisjoint(eqn.outvars) or self.equality.exchanges(eqn):
                found.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
        return found

    def equation(self, eqn: compat.Equation, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
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

    def _while(self, eqn: compat.Equation, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        params, equality = eqn.params, self.equality
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried, more = equality.carried(eqn, known)
        made, needed = equality.exchanges(eqn), equality.needed(eqn)
        votes = any(x.axes for x in made) and (role.always or not needed <= more.axes)
        # What a rank computes inside is kept for a next iteration, unless it is through with all loops.
        matters = role.active is not None and (role.matters or bool(made))
        inner = replace(role, present=None, always=role.always and not votes, matters=matters)
        # Where ranks decide together, one that is through ends as the others do. How many calls of mpi4jax's each makes
        # is the step's affair.
        speaks = needed or any(not x.axes for x in made)
        leaves = role.active is not None and (votes or not (speaks or equality.together(eqn, more)))
        # An exchange in the predicate reads the carries of all ranks: while one goes on, another may resume.
        resumes = holds_exchange(params["cond_jaxpr"], equality.sizes, equality.wire)
        limit = (FROZEN if votes else FROZEN_LOCAL) if leaves and (role.matters or resumes) else None
        if votes:
            _check_no_refs(eqn)

        def goes_on(carry: Sequence[Any], active: Any) -> list[Any]:
            facts, decides = [*known[:n], *carried], replace(inner, active=active, matters=True)
            return self._inside(params["cond_jaxpr"], [*values[:n], *carry], facts, decides)

        def cond(state: tuple[list[Any], Any, Any, Any]) -> Any:
            _, count, _, going = state
            going = _any(going)
            if leaves:
                kept = role.active if limit is None else lax.bitwise_or(role.active, lax.lt(count, jnp.int32(limit)))
                going = lax.bitwise_and(going, kept)
            return self._vote(eqn, going, role) if votes else going

        def body(state: tuple[list[Any], Any, Any, Any]) -> tuple[list[Any], Any, Any, Any]:
            carry, count, stopped, going = state
            active = _both(role.active, _any(going)) if votes else role.active
            facts, args = [*known[n:m], *carried], [*values[n:m], *carry]
            *new, within = self._inside(params["body_jaxpr"], args, facts, replace(inner, active=active))
            if votes or jnp.ndim(going):
                new = [x if y is x else lax.select_n(_like(x, going), x, y) for x, y in zip(carry, new, strict=True)]
            going, decided = goes_on(new, active)
            return new, lax.add(count, jnp.int32(1)), functools.reduce(lax.max, (stopped, within, decided)), going

        init = [jnp.asarray(v) for v in values[m:]]
        going, stopped = goes_on(init, role.active)
        carry, count, stopped, going = lax.while_loop(cond, body, (init, jnp.int32(0), stopped, going))
        if limit is not None and role.active is not None:
            self.left[compat.source_of(eqn)] = None
            left = lax.bitwise_and(_any(going), lax.bitwise_not(role.active))
            left = lax.bitwise_and(left, lax.ge(count, jnp.int32(limit)))
            stopped = lax.max(stopped, lax.convert_element_type(left, jnp.int32))
        self._stopped.append(stopped)
        return carry

    def _vote(self, eqn: compat.Equation, going: Any, role: Role) -> Any:
        """Whether any rank goes on; none does where one takes no part in the step, which fails on all of them then."""
        going = lax.convert_element_type(going, jnp.int32)
        if role.present is not None:
            going = lax.select(lax.eq(role.present, jnp.int32(1)), going, jnp.int32(2))
        return lax.eq(self._max(eqn, going), jnp.int32(1))

    def _max(self, eqn: compat.Equation, value: Any) -> Any:
        axes, groups = self.over(eqn)
        return lax.pmax(value, axes, axis_index_groups=groups)

    def over(self, eqn: compat.Equation) -> tuple[tuple[str, ...], Any]:
        """The axes, and the groups along them, of the ranks that exchange with one another in `eqn`."""
        needed = self.equality.needed(eqn)
        made = [x for x in self.equality.exchanges(eqn) if x.axes]
        over = {(x.axes, dict(x.params).get("groups")) for x in made if not needed or needed & set(x.axes)}
        if len(over) == 1:
            return next(iter(over))
        named = {a for x in made for a in x.axes}
        return tuple(a for a in self.equality.sizes if a in (needed or named)), None

    def _scan(self, eqn: compat.Equation, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        params, (n_consts, n_carry) = eqn.params, compat.scan_counts(eqn)
        carried, _ = self.equality.repeated(eqn, known)
        facts = [*known[:n_consts], *carried, *known[n_consts + n_carry :]]
        inner = replace(role, matters=role.matters or bool(self.equality.exchanges(eqn)))

        def body(state: tuple[list[Any], Any], xs: list[Any]) -> tuple[tuple[list[Any], Any], list[Any]]:
            carry, before = state
            *outs, stopped = self._inside(params["jaxpr"], [*values[:n_consts], *carry, *xs], facts, inner)
            return (outs[:n_carry], lax.max(before, stopped)), outs[n_carry:]

        init, xs = (values[n_consts:][:n_carry], jnp.int32(0)), values[n_consts + n_carry :]
        (carry, stopped), ys = lax.scan(
            body, init, xs, params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        self._stopped.append(stopped)
        return [*carry, *ys]

    def _cond(self, eqn: compat.Equation, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
        branches = [self._branch(b, known, role) for b in eqn.params["branches"]]
        return self._outside(lax.switch(_index(eqn, values), branches, *values[1:]))

    def _branch(self, branch: compat.Jaxpr, known: Sequence[Known], role: Role) -> Callable[..., list[Any]]:
        return lambda *operands: self._inside(branch, operands, known[1:], role)

    def _parted(self, eqn: compat.Equation, values: list[Any], known: Sequence[Known], role: Role) -> Sequence[Any]:
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
        types = [*(v.aval for v in eqn.outvars), jax.ShapeDtypeStruct((), jnp.int32)]
        zeros = lambda *_: [lax.full(t.shape, 0, t.dtype) for t in types]  # noqa: E731
        mine = [lax.eq(index, jnp.int32(n)) for n in takers]
        anyone = self._max(eqn, lax.convert_element_type(jnp.stack(mine), jnp.int32)) == jnp.int32(1)
        without = [zeros if n in takers else self._branch(b, known, role) for n, b in enumerate(branches)]
        outs = self._outside(lax.switch(index, without, *operands))
        for place, (n, own) in enumerate(zip(takers, mine, strict=True)):
            branch = self._branch(branches[n], known, replace(role, active=_both(role.active, own)))
            there = self._outside(lax.cond(lax.index_in_dim(anyone, place, keepdims=False), branch, zeros, *operands))
            outs = [lax.select_n(own, x, y) for x, y in zip(outs, there, strict=True)]
        return outs


def _check_no_refs(eqn: compat.Equation) -> None:
    if any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        raise CutError(
            f"the loop at {compat.source_of(eqn)} exchanges, writes to a mutable array from outside of it, and may make"
            " another number of iterations on each rank: a rank that is through would go on writing. Carry the array"
            " through the loop as a value."
        )


def _index(eqn: compat.Equation, values: Sequence[Any]) -> Any:
    last = len(eqn.params["branches"]) - 1
    return lax.clamp(jnp.int32(0), lax.convert_element_type(values[0], jnp.int32), jnp.int32(last))


def _any(going: Any) -> Any:
    """Whether a loop goes on, if it does so for some of the elements of an inner `vmap`."""
    return lax.reduce_or(going, tuple(range(jnp.ndim(going)))) if jnp.ndim(going) else going


def _both(active: Any, going: Any) -> Any:
    return going if active is None else lax.bitwise_and(active, going)


def _like(x: Any, mask: Any) -> Any:
    """A mask, of no dimensions or the leading ones of `x`, as `x` is selected by."""
    if jnp.ndim(mask) in (0, jnp.ndim(x)):
        return mask
    return lax.broadcast_in_dim(mask, jnp.shape(x), tuple(range(jnp.ndim(mask))))


def _guarded(eqn: compat.Equation, values: list[Any], role: Role) -> Sequence[Any]:
    """A callback, made where this rank's results are kept alone."""
    if list(compat.sub_jaxprs(eqn)) or not all(isinstance(v, compat.DropVar) for v in eqn.outvars):
        raise CutError(
            f"a callback that returns values cannot be made at {compat.source_of(eqn)}: it stands in a loop that"
            " exchanges and may make another number of iterations on each rank, and a rank that is through would call"
            " back. Move the callback out of the loop, or let all ranks make as many iterations, as by"
            " `jax.lax.pmax(n, axis)`."
        )
    zeros = lambda *_: [lax.full(t.shape, 0, t.dtype) for t in map(compat.array_type, eqn.outvars)]  # noqa: E731
    called = lambda *args: compat.bind_equation(eqn, args, eqn.params)  # noqa: E731
    return lax.cond(role.active, called, zeros, *values)
