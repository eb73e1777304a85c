"""Rewrites loops that contain exchanges, so that all ranks make the same number of iterations.

**Problem.** A rank may need fewer iterations of a loop than the others. If it left the loop early,
the other ranks would wait for it forever in their next exchange.

**Idea.** `jax.vmap` has a similar problem with the elements of a batch. It runs the loop's body
until the predicate is false for every element, and keeps the carry of elements that have finished.
We do the same with ranks instead of elements: before each iteration, the ranks vote on whether any
of them needs to continue. A rank that has finished still runs the body on its last carry, so that
it takes part in the exchanges, but discards the results.

The vote is a maximum of four bytes over the axes that the loop exchanges over. We leave it out if
`jaxcross.program.equality` proves that the predicate is equal on all these ranks.

**Nested loops.** These are the hard part. A rank that has finished the outer loop still runs its
body for the sake of the others, and with it the inner loops. We call such a rank *inactive*. On its
old values, an inner loop might never end. So an inactive rank leaves an inner loop

- together with the other ranks, if they decide together, or if the loop has no vote because all
  ranks decide the same;
- at once, if nothing that is exchanged depends on the inner loop's results;
- after `FROZEN` or `FROZEN_LOCAL` iterations, if something does. The rank then has to exchange a
  value that `vmap` wouldn't give. To make sure that nobody uses this value, the rank also counts
  itself in a sum (`decision.EarlyExit`), and if the count isn't zero, the step fails on every rank.

**Side effects.** An inactive rank discards its results, but that isn't enough if it has done
something that can't be undone. So it doesn't call back into Python. And if it would write to a
mutable array from outside of the loop, tracing the step raises a `CutError`.

**Ranks that take no part.** A rank that has failed, or that doesn't take the branch around the
loop, runs the loop on zeros. Among the loop's operands is a flag that's 1 on all other ranks, so
the rank can tell. It votes 2, which is greater than any other vote, so the loop ends on all ranks
at once (`_vote`).

**Alternative.** We could raise an error if ranks need different numbers of iterations, instead of
making these numbers equal. But to detect the difference, the ranks would need the same vote.
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
"""After how many iterations an inactive rank stops voting to continue an inner loop.

The limit applies if an exchange depends on the inner loop's results. On the carry with which the
rank left the outer loop, the inner loop might never end, and under `vmap` it wouldn't either. Even
after the limit, the rank stays in the loop for as long as other ranks need it. For comparison,
halving a float64 until it's zero takes 1,075 iterations.
"""
FROZEN_LOCAL = 1_000_000
"""After how many iterations an inactive rank leaves an inner loop that exchanges nothing.

This limit is much higher than `FROZEN`, because no other rank waits for this rank in such a loop.
"""


_State = tuple[list[Array], Array, Array, Array]
"""The state of a rewritten `while`.

It consists of the carry, the number of iterations so far, whether an inner loop was left early, and
the predicate.
"""


@dataclass(frozen=True, slots=True)
class Role:
    """How a jaxpr is traced, given what happens to this rank's results.

    Attributes:
        active: Whether the results are kept. None if they always are, which is the case outside of
            every loop with a vote.
        present: 0 on a rank that takes no part in the step, 1 elsewhere; None if every rank takes
            part.
        always_vote: Whether every loop needs a vote, because the jaxpr may run on zeros.
        feeds_exchange: Whether an exchange depends on the results even if they aren't kept.
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
    # If all ranks end the loop together, it can stay as it is. The exception is a loop that may run
    # on zeros, e.g. because a rank doesn't take the branch around it. On zeros, it's only certain
    # to end if the ranks vote.
    if not (equality.diverges or (named and flat.always_vote and _holds_while(eqn))):
        outs = flat.keep(eqn, args)
        # We have proved that the ranks needn't vote, but the proof assumes that all ranks have
        # traced the same code. A Python number in the code may still differ between ranks. So
        # before the first step, the ranks compare a hash of everything that the number of
        # iterations follows from.
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
        # Tie the count to the loop's exchanges, so that it's kept whenever one of their results is
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
    """Whether an equation, or an equation inside it, calls back.

    Computing, exchanging and writing to a mutable array don't count.
    """
    # mpi4jax's primitives have effects like a callback, but they only exchange.
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
    """Traces equations again, adding a vote to the loops that need one.

    We need to know whether an inner loop was left early, so we compute a flag, `exited`. JAX traces
    the body of a loop or branch as a separate jaxpr, so a flag that's set inside can only leave it
    as a result. Everything that `_inside` traces therefore returns the flag as an additional
    result, and loops carry it along.

    Attributes:
        equality: Proves values equal on all ranks.
        early_exits: The lines of inner loops that an inactive rank may leave before their end
            although an exchange depends on their results. A dict, so that each line is kept once
            and in order.
    """

    equality: Equality
    early_exits: dict[str, None] = field(default_factory=dict)
    # Flags of the jaxpr that is being traced: 1 if a loop was left early.
    _exited: list[Array] = field(default_factory=list)

    def take_exited(self) -> Array:
        """Returns 1 if this rank left a loop early since the last call, else 0.

        This covers the loops in everything that was traced since then.
        """
        exited = self._exited
        self._exited = []
        return functools.reduce(lax.max, exited, jnp.int32(0))

    def _inside(
        self, jaxpr: Jaxpr, args: Sequence[Array], known: Sequence[Known], role: Role
    ) -> list[Array]:
        """Traces a jaxpr inside an equation; returns its results, followed by its `exited` flag."""
        # Put the flags of the enclosing jaxpr aside. They are tracers of another trace, so they
        # mustn't be combined with the flags of this one.
        outer = self._exited
        self._exited = []
        outs = self.jaxpr(jaxpr, args, known, role)
        exited = self.take_exited()
        self._exited = outer
        return [*outs, exited]

    def _outside(self, outs: Sequence[Array]) -> list[Array]:
        """Takes the flag that `_inside` added from an equation's results; returns the others."""
        self._exited.append(outs[-1])
        return [*outs[:-1]]

    def jaxpr(
        self, jaxpr: Jaxpr, args: Sequence[Array], known: Sequence[Known], role: Role
    ) -> list[Array]:
        """Traces the equations of a jaxpr on `args`; returns its results.

        `known` holds the facts about `args`.
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
        """Returns the variables on which an exchange depends.

        If this rank's results are always kept, returns an empty set, because it then doesn't matter
        what the exchanges depend on.
        """
        if role.active is None:
            return set()
        # Go backwards through the equations. If the equation around this jaxpr feeds an exchange,
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
        """Traces one equation.

        Most equations are traced unchanged, but equations with exchanges are rewritten. If this
        rank may be inactive, i.e. run only for the sake of the others, we also rewrite equations
        that call back, and equations with a `while` loop, which might never end on this rank's
        values.
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

        Also adds an early exit if this rank may be inactive.
        """
        params = eqn.params
        equality = self.equality
        n = params["cond_nconsts"]
        m = n + params["body_nconsts"]
        carried, more = equality.while_carry(eqn, known)
        made = equality.exchanges(eqn)
        needed = equality.exchange_axes(eqn)
        votes = any(x.axes for x in made) and (role.always_vote or not needed <= more.axes)
        # Each iteration reads what the one before has computed. So if the loop contains exchanges,
        # its results feed an exchange.
        feeds = role.active is not None and (role.feeds_exchange or bool(made))
        # A rank may take no part in the step, e.g. because it has failed. It then ends the
        # outermost loop that has a vote right away. So the loops inside of that loop don't have to
        # check for such a rank, and don't need a vote just because of it.
        inner = replace(
            role, present=None, always_vote=role.always_vote and not votes, feeds_exchange=feeds
        )
        # An inactive rank, which runs this loop only for the sake of the others, has two reasons to
        # stay. Either all ranks decide together when the loop ends, or other ranks wait for its
        # messages. mpi4jax calls count as messages. How many of these a rank makes is up to the
        # step, so we can't leave any out.
        peers_wait = needed or any(not x.axes for x in made)
        may_leave = role.active is not None and (
            votes or not (peers_wait or equality.decided_together(eqn, more))
        )
        # If the predicate contains exchanges, it depends on the values of all ranks. So on a rank
        # that has finished, the predicate may become true again, and the rank has to resume.
        may_resume = holds_exchange(params["cond_jaxpr"], equality.sizes, equality.wire)
        limit = None
        if may_leave and (role.feeds_exchange or may_resume):
            limit = FROZEN if votes else FROZEN_LOCAL
        if votes:
            _check_no_refs(eqn)

        def evaluate_predicate(carry: Sequence[Array], active: Array | None) -> list[Array]:
            # JAX lets the `cond` function of a loop return nothing but the predicate, so it can't
            # return the `exited` flag as well. That's why we evaluate the predicate in the body,
            # and carry its value along to the next iteration. The `cond` function itself then only
            # contains the vote.
            facts = [*known[:n], *carried]
            decides = replace(inner, active=active, feeds_exchange=True)
            return self._inside(params["cond_jaxpr"], [*values[:n], *carry], facts, decides)

        def cond(state: _State) -> Array:
            _, count, _, going = state
            going = _any(going)
            if may_leave and role.active is not None:
                # If nobody needs the result of an inactive rank, the rank leaves the loop at once.
                # Otherwise, it continues up to the limit, because the loop may end by itself before
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
            # A rank that has finished keeps the values with which it finished, like an element
            # under `vmap`. On such a rank, we therefore select the old values. If the body returns
            # a value unchanged, there's nothing to select.
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
            # An inactive rank left the loop early if it reached the limit while its predicate was
            # still true.
            self.early_exits[compat.source_of(eqn)] = None
            left = lax.bitwise_and(_any(going), lax.bitwise_not(role.active))
            left = lax.bitwise_and(left, lax.ge(count, jnp.int32(limit)))
            exited = lax.max(exited, lax.convert_element_type(left, jnp.int32))
        self._exited.append(exited)
        return carry

    def _vote(self, eqn: Equation, going: Array, role: Role) -> Array:
        """Returns whether the loop continues.

        The ranks take the maximum of their votes: 1 to continue, 0 to end the loop. So the loop
        continues if any rank needs it. A rank that takes no part in the step, e.g. because it has
        failed, votes 2. This outvotes every 1, so the loop ends on all ranks, on which the step has
        then failed anyway.
        """
        going = lax.convert_element_type(going, jnp.int32)
        if role.present is not None:
            going = lax.select(lax.eq(role.present, jnp.int32(1)), going, jnp.int32(2))
        return lax.eq(self._max(eqn, going), jnp.int32(1))

    def _max(self, eqn: Equation, value: Array) -> Array:
        axes, groups = self.voters(eqn)
        return lax.pmax(value, axes, axis_index_groups=groups)

    def voters(self, eqn: Equation) -> tuple[tuple[str, ...], Any]:
        """Returns the axes, and the groups along them, of the ranks that exchange in `eqn`."""
        needed = self.equality.exchange_axes(eqn)
        made = [x for x in self.equality.exchanges(eqn) if x.axes]
        over = {
            (x.axes, dict(x.params).get("groups"))
            for x in made
            if not needed or needed & set(x.axes)
        }
        # If all exchanges are within the same groups of ranks, each group can vote by itself.
        if len(over) == 1:
            return next(iter(over))
        # The exchanges in this loop go over different sets of ranks, e.g. some over the rows of a
        # mesh and some over its columns. To keep all of these ranks in lockstep, we need a single
        # vote over all axes that occur.
        named = {a for x in made for a in x.axes}
        return tuple(a for a in self.equality.sizes if a in (needed or named)), None

    def _scan(
        self, eqn: Equation, values: list[Array], known: Sequence[Known], role: Role
    ) -> Sequence[Array]:
        """Traces a `scan`, in case there are loops inside; the `scan` itself has a fixed length."""
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

        If any rank takes a branch that contains exchanges, all ranks run it, as `vmap` runs every
        branch for every element. The ranks find this out with another maximum, in addition to the
        votes of loops. A rank that doesn't take the branch runs it as an inactive rank, i.e. it
        takes part in the exchanges but discards the results.

        Raises:
            CutError: The conditional also calls mpi4jax, or uses a mutable array.
        """
        branches = eqn.params["branches"]
        operands = values[1:]
        index = _index(eqn, values)
        equality = self.equality
        takers = [
            n for n, b in enumerate(branches) if holds_exchange(b, equality.sizes, equality.wire)
        ]
        # If one rank takes a branch with exchanges, all ranks run it. But an mpi4jax call may only
        # be made by the ranks that really take the branch, so such a branch can't be supported
        # here.
        if any(not x.axes for x in equality.exchanges(eqn)):
            raise CutError(
                f"the conditional at {compat.source_of(eqn)} calls mpi4jax and exchanges over "
                "named axes, and ranks may decide it differently: their exchanges would be mixed "
                "up. Let all ranks decide the same, e.g. by `jax.lax.pmax(predicate, axis)`, or "
                "move the calls or the exchanges out of it. "
                "See docs/reference/limits.md#steps-that-call-mpi4jax."
            )
        _check_no_refs(eqn)
        types = [*map(compat.array_type, eqn.outvars), jax.ShapeDtypeStruct((), jnp.int32)]
        zeros = lambda *_: [lax.full(t.shape, 0, t.dtype) for t in types]  # noqa: E731
        mine = [lax.eq(index, jnp.int32(n)) for n in takers]
        # One element per branch: whether any rank takes it.
        anyone = self._max(eqn, lax.convert_element_type(jnp.stack(mine), jnp.int32)) == jnp.int32(
            1
        )
        # First, trace the branches without exchanges as a normal conditional, in which each rank
        # runs the branch that it takes, if it's one of these. Then, trace the branches with
        # exchanges, one by one.
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

    An inactive rank is one that runs a loop or branch only for the sake of the others. It runs the
    same equations as they do, and we discard its results afterwards. But if it has written to a
    mutable array in the meantime, we can't undo that.
    """
    if not any(isinstance(a.aval, AbstractRef) for a in eqn.invars):
        return
    if eqn.primitive.name == "cond":
        raise CutError(
            f"the conditional at {compat.source_of(eqn)} exchanges in a branch, uses a mutable "
            "array from outside of it, and ranks may decide it differently. A rank that does not "
            "take the branch runs it as well, for the sake of the exchange, and would write to the "
            "array. Let the branch return the array as a value, or let all ranks decide the "
            "same, e.g. by `jax.lax.pmax(predicate, axis)`. "
            "See docs/reference/limits.md#loops."
        )
    raise CutError(
        f"the loop at {compat.source_of(eqn)} exchanges, writes to a mutable array from outside of "
        "it, and may make a different number of iterations on each rank: a rank that has finished "
        "still runs it with the others, and would write to the array. Carry the array through the "
        "loop as a value. "
        "See docs/reference/limits.md#loops."
    )


def _index(eqn: Equation, values: Sequence[Array]) -> Array:
    last = len(eqn.params["branches"]) - 1
    return lax.clamp(jnp.int32(0), lax.convert_element_type(values[0], jnp.int32), jnp.int32(last))


def _any(going: Array) -> Array:
    """Returns whether a loop continues for any element of an inner `vmap`.

    If the step calls `vmap`, the predicate of a loop may be an array.
    """
    return lax.reduce_or(going, tuple(range(jnp.ndim(going)))) if jnp.ndim(going) else going


def _both(active: Array | None, going: Array) -> Array:
    return going if active is None else lax.bitwise_and(active, going)


def _like(x: Array, mask: Array) -> Array:
    """Returns a mask in the shape that `select_n` takes.

    The mask is a scalar, or its dimensions are the leading dimensions of `x`.
    """
    if jnp.ndim(mask) in (0, jnp.ndim(x)):
        return mask
    return lax.broadcast_in_dim(mask, jnp.shape(x), tuple(range(jnp.ndim(mask))))


def _callback_if_active(eqn: Equation, values: list[Array], role: Role) -> Sequence[Array]:
    """Traces a callback so that it's only called if this rank's results are kept.

    Raises:
        CutError: The callback returns values, for which an inactive rank has no substitute.
    """
    if list(compat.sub_jaxprs(eqn)) or not all(isinstance(v, compat.DropVar) for v in eqn.outvars):
        raise CutError(
            f"a callback that returns values cannot be made at {compat.source_of(eqn)}: it is "
            "in a loop that exchanges and may make a different number of iterations on each rank, "
            "so a rank that has finished would call back. Move the callback out of the loop, or "
            "let all ranks make the same number of iterations, e.g. by `jax.lax.pmax(n, axis)`. "
            "See docs/reference/limits.md#loops."
        )
    zeros = lambda *_: [lax.full(t.shape, 0, t.dtype) for t in map(compat.array_type, eqn.outvars)]  # noqa: E731
    called = lambda *args: compat.bind_equation(eqn, args, eqn.params)  # noqa: E731
    return lax.cond(role.active, called, zeros, *values)
