"""Flattens a traced jaxpr, so that every exchange becomes a top-level equation.

A step can only be cut between two of its top-level equations. So any exchange inside a call, a loop
or a conditional has to be brought to the top level first:

- `jit`, remat, custom derivatives and a `shard_map` over ranks are inlined if they contain an
  exchange.
- A `cond` is decided by the host if its predicate follows from counters. Otherwise it's split
  around its exchanges.
- A short `scan` is unrolled. Other loops stay whole, with their exchanges inside. If ranks might
  need different numbers of iterations, they vote on when to stop.
- Equations that call mpi4jax are kept as they are.
- Equations whose results aren't read are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.ref import AbstractRef

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED, Atom, without_mesh
from jaxcross.errors import CutError
from jaxcross.program import lockstep
from jaxcross.program.conditional import Choose, predicate_of, split
from jaxcross.program.emitter import Emitter
from jaxcross.program.ir import Exchange
from jaxcross.program.jaxpr_utils import holds_exchange, holds_shard_map, is_shard_map
from jaxcross.program.mpi4jax_lists import is_call
from jaxcross.program.wire_types import convert_wire_types

UNROLLED = 64
"""A `scan` with exchanges is unrolled if it has at most this many iterations.

For nested loops, the limit applies to the product of their iterations.
"""
# These primitives don't compute anything; they only change a value's type, which records the mesh
# axes over which the value varies. Since a rank only ever holds its own shard, we can leave them
# out.
_NO_OPS = frozenset({"pvary", "pcast"})


def _recomputes(eqn: compat.Equation) -> bool:
    """Whether an equation is the backward pass of `jax.checkpoint`."""
    return bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse", True))


@final
@dataclass(slots=True)
class Flattener(Emitter):
    """Walks a jaxpr once and emits flat equations. Each trace uses a new instance."""

    choose: Choose = field(kw_only=True)
    unroll_limit: int = UNROLLED  # the most iterations of a `scan` to unroll here
    # The rows of arrays that some loop has stacked or unstacked.
    _rows: dict[Atom, Sequence[Atom]] = field(default_factory=dict)

    def emit(self, eqn: compat.Equation, args: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if any(isinstance(a.aval, AbstractRef) for a in (*args, *eqn.outvars)):
            raise CutError(
                f"`{name}` on a mutable array cannot be cut at {compat.source_of(eqn)}: the "
                "segments of a step can pass values to each other, but no mutable arrays. Use "
                "`jax.new_ref` inside a `jax.jit` without exchanges, or inside a loop. "
                "See docs/reference/limits-steps.md#the-step."
            )
        if name in _NO_OPS:
            return args
        if is_shard_map(eqn, self.axes):
            (body,) = compat.sub_jaxprs(eqn)
            self._check_shard_map(eqn, body, args)
            return self.inline(convert_wire_types(without_mesh(body), self.axes, self.wire), args)
        inside = [j for j in compat.sub_jaxprs(eqn) if self.has_exchange(j)]
        if name in INLINED:
            inlined = inside or [j for j in compat.sub_jaxprs(eqn) if holds_shard_map(j, self.axes)]
            if inlined:
                return self.inline(inlined[0], self._held_back(args) if _recomputes(eqn) else args)
        # All mpi4jax calls of a step run in a single segment, so there's no need to open up
        # equations that contain them.
        whole = any(holds_exchange(j, self.axes, self.wire, only=is_call) for j in inside)
        if name == "cond" and any(
            holds_exchange(j, self.axes, self.wire, only=_is_named) for j in inside
        ):
            return self._cond(eqn, args, whole=whole)
        if (
            inside
            and not whole
            and name == "scan"
            and 0 < eqn.params["length"] <= self.unroll_limit
            and all(map(self._is_straight, inside))
        ):
            return self._unroll(eqn, inside[0], args)
        if inside and not whole and name not in ("scan", "while"):
            raise CutError(
                f"an exchange inside `{name}` cannot be cut at {compat.source_of(eqn)}. Move the "
                f"exchange out of the `{name}`: jaxcross only cuts through jit, remat, custom "
                "derivatives, linear solvers, cond and loops. "
                "See docs/explanation/cutting.md#flattening-rule-1."
            )
        return lockstep.emit(self, eqn, args) if inside else self.keep(eqn, args)

    def _held_back(self, args: list[Any]) -> list[Any]:
        """Puts `args` behind a barrier, so that `checkpoint` doesn't recompute too early.

        `jax.checkpoint` saves memory by recomputing values in the backward pass. Under `jit`, its
        equation also acts as a barrier, which keeps XLA from recomputing the values too early and
        using up that memory after all. Inlining gets rid of the equation, so we add our own
        barrier.
        """
        made = [a for a in args if not isinstance(a, compat.Literal) and a not in self.positions]
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in made]
        barrier = jax.make_jaxpr(lambda *values: lax.optimization_barrier(values))(*types)
        held = dict(zip(made, self.inline(barrier, made), strict=True))
        return [a if isinstance(a, compat.Literal) else held.get(a, a) for a in args]

    def _is_straight(self, jaxpr: compat.Jaxpr) -> bool:
        """Whether a jaxpr's exchanges are made unconditionally.

        Loops with conditional exchanges aren't unrolled. After unrolling, we'd have to split the
        conditional of each iteration around its exchanges, and these would then be made even if the
        branch isn't taken.
        """
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
            inside = [j for j in compat.sub_jaxprs(eqn) if self.has_exchange(j)]
            if inside and not (
                eqn.primitive.name in (*INLINED, "scan") and all(map(self._is_straight, inside))
            ):
                return False
        return True

    def _unroll(self, eqn: compat.Equation, body: compat.Jaxpr, args: list[Any]) -> list[Any]:
        """Emits the iterations of a `scan` one after another.

        That way, each iteration can be cut, and equal segments share executables.
        """
        n_consts, n_carry = compat.scan_counts(eqn)
        length = eqn.params["length"]
        consts = args[:n_consts]
        carry = args[n_consts : n_consts + n_carry]
        xs = args[n_consts + n_carry :]
        rows = [self._unstack(x, length) for x in xs]
        ys: list[list[Any]] = [[]] * length
        limit = self.unroll_limit
        self.unroll_limit = limit // length  # what's left for nested loops
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            outs = self.inline(body, [*consts, *carry, *(row[i] for row in rows)])
            carry = outs[:n_carry]
            ys[i] = outs[n_carry:]
        self.unroll_limit = limit
        return [*carry, *map(self._stack, zip(*ys, strict=True))]

    def _unstack(self, whole: Atom, length: int) -> Sequence[Atom]:
        """Returns the rows of an array, all computed by a single equation.

        If we sliced each row separately, the segments of the iterations would differ in the
        position of the slice and couldn't share executables.
        """
        if isinstance(whole, compat.Literal):
            return self.emit_function(lambda x: _rows_of(x, length), whole)
        if whole not in self._rows:
            self._rows[whole] = self.emit_function(lambda x: _rows_of(x, length), whole)
        return self._rows[whole]

    def _stack(self, rows: Sequence[Atom]) -> Atom:
        """Stacks rows into an array.

        We remember the rows, because a later loop may iterate over the same array. For example, the
        loop that computes the gradient iterates over what the forward loop has stacked.
        """
        (whole,) = self.emit_function(
            lambda *r: [jax.lax.concatenate([jnp.expand_dims(x, 0) for x in r], 0)], *rows
        )
        self._rows[whole] = rows
        return whole

    def _check_shard_map(
        self, eqn: compat.Equation, body: compat.Jaxpr, args: Sequence[Any]
    ) -> None:
        for given, wanted in zip(args, compat.open_jaxpr(body)[0].invars, strict=True):
            if given.aval.shape != wanted.aval.shape:
                raise CutError(
                    f"a `shard_map` at {compat.source_of(eqn)} splits an argument of shape "
                    f"{given.aval.shape} into {wanted.aval.shape}, but under jaxcross a step gets "
                    "only its rank's shards, which it can't split further. Wrap the whole step "
                    "in a single `shard_map`, with nothing before or after it."
                )

    def _cond(self, eqn: compat.Equation, args: list[Any], *, whole: bool) -> Sequence[Any]:
        """Emits the branch that the host chooses, or else splits the `cond`.

        If the host can't choose and the `cond` calls mpi4jax, it's emitted as a whole.
        """
        index, *operands = args
        branches = list(eqn.params["branches"])
        if isinstance(index, compat.Literal):
            choice = int(index.val)
        else:
            predicate = predicate_of(self, index, len(branches))
            choice = None if predicate is None else self.choose(predicate)
        if choice is not None:
            # JAX clamps out-of-range indices.
            return self.inline(branches[min(max(choice, 0), len(branches) - 1)], operands)
        if whole:
            return lockstep.emit(self, eqn, args)
        return split(self, eqn, index, operands, [self._flat_branch(b) for b in branches])

    def _flat_branch(self, branch: compat.Jaxpr) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the inputs, flat equations and results of a branch."""
        inner, _ = compat.open_jaxpr(branch)
        invars = [compat.new_var(v.aval) for v in inner.invars]
        # A rank that doesn't take this branch makes its exchanges on zeros, and on zeros, a loop
        # might never end. So in every loop inside a branch, the ranks vote on when to stop. The
        # host can't choose any nested branches in there, and loops aren't unrolled.
        walker = Flattener(
            self.axes,
            self.wire,
            invars,
            self.like,
            choose=lambda _: None,
            always_vote=True,
            unroll_limit=0,
        )
        walker._holds = self._holds
        outs = walker.run(branch)
        self.consts.update(walker.consts)
        self.decisions.update(walker.decisions)
        self.counters.update(walker.counters)
        self.until.update(walker.until)
        self.present.update(walker.present)
        # Turn constants of a branch into extra operands, so that every branch is closed.
        return invars, walker.read(outs), outs


def _is_named(exchange: Exchange) -> bool:
    return bool(exchange.axes)


def _rows_of(x: jax.Array, length: int) -> list[jax.Array]:
    return [jax.lax.squeeze(row, (0,)) for row in jax.lax.split(x, [1] * length)]
