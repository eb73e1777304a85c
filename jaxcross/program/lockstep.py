"""Loops that exchange with a different number of iterations on each rank, rewritten so that all ranks make the same.

The results are those of `jax.vmap` over ranks, which runs the body until every element's predicate is false and keeps
the carry of elements that have finished. Here each rank is an element: before each iteration ranks vote, by a maximum
of four bytes over the axes that the loop exchanges over, whether any of them goes on. A rank that has finished runs the
body on its last carry, contributes the outcome to the exchanges, and discards the results. There is no vote where
`jaxcross.program.equality` proves the predicate equal on all these ranks.

Nested loops are the hard part. A rank that has finished the outer loop still enters the inner one, on a carry for which
the inner one need not end. Such a rank is *inactive*. It leaves an inner loop

- as the other ranks do, where they decide together or the loop has no vote because the ranks' decisions are equal;
- at once, where nothing that is exchanged depends on the inner loop's results;
- after `FROZEN` or `FROZEN_LOCAL` iterations, where something does. It then has to exchange a value that `vmap` would
  not give, so it also counts itself in a sum (`decision.EarlyExit`), and the step fails on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ref import AbstractRef

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED, Atom, Equation, Jaxpr
from jaxcross.errors import CutError
from jaxcross.program import decision
from jaxcross.program.emitter import Emitter
from jaxcross.program.equality import Equality, Known, fingerprint
from jaxcross.program.jaxpr_utils import holds_exchange

FROZEN = 2_000
"""Iterations after which an inactive rank stops voting to continue an inner loop on whose results an exchange depends.

On the carry with which the rank left the outer loop the inner one might never end; under `vmap` it would not end
either. The rank iterates on as long as other ranks do. Halving a float64 until it is zero takes 1,075 iterations.
"""
FROZEN_LOCAL = 1_000_000
"""Iterations after which an inactive rank leaves an inner loop that exchanges nothing: no other rank waits for it."""


_State = tuple[list[Array], Array, Array, Array]
"""The state of a rewritten `while`: its carry, iterations, whether an inner loop was left early, and the predicate."""


@dataclass(frozen=True, slots=True)
class Role:
    """The use that is made of this rank's results in a jaxpr.

    Attributes:
        active: Whether the results are kept; None if they always are, which is so outside of every loop with a vote.
        present: 0 on a rank that takes no part in the step, 1 elsewhere; None where every rank takes part.
        always_vote: Whether every loop needs a vote, because the jaxpr may run on zeros.
        feeds_exchange: Whether an exchange depends on the results even where they are not kept.
    """

    active: Array | None = None
    present: Array | None = None
    always_vote: bool = False
    feeds_exchange: bool = False


def emit(flat: Emitter, eqn: Equation, args: list[Atom]) -> Sequence[Atom]:
    """Emits a loop that exchanges, rewritten where ranks may make different numbers of its iterations."""
    equality, known = Equality(flat.axes, flat.wire), flat.known(args)
    equality.results(eqn, known)
    named = any(x.axes for x in equality.exchanges(eqn))
    if not (equality.diverges or (named and flat.always_vote and _holds_while(eqn))):
        outs = flat.keep(eqn, args)
        # The proof of equality holds for ranks that traced the same code. A Python number in it may differ by rank, so
        # ranks compare a hash of all that the number of iterations follows from.
        if equality.basis:
            flat.until[outs[0]] = fingerprint(equality.basis)
        return outs

    rewriter = _Rewriter(Equality(flat.axes, flat.wire))

    def rewritten(present: Array, *values: Array) -> Sequence[Array]:
        role = Role(present=present, always_vote=flat.always_vote)
        outs = rewriter.equation(eqn, list(values), known, role)
        return [*outs, rewriter.take_exited()] if rewriter.early_exits else outs

    atoms, before = [flat.presence(), *args], len(flat.eqns)
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in map(compat.array_type, atoms)]
    closed = jax.make_jaxpr(rewritten, axis_env=list(flat.axes.items()))(*types)
    outs = flat.inline(closed, atoms, flat.keep)
    if rewriter.early_exits:
        *outs, exited = outs
        counted = [v for e in flat.eqns[before:] if flat.exchanges(e) for v in e.outvars]
        axes, _ = rewriter.voters(eqn)
        decision.count_early_exits(flat, eqn, exited, counted, axes, tuple(rewriter.early_exits))
    if equality.basis:
        basis = fingerprint(equality.basis)
        flat.until.update((e.outvars[0], basis) for e in flat.eqns[before:] if flat.exchanges(e))
    return outs


def _holds_while(eqn: Equation) -> bool:
    return eqn.primitive.name == "while" or any(
        _holds_while(e) for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns
    )


def _calls_back(eqn: Equation) -> bool:
    """Whether an equation, or one inside it, does more than compute, exchange and write to a mutable array."""
    if eqn.primitive.name.endswith("_mpi") or any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        return False
    inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
    if inside:
        return any(map(_calls_back, inside))
    return any(not compat.is_named_axis_effect(e) for e in eqn.effects)


@dataclass(slots=True)
class _Rewriter:
    """Traces equations again, with a vote in the loops that need one.

    JAX traces the body of a loop or branch as a jaxpr of its own, from which a flag can only come out as a result. The
    flag `exited` therefore is an extra result of everything traced by `_inside`, and an extra carry of loops.

    Attributes:
        equality: Proves values equal on all ranks.
        early_exits: The lines of inner loops that an inactive rank may leave before their end although an exchange
            depends on their results. A dict, to keep them once each and in order.
    """

    equality: Equality
    early_exits: dict[str, None] = field(default_factory=dict)
    _exited: list[Array] = field(default_factory=list)  # flags of the jaxpr that is being traced: 1 if left early

    def take_exited(self) -> Array:
        """Returns 1 if this rank has left a loop early in what was traced since the last call, else 0."""
        exited, self._exited = self._exited, []
        return functools.reduce(lax.max, exited, jnp.int32(0))

    def _inside(self, jaxpr: Jaxpr, args: Sequence[Array], known: Sequence[Known], role: Role) -> list[Array]:
        """Traces a jaxpr that an equation holds; returns its results, and last its `exited` flag."""
        # Flags of the enclosing jaxpr are other tracers: they must not mix with those of this one.
        outer, self._exited = self._exited, []
        outs = self.jaxpr(jaxpr, args, known, role)
        exited, self._exited = self.take_exited(), outer
        return [*outs, exited]

    def _outside(self, outs: Sequence[Array]) -> list[Array]:
        """Takes the flag that `_inside` added from the results of the equation around it; returns the others."""
        self._exited.append(outs[-1])
        return [*outs[:-1]]

    def jaxpr(self, jaxpr: Jaxpr, args: Sequence[Array], known: Sequence[Known], role: Role) -> list[Array]:
        """Traces the equations of a jaxpr on `args`, about which so much is known; returns its results."""
        inner, consts = compat.open_jaxpr(jaxpr)
        env: dict[Any, Array] = dict(zip(inner.constvars, consts, strict=False))
        rest = [*inner.constvars[len(consts) :], *inner.invars]
        env.update(zip(rest, args, strict=True))
        facts: dict[Any, Known] = dict(zip(rest, known, strict=True))
        exchanged = self._exchanged(inner, role)
        for eqn in inner.eqns:
            role = replace(role, feeds_exchange=not exchanged.isdisjoint(eqn.outvars))
            values = [a.val if isinstance(a, compat.Literal) else env[a] for a in eqn.invars]
            about = [self.equality.read(facts, a) for a in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, values, about, role), strict=True))
            facts.update(zip(eqn.outvars, self.equality.results(eqn, about), strict=True))
        return [a.val if isinstance(a, compat.Literal) else env[a] for a in inner.outvars]

    def _exchanged(self, inner: Jaxpr, role: Role) -> set[Atom]:
        """Returns the variables on which an exchange depends; none where this rank's results are always kept."""
        if role.active is None:
            return set()
        # A backward walk. The jaxpr's own results count if the equation around it feeds an exchange.
        found = {a for a in inner.outvars if role.feeds_exchange and not isinstance(a, compat.Literal)}
        for eqn in reversed(inner.eqns):
            if not found.isdisjoint(eqn.outvars) or self.equality.exchanges(eqn):
                found.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
        return found

    def equation(self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role) -> Sequence[Array]:
        """Traces one equation, rewritten if it exchanges, calls back or may not end on an inactive rank."""
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
                diverges = exchanges and not self.equality.exchange_axes(eqn) <= known[0].axes
                return (self._divergent_cond if diverges else self._cond)(eqn, values, known, role)
            if name in INLINED:
                return self.jaxpr(inside[0], values, known, role)
            if calls_back:
                return _callback_if_active(eqn, values, role)
        return compat.bind_equation(eqn, values, eqn.params)

    def _while(self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role) -> Sequence[Array]:
        """Traces a `while`, with a vote if ranks may diverge and an early exit if this rank may be inactive."""
        params, equality = eqn.params, self.equality
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried, more = equality.while_carry(eqn, known)
        made, needed = equality.exchanges(eqn), equality.exchange_axes(eqn)
        votes = any(x.axes for x in made) and (role.always_vote or not needed <= more.axes)
        # The next iteration reads what this one computes, so it feeds an exchange if the loop makes one.
        feeds = role.active is not None and (role.feeds_exchange or bool(made))
        # A rank that takes no part ends the outermost vote at once: loops inside need neither its presence nor a vote
        # of their own for its sake.
        inner = replace(role, present=None, always_vote=role.always_vote and not votes, feeds_exchange=feeds)
        # An inactive rank must not leave a loop that others go on with: not where ranks decide together, and not where
        # peers wait for its messages. How many mpi4jax calls each rank makes is the step's own affair.
        peers_wait = needed or any(not x.axes for x in made)
        may_leave = role.active is not None and (votes or not (peers_wait or equality.decided_together(eqn, more)))
        # An exchange in the predicate reads the carries of all ranks: a rank that has finished may resume.
        may_resume = holds_exchange(params["cond_jaxpr"], equality.sizes, equality.wire)
        limit = (FROZEN if votes else FROZEN_LOCAL) if may_leave and (role.feeds_exchange or may_resume) else None
        if votes:
            _check_no_refs(eqn)

        def goes_on(carry: Sequence[Array], active: Array | None) -> list[Array]:
            # The predicate is evaluated with the body and carried along: the loop's own `cond` holds the vote alone.
            facts, decides = [*known[:n], *carried], replace(inner, active=active, feeds_exchange=True)
            return self._inside(params["cond_jaxpr"], [*values[:n], *carry], facts, decides)

        def cond(state: _State) -> Array:
            _, count, _, going = state
            going = _any(going)
            if may_leave and role.active is not None:
                kept = role.active if limit is None else lax.bitwise_or(role.active, lax.lt(count, jnp.int32(limit)))
                going = lax.bitwise_and(going, kept)
            return self._vote(eqn, going, role) if votes else going

        def body(
            state: _State,
        ) -> _State:
            carry, count, exited, going = state
            active = _both(role.active, _any(going)) if votes else role.active
            facts, args = [*known[n:m], *carried], [*values[n:m], *carry]
            *new, within = self._inside(params["body_jaxpr"], args, facts, replace(inner, active=active))
            # After its own end a rank keeps its carry, as `vmap` does for an element. What the body returns unchanged
            # needs no select.
            if votes or jnp.ndim(going):
                new = [x if y is x else lax.select_n(_like(x, going), x, y) for x, y in zip(carry, new, strict=True)]
            going, decided = goes_on(new, active)
            return new, lax.add(count, jnp.int32(1)), functools.reduce(lax.max, (exited, within, decided)), going

        init = [jnp.asarray(v) for v in values[m:]]
        going, exited = goes_on(init, role.active)
        carry, count, exited, going = lax.while_loop(cond, body, (init, jnp.int32(0), exited, going))
        if limit is not None and role.active is not None:
            # An inactive rank for which the loop was not over at the limit has left it early.
            self.early_exits[compat.source_of(eqn)] = None
            left = lax.bitwise_and(_any(going), lax.bitwise_not(role.active))
            left = lax.bitwise_and(left, lax.ge(count, jnp.int32(limit)))
            exited = lax.max(exited, lax.convert_element_type(left, jnp.int32))
        self._exited.append(exited)
        return carry

    def _vote(self, eqn: Equation, going: Array, role: Role) -> Array:
        """Returns whether the loop goes on: some rank wants to, and every rank takes part in the step.

        A rank that takes no part votes 2, which outvotes every 1. The step has failed then, on all ranks.
        """
        going = lax.convert_element_type(going, jnp.int32)
        if role.present is not None:
            going = lax.select(lax.eq(role.present, jnp.int32(1)), going, jnp.int32(2))
        return lax.eq(self._max(eqn, going), jnp.int32(1))

    def _max(self, eqn: Equation, value: Array) -> Array:
        axes, groups = self.voters(eqn)
        return lax.pmax(value, axes, axis_index_groups=groups)

    def voters(self, eqn: Equation) -> tuple[tuple[str, ...], Any]:
        """Returns the axes, and the groups along them, of the ranks that exchange with one another in `eqn`."""
        needed = self.equality.exchange_axes(eqn)
        made = [x for x in self.equality.exchanges(eqn) if x.axes]
        over = {(x.axes, dict(x.params).get("groups")) for x in made if not needed or needed & set(x.axes)}
        if len(over) == 1:
            return next(iter(over))
        # Exchanges over different sets of ranks: only all ranks along all these axes can keep them in step.
        named = {a for x in made for a in x.axes}
        return tuple(a for a in self.equality.sizes if a in (needed or named)), None

    def _scan(self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role) -> Sequence[Array]:
        """Traces a `scan`, which all ranks end together, for the loops inside it."""
        params, (n_consts, n_carry) = eqn.params, compat.scan_counts(eqn)
        carried, _ = self.equality.scan_carry(eqn, known)
        facts = [*known[:n_consts], *carried, *known[n_consts + n_carry :]]
        inner = replace(role, feeds_exchange=role.feeds_exchange or bool(self.equality.exchanges(eqn)))

        def body(state: tuple[list[Array], Array], xs: list[Array]) -> tuple[tuple[list[Array], Array], list[Array]]:
            carry, before = state
            *outs, exited = self._inside(params["jaxpr"], [*values[:n_consts], *carry, *xs], facts, inner)
            return (outs[:n_carry], lax.max(before, exited)), outs[n_carry:]

        init, xs = (values[n_consts:][:n_carry], jnp.int32(0)), values[n_consts + n_carry :]
        (carry, exited), ys = lax.scan(
            body, init, xs, params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        self._exited.append(exited)
        return [*carry, *ys]

    def _cond(self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role) -> Sequence[Array]:
        branches = [self._branch(b, known, role) for b in eqn.params["branches"]]
        return self._outside(lax.switch(_index(eqn, values), branches, *values[1:]))

    def _branch(self, branch: Jaxpr, known: Sequence[Known], role: Role) -> Callable[..., list[Array]]:
        return lambda *operands: self._inside(branch, operands, known[1:], role)

    def _divergent_cond(
        self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role
    ) -> Sequence[Array]:
        """Traces a conditional that ranks may decide differently.

        Under `vmap` every branch runs for every element. Here all ranks run a branch that exchanges if any of them
        takes it, on which they agree by another maximum; a rank that does not take it is inactive there.

        Raises:
            CutError: The conditional also calls mpi4jax, or writes to a mutable array.
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
        _check_no_refs(eqn)
        types = [*map(compat.array_type, eqn.outvars), jax.ShapeDtypeStruct((), jnp.int32)]
        zeros = lambda *_: [lax.full(t.shape, 0, t.dtype) for t in types]  # noqa: E731
        mine = [lax.eq(index, jnp.int32(n)) for n in takers]
        # One element a branch: whether any rank takes it.
        anyone = self._max(eqn, lax.convert_element_type(jnp.stack(mine), jnp.int32)) == jnp.int32(1)
        # First the branches without exchanges, one of which each rank may take alone, then the others one by one.
        without = [zeros if n in takers else self._branch(b, known, role) for n, b in enumerate(branches)]
        outs = self._outside(lax.switch(index, without, *operands))
        for position, (n, own) in enumerate(zip(takers, mine, strict=True)):
            branch = self._branch(branches[n], known, replace(role, active=_both(role.active, own)))
            taken = lax.index_in_dim(anyone, position, keepdims=False)
            there = self._outside(lax.cond(taken, branch, zeros, *operands))
            outs = [lax.select_n(own, x, y) for x, y in zip(outs, there, strict=True)]
        return outs


def _check_no_refs(eqn: Equation) -> None:
    """Refuses a mutable array in a loop or conditional that an inactive rank runs as well: its writes can't be undone.

    Results are selected afterwards, so an inactive rank's are dropped; what it has written stays.
    """
    if not any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        return
    if eqn.primitive.name == "cond":
        raise CutError(
            f"the conditional at {compat.source_of(eqn)} exchanges in a branch, uses a mutable array from outside of"
            " it, and ranks may decide it differently. A rank that does not take the branch runs it as well, for the"
            " sake of the exchange, and would write to the array. Let the branch return the array as a value, or let"
            " all ranks decide alike, e.g. by `jax.lax.pmax(predicate, axis)`."
        )
    raise CutError(
        f"the loop at {compat.source_of(eqn)} exchanges, writes to a mutable array from outside of it, and may make"
        " another number of iterations on each rank: a rank that is through would go on writing. Carry the array"
        " through the loop as a value."
    )


def _index(eqn: Equation, values: Sequence[Array]) -> Array:
    last = len(eqn.params["branches"]) - 1
    return lax.clamp(jnp.int32(0), lax.convert_element_type(values[0], jnp.int32), jnp.int32(last))


def _any(going: Array) -> Array:
    """Returns whether a loop goes on for any element of an inner `vmap`, whose predicate is an array."""
    return lax.reduce_or(going, tuple(range(jnp.ndim(going)))) if jnp.ndim(going) else going


def _both(active: Array | None, going: Array) -> Array:
    return going if active is None else lax.bitwise_and(active, going)


def _like(x: Array, mask: Array) -> Array:
    """Returns a mask, whose dimensions are none or the leading ones of `x`, in the shape that `select_n` takes."""
    if jnp.ndim(mask) in (0, jnp.ndim(x)):
        return mask
    return lax.broadcast_in_dim(mask, jnp.shape(x), tuple(range(jnp.ndim(mask))))


def _callback_if_active(eqn: Equation, values: list[Array], role: Role) -> Sequence[Array]:
    """Traces a callback that is made only where this rank's results are kept.

    Raises:
        CutError: The callback returns values, for which an inactive rank has no substitute.
    """
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
