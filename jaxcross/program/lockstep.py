"""Rewrites loops that contain exchanges, so that all ranks make the same number of iterations.

**Problem.** Ranks may need different numbers of iterations of a loop. If one of them left early,
the others would wait for it forever in their next exchange.

**Idea.** `jax.vmap` faces a similar problem with the elements of a batch. It runs the loop's body
until the predicate is false for every element, and freezes the carry of those that have finished.
We do the same with ranks instead of elements: before each iteration, the ranks vote on whether any
of them needs to continue. A rank that has finished keeps running the body on its last carry so that
it takes part in the exchanges, but discards the results.

The vote is a four-byte maximum over the axes that the loop exchanges over. We skip it if
`jaxcross.program.equality` can prove that the predicate is equal on all these ranks.

**Nested loops.** These are the hard part. A rank that has finished the outer loop still runs its
body for the sake of the others, including any inner loops. We call such a rank *inactive*. On its
stale values, an inner loop might never end, so an inactive rank leaves an inner loop

- together with the other ranks, if they decide jointly, or if there's no vote because they all
  decide the same;
- immediately, if no exchange depends on the inner loop's results;
- after `FROZEN` or `FROZEN_LOCAL` iterations otherwise. The rank then has to exchange a value that
  `vmap` wouldn't produce. To make sure that nobody uses this value, the rank also counts itself in
  a sum (`decision.EarlyExit`); if the count isn't zero, the step fails on every rank.

**Side effects.** Discarding an inactive rank's results isn't enough if it does something that can't
be undone. So it never calls back into Python, and if it would write to a mutable array from outside
of the loop, tracing the step raises a `CutError`.

**Ranks that take no part.** A rank that has failed, or that doesn't take the branch around the
loop, runs the loop on zeros. It can tell because one of the loop's operands is a flag that's 1 on
every other rank. It then votes 2, which outvotes everyone else, so the loop ends on all ranks at
once (`_vote`).

**Alternative.** Instead of making all ranks do the same number of iterations, we could raise an
error if they need different numbers. But detecting that would take the very same vote.
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
"""Number of iterations after which an inactive rank stops voting to continue an inner loop.

The limit applies if an exchange depends on the inner loop's results. On the carry that the rank had
when it left the outer loop, the inner loop might never end (nor would it under `vmap`). Even past
the limit, the rank stays in the loop for as long as other ranks need it. For comparison, halving a
float64 until it's zero takes 1,075 iterations.
"""
FROZEN_LOCAL = 1_000_000
"""Number of iterations after which an inactive rank leaves an inner loop without exchanges.

Much higher than `FROZEN`, because no other rank is kept waiting by such a loop.
"""


_State = tuple[list[Array], Array, Array, Array]
"""The state of a rewritten `while`.

Consists of the carry, the number of iterations so far, whether an inner loop was left early, and
the predicate.
"""


@dataclass(frozen=True, slots=True)
class Role:
    """How to trace a jaxpr, depending on what happens to this rank's results.

    Attributes:
        active: Whether the results are kept. None if they always are, i.e. outside of any loop with
            a vote.
        present: 0 on a rank that takes no part in the step, 1 elsewhere; None if every rank takes
            part.
        always_vote: Whether every loop needs a vote because the jaxpr may run on zeros.
        feeds_exchange: Whether an exchange depends on the results even if they are discarded.
    """

    active: Array | None = None
    present: Array | None = None
    always_vote: bool = False
    feeds_exchange: bool = False


def emit(flat: Emitter, eqn: Equation, args: list[Atom]) -> Sequence[Atom]:
    """Emits a loop that exchanges, rewritten if its number of iterations may differ by rank."""
    equality = Equality(flat.axes, flat.wire)
    known = flat.known(args)
    equality.results(eqn, known)
    named = any(x.axes for x in equality.exchanges(eqn))
    # If all ranks end the loop together, it can stay as it is, unless it may run on zeros, e.g.
    # because a rank doesn't take the branch around it. On zeros, only a vote guarantees that it
    # ends.
    if not (equality.diverges or (named and flat.always_vote and _holds_while(eqn))):
        outs = flat.keep(eqn, args)
        # We have proved that no vote is needed, but the proof assumes that all ranks have traced
        # the same code, and a Python number in that code may still differ between them. So before
        # the first step, the ranks compare a hash of everything that determines the number of
        # iterations.
        if equality.basis:
            flat.until[outs[0]] = fingerprint(equality.basis)
        return outs

    rewriter = _Rewriter(Equality(flat.axes, flat.wire))

    def rewritten(present: Array, *values: Array) -> Sequence[Array]:
        role = Role(present=present, always_vote=flat.always_vote)
        outs = rewriter.equation(eqn, list(values), known, role)
        return [*outs, rewriter.take_exited()] if rewriter.early_exits else outs

    # The first operand is 0 on a rank that takes no part in the step, and 1 on all others.
    atoms = [flat.presence(), *args]
    before = len(flat.eqns)
    types = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type)
        for t in map(compat.array_type, atoms)
    ]
    closed = jax.make_jaxpr(rewritten, axis_env=list(flat.axes.items()))(*types)
    outs = flat.inline(closed, atoms, flat.keep)
    if rewriter.early_exits:
        # Tie the count to the loop's exchanges, so that it's kept whenever any of their results is
        # read.
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
    """Whether an equation, or any equation inside it, calls back.

    Computation, exchanges and writes to mutable arrays don't count.
    """
    # mpi4jax's primitives have the same kind of effects as callbacks, but they only exchange.
    if eqn.primitive.name.endswith("_mpi") or any(
        isinstance(a.aval, AbstractRef) for a in eqn.invars
    ):
        return False
    inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
    if inside:
        return any(map(_calls_back, inside))
    return any(not compat.is_named_axis_effect(e) for e in eqn.effects)


@dataclass(slots=True)
class _Rewriter:
    """Retraces equations, adding a vote to the loops that need it.

    A flag, `exited`, tells us whether an inner loop was left early. JAX traces the body of a loop
    or branch as a separate jaxpr, so a flag that's set in there can only get out as a result.
    That's why everything traced by `_inside` returns the flag as an additional result, and loops
    carry it along.

    Attributes:
        equality: Proves that values are equal on all ranks.
        early_exits: The lines of inner loops that an inactive rank may leave early even though an
            exchange depends on their results. A dict, so that each line is kept once and in order.
    """

    equality: Equality
    early_exits: dict[str, None] = field(default_factory=dict)
    # Flags of the jaxpr being traced: 1 if a loop was left early.
    _exited: list[Array] = field(default_factory=list)

    def take_exited(self) -> Array:
        """Returns 1 if this rank has left a loop early since the last call, else 0.

        This covers all loops traced since then.
        """
        exited = self._exited
        self._exited = []
        return functools.reduce(lax.max, exited, jnp.int32(0))

    def _inside(
        self, jaxpr: Jaxpr, args: Sequence[Array], known: Sequence[Known], role: Role
    ) -> list[Array]:
        """Traces a jaxpr inside an equation; returns its results, followed by its `exited` flag."""
        # Set the enclosing jaxpr's flags aside. They're tracers of a different trace, so they
        # mustn't be combined with the flags in here.
        outer = self._exited
        self._exited = []
        outs = self.jaxpr(jaxpr, args, known, role)
        exited = self.take_exited()
        self._exited = outer
        return [*outs, exited]

    def _outside(self, outs: Sequence[Array]) -> list[Array]:
        """Pops the flag added by `_inside` off an equation's results; returns the rest."""
        self._exited.append(outs[-1])
        return [*outs[:-1]]

    def jaxpr(
        self, jaxpr: Jaxpr, args: Sequence[Array], known: Sequence[Known], role: Role
    ) -> list[Array]:
        """Traces a jaxpr's equations on `args`; returns its results.

        `known` holds what we know about `args`.
        """
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
        """Returns the variables that an exchange depends on.

        Empty if this rank's results are always kept, in which case it doesn't matter what the
        exchanges depend on.
        """
        if role.active is None:
            return set()
        # Walk backwards through the equations. If the equation around this jaxpr feeds an exchange,
        # so do the jaxpr's own results.
        found = {
            a for a in inner.outvars if role.feeds_exchange and not isinstance(a, compat.Literal)
        }
        for eqn in reversed(inner.eqns):
            if not found.isdisjoint(eqn.outvars) or self.equality.exchanges(eqn):
                found.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
        return found

    def equation(
        self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role
    ) -> Sequence[Array]:
        """Traces a single equation.

        Most equations are traced unchanged, but those with exchanges are rewritten. If this rank
        may be inactive, i.e. only running for the sake of the others, we also rewrite callbacks,
        and equations with a `while` loop, which might never end on this rank's values.
        """
        name = eqn.primitive.name
        inside = list(compat.sub_jaxprs(eqn))
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

    def _while(
        self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role
    ) -> Sequence[Array]:
        """Traces a `while` loop, adding a vote if ranks may diverge.

        If this rank may be inactive, the loop gets an early exit, too.
        """
        params = eqn.params
        equality = self.equality
        n = params["cond_nconsts"]
        m = n + params["body_nconsts"]
        carried, more = equality.while_carry(eqn, known)
        made = equality.exchanges(eqn)
        needed = equality.exchange_axes(eqn)
        votes = any(x.axes for x in made) and (role.always_vote or not needed <= more.axes)
        # Each iteration reads the results of the previous iteration, so if the loop contains
        # exchanges, its results feed an exchange.
        feeds = role.active is not None and (role.feeds_exchange or bool(made))
        # A rank that takes no part in the step, e.g. because it has failed, ends the outermost
        # voting loop right away. Loops inside it don't have to check for such a rank, and don't
        # need a vote just because of it.
        inner = replace(
            role, present=None, always_vote=role.always_vote and not votes, feeds_exchange=feeds
        )
        # An inactive rank stays in this loop for one of two reasons: all ranks decide jointly when
        # the loop ends, or other ranks wait for this rank's messages (which include mpi4jax calls).
        # How many of these calls a rank makes is up to the step, so we can't leave any out.
        peers_wait = needed or any(not x.axes for x in made)
        may_leave = role.active is not None and (
            votes or not (peers_wait or equality.decided_together(eqn, more))
        )
        # A predicate that contains exchanges depends on the values of all ranks. It may become true
        # again on a rank that has already finished, which then has to resume.
        may_resume = holds_exchange(params["cond_jaxpr"], equality.sizes, equality.wire)
        limit = None
        if may_leave and (role.feeds_exchange or may_resume):
            limit = FROZEN if votes else FROZEN_LOCAL
        if votes:
            _check_no_refs(eqn)

        def evaluate_predicate(carry: Sequence[Array], active: Array | None) -> list[Array]:
            # JAX only lets a loop's `cond` function return the predicate, not the `exited` flag as
            # well. That's why we evaluate the predicate in the body and carry its value over to the
            # next iteration, which leaves nothing but the vote for the actual `cond` function.
            facts = [*known[:n], *carried]
            decides = replace(inner, active=active, feeds_exchange=True)
            return self._inside(params["cond_jaxpr"], [*values[:n], *carry], facts, decides)

        def cond(state: _State) -> Array:
            _, count, _, going = state
            going = _any(going)
            if may_leave and role.active is not None:
                # If nobody needs an inactive rank's result, it leaves the loop at once. Otherwise,
                # it continues up to the limit, because the loop may well end on its own before
                # that.
                kept = role.active
                if limit is not None:
                    kept = lax.bitwise_or(kept, lax.lt(count, jnp.int32(limit)))
                going = lax.bitwise_and(going, kept)
            return self._vote(eqn, going, role) if votes else going

        def body(
            state: _State,
        ) -> _State:
            carry, count, exited, going = state
            active = _both(role.active, _any(going)) if votes else role.active
            facts = [*known[n:m], *carried]
            args = [*values[n:m], *carry]
            *new, within = self._inside(
                params["body_jaxpr"], args, facts, replace(inner, active=active)
            )
            # A rank that has finished keeps the values it finished with, like an element under
            # `vmap`, so select the old values there. If the body returns a value unchanged, there's
            # nothing to select.
            if votes or jnp.ndim(going):
                new = [
                    x if y is x else lax.select_n(_like(x, going), x, y)
                    for x, y in zip(carry, new, strict=True)
                ]
            going, decided = evaluate_predicate(new, active)
            return (
                new,
                lax.add(count, jnp.int32(1)),
                functools.reduce(lax.max, (exited, within, decided)),
                going,
            )

        init = [jnp.asarray(v) for v in values[m:]]
        going, exited = evaluate_predicate(init, role.active)
        carry, count, exited, going = lax.while_loop(
            cond, body, (init, jnp.int32(0), exited, going)
        )
        if limit is not None and role.active is not None:
            # An inactive rank left early if it hit the limit while its predicate was still true.
            self.early_exits[compat.source_of(eqn)] = None
            left = lax.bitwise_and(_any(going), lax.bitwise_not(role.active))
            left = lax.bitwise_and(left, lax.ge(count, jnp.int32(limit)))
            exited = lax.max(exited, lax.convert_element_type(left, jnp.int32))
        self._exited.append(exited)
        return carry

    def _vote(self, eqn: Equation, going: Array, role: Role) -> Array:
        """Returns whether the loop continues.

        The ranks take the maximum of their votes, which are 1 to continue and 0 to stop, so the
        loop goes on as long as any rank needs it. A rank that takes no part in the step, e.g.
        because it has failed, votes 2. That outvotes every 1 and ends the loop on all ranks (on
        which the step has failed by then anyway).
        """
        going = lax.convert_element_type(going, jnp.int32)
        if role.present is not None:
            going = lax.select(lax.eq(role.present, jnp.int32(1)), going, jnp.int32(2))
        return lax.eq(self._max(eqn, going), jnp.int32(1))

    def _max(self, eqn: Equation, value: Array) -> Array:
        axes, groups = self.voters(eqn)
        return lax.pmax(value, axes, axis_index_groups=groups)

    def voters(self, eqn: Equation) -> tuple[tuple[str, ...], Any]:
        """Returns the axes over which ranks vote on `eqn`, and the groups of ranks along them."""
        needed = self.equality.exchange_axes(eqn)
        made = [x for x in self.equality.exchanges(eqn) if x.axes]
        over = {
            (x.axes, dict(x.params).get("groups"))
            for x in made
            if not needed or needed & set(x.axes)
        }
        # If all exchanges stay within the same groups of ranks, each group can vote on its own.
        if len(over) == 1:
            return next(iter(over))
        # The loop's exchanges go over different sets of ranks, e.g. some over the rows of a mesh
        # and some over its columns. To keep them all in lockstep, we need a single vote over all
        # axes involved.
        named = {a for x in made for a in x.axes}
        return tuple(a for a in self.equality.sizes if a in (needed or named)), None

    def _scan(
        self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role
    ) -> Sequence[Array]:
        """Traces a `scan`, which has a fixed length itself but may contain loops that don't."""
        params = eqn.params
        n_consts, n_carry = compat.scan_counts(eqn)
        carried, _ = self.equality.scan_carry(eqn, known)
        facts = [*known[:n_consts], *carried, *known[n_consts + n_carry :]]
        inner = replace(
            role, feeds_exchange=role.feeds_exchange or bool(self.equality.exchanges(eqn))
        )

        def body(
            state: tuple[list[Array], Array], xs: list[Array]
        ) -> tuple[tuple[list[Array], Array], list[Array]]:
            carry, before = state
            *outs, exited = self._inside(
                params["jaxpr"], [*values[:n_consts], *carry, *xs], facts, inner
            )
            return (outs[:n_carry], lax.max(before, exited)), outs[n_carry:]

        init = (values[n_consts:][:n_carry], jnp.int32(0))
        xs = values[n_consts + n_carry :]
        (carry, exited), ys = lax.scan(
            body, init, xs, params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        self._exited.append(exited)
        return [*carry, *ys]

    def _cond(
        self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role
    ) -> Sequence[Array]:
        branches = [self._branch(b, known, role) for b in eqn.params["branches"]]
        return self._outside(lax.switch(_index(eqn, values), branches, *values[1:]))

    def _branch(
        self, branch: Jaxpr, known: Sequence[Known], role: Role
    ) -> Callable[..., list[Array]]:
        return lambda *operands: self._inside(branch, operands, known[1:], role)

    def _divergent_cond(
        self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role
    ) -> Sequence[Array]:
        """Traces a conditional that ranks may decide differently.

        If any rank takes a branch with exchanges, all ranks run it, just as `vmap` runs every
        branch for every element. They find out about it through another maximum, on top of the
        votes for loops. A rank that doesn't take the branch runs it as an inactive rank, i.e. it
        takes part in the exchanges but discards the results.
        """
        branches = eqn.params["branches"]
        operands = values[1:]
        index = _index(eqn, values)
        equality = self.equality
        takers = [
            n for n, b in enumerate(branches) if holds_exchange(b, equality.sizes, equality.wire)
        ]
        # All ranks run a branch with exchanges as soon as any rank takes it. But only the ranks
        # that really take a branch may make its mpi4jax calls, so we can't support them here.
        if any(not x.axes for x in equality.exchanges(eqn)):
            raise CutError(
                f"the conditional at {compat.source_of(eqn)} calls mpi4jax and exchanges over "
                "named axes, and ranks may take different branches: their exchanges would be "
                "mixed up. Let all ranks take the same branch, e.g. by `jax.lax.pmax(predicate, "
                "axis)`, or move the calls or the exchanges out of it. "
                "See docs/reference/limits-steps.md#steps-that-call-mpi4jax."
            )
        _check_no_refs(eqn)
        types = [*map(compat.array_type, eqn.outvars), jax.ShapeDtypeStruct((), jnp.int32)]
        zeros = lambda *_: [lax.full(t.shape, 0, t.dtype) for t in types]  # noqa: E731
        mine = [lax.eq(index, jnp.int32(n)) for n in takers]
        # One element per branch: whether any rank takes it.
        anyone = self._max(eqn, lax.convert_element_type(jnp.stack(mine), jnp.int32)) == jnp.int32(
            1
        )
        # First, trace the branches without exchanges as an ordinary conditional, in which each rank
        # runs the branch it takes, if it's among them. Then trace the branches with exchanges, one
        # by one.
        without = [
            zeros if n in takers else self._branch(b, known, role) for n, b in enumerate(branches)
        ]
        outs = self._outside(lax.switch(index, without, *operands))
        for position, (n, own) in enumerate(zip(takers, mine, strict=True)):
            branch = self._branch(branches[n], known, replace(role, active=_both(role.active, own)))
            taken = lax.index_in_dim(anyone, position, keepdims=False)
            there = self._outside(lax.cond(taken, branch, zeros, *operands))
            outs = [lax.select_n(own, x, y) for x, y in zip(outs, there, strict=True)]
        return outs


def _check_no_refs(eqn: Equation) -> None:
    """Raises if an inactive rank would write to a mutable array in this loop or conditional.

    An inactive rank, which runs a loop or branch only for the sake of the others, runs the same
    equations as they do, and we discard its results afterwards. A write to a mutable array can't be
    undone, though.
    """
    if not any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        return
    if eqn.primitive.name == "cond":
        raise CutError(
            f"the conditional at {compat.source_of(eqn)} exchanges in a branch, uses a mutable "
            "array from outside of it, and ranks may take different branches. A rank that does not "
            "take the branch runs it as well, for the sake of the exchange, and would write to the "
            "array. Let the branch return the array as a value, or let all ranks take the "
            "same branch, e.g. by `jax.lax.pmax(predicate, axis)`. "
            "See docs/reference/limits-steps.md#loops."
        )
    raise CutError(
        f"the loop at {compat.source_of(eqn)} exchanges, writes to a mutable array from outside of "
        "it, and may make a different number of iterations on each rank: a rank that has finished "
        "still runs it with the others, and would write to the array. Carry the array through the "
        "loop as a value. "
        "See docs/reference/limits-steps.md#loops."
    )


def _index(eqn: Equation, values: Sequence[Array]) -> Array:
    last = len(eqn.params["branches"]) - 1
    return lax.clamp(jnp.int32(0), lax.convert_element_type(values[0], jnp.int32), jnp.int32(last))


def _any(going: Array) -> Array:
    """Returns whether a loop continues for any element of an inner `vmap`.

    If the step calls `vmap`, a loop's predicate may be an array.
    """
    return lax.reduce_or(going, tuple(range(jnp.ndim(going)))) if jnp.ndim(going) else going


def _both(active: Array | None, going: Array) -> Array:
    return going if active is None else lax.bitwise_and(active, going)


def _like(x: Array, mask: Array) -> Array:
    """Returns a mask in the shape that `select_n` expects.

    The mask is either a scalar, or its dimensions are the leading dimensions of `x`.
    """
    if jnp.ndim(mask) in (0, jnp.ndim(x)):
        return mask
    return lax.broadcast_in_dim(mask, jnp.shape(x), tuple(range(jnp.ndim(mask))))


def _callback_if_active(eqn: Equation, values: list[Array], role: Role) -> Sequence[Array]:
    """Traces a callback that only happens if this rank's results are kept."""
    if list(compat.sub_jaxprs(eqn)) or not all(isinstance(v, compat.DropVar) for v in eqn.outvars):
        raise CutError(
            f"a callback that returns values is not supported at {compat.source_of(eqn)}: it is "
            "in a loop that exchanges and may make a different number of iterations on each rank. "
            "A rank that has finished still runs the loop with the others, and would call back. "
            "Move the callback out of the loop, or let all ranks make the same number of "
            "iterations, e.g. by `jax.lax.pmax(n, axis)`. "
            "See docs/reference/limits-steps.md#loops."
        )
    zeros = lambda *_: [lax.full(t.shape, 0, t.dtype) for t in map(compat.array_type, eqn.outvars)]  # noqa: E731
    called = lambda *args: compat.bind_equation(eqn, args, eqn.params)  # noqa: E731
    return lax.cond(role.active, called, zeros, *values)
