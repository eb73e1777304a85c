"""A traced jaxpr -> a flat one, in which every exchange is an equation of its own at top level.

`jit`, remat and custom derivatives whose body holds an exchange are inlined, and so is a `shard_map` over our axes;
`cond` is decided by the host where it can be, and split around its exchanges where it cannot; a short `scan` is
unrolled, other loops keep their exchanges inside; what nobody reads is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ref import AbstractRef

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError
from jaxcross.program.segments import Wire

# Which branch of a `cond` is taken, or None where the host cannot know. Gets the equations of the predicate.
Choose = Callable[["Predicate"], int | None]

INLINED = frozenset({
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_lin",
})  # fmt: skip
UNROLLED = 64
"""The longest `scan` that is unrolled for its exchanges, in iterations; of nested ones, all together."""
_NO_OPS = frozenset({"pvary", "pcast"})  # varying-axes bookkeeping of `shard_map`; a rank holds its own shard anyway


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


def holds_exchange(jaxpr: Any, axes: Mapping[str, int], wire: Wire) -> bool:
    """Whether a jaxpr, or one inside it, puts something on the wire."""
    inner, _ = compat.open_jaxpr(jaxpr)
    return any(
        wire.recognise(eqn, axes) is not None or any(holds_exchange(j, axes, wire) for j in compat.sub_jaxprs(eqn))
        for eqn in inner.eqns
    )


def holds_shard_map(jaxpr: Any, axes: Mapping[str, int]) -> bool:
    """Whether a jaxpr, or one inside it, is mapped over shards along one of `axes`."""
    return any(
        _is_shard_map(eqn, axes) or any(holds_shard_map(j, axes) for j in compat.sub_jaxprs(eqn))
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns
    )


def _recomputes(eqn: Any) -> bool:
    """Whether this is the backward pass of `jax.checkpoint`."""
    return bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse", True))


def _is_shard_map(eqn: Any, axes: Mapping[str, int]) -> bool:
    return eqn.primitive.name == "shard_map" and any(a in axes for a in eqn.params["mesh"].axis_names)


@dataclass(slots=True)
class Flattener:
    """Walks a jaxpr once and emits flat equations. One instance a trace."""

    axes: Mapping[str, int]
    wire: Wire
    choose: Choose
    invars: Sequence[Any]
    _like: Any  # a jaxpr that lends its debug information
    consts: dict[Any, Any] = field(default_factory=dict)
    eqns: list[Any] = field(default_factory=list)
    room: int = UNROLLED  # into how many iterations a `scan` may be unrolled here
    _rows: dict[Any, Sequence[Any]] = field(default_factory=dict)  # of arrays that a loop stacked or took apart
    _holds: dict[int, tuple[Any, bool]] = field(default_factory=dict)

    def run(self, closed: Any) -> list[Any]:
        """Emits the equations of `closed` over `self.invars`; returns its results as atoms."""
        return self._inline(closed, list(self.invars))

    def _inline(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        inner, consts = compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = {}
        for var, value in zip(inner.constvars, consts, strict=False):
            env[var] = fresh = compat.new_var(var.aval)
            self.consts[fresh] = value
        open_inputs = [*inner.constvars[len(consts) :], *inner.invars]
        env.update(zip(open_inputs, args, strict=True))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, compat.Literal) else env[atom]

        for eqn in inner.eqns:
            outs = self._emit(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in inner.outvars]

    def _emit(self, eqn: Any, args: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if any(isinstance(a.aval, AbstractRef) for a in (*args, *eqn.outvars)):
            raise CutError(
                f"`{name}` on a mutable array cannot be cut at {compat.source_of(eqn)}: the segments of a step pass on"
                " values. Use `jax.new_ref` inside a `jax.jit` without exchanges, or inside a loop."
            )
        if name in _NO_OPS:
            return args
        if _is_shard_map(eqn, self.axes):
            (body,) = compat.sub_jaxprs(eqn)
            self._check_shard_map(eqn, body, args)
            return self._inline(compat.without_mesh(body), args)
        inside = [j for j in compat.sub_jaxprs(eqn) if self._has_exchange(j)]
        if name in INLINED:
            inlined = inside or [j for j in compat.sub_jaxprs(eqn) if holds_shard_map(j, self.axes)]
            if inlined:
                return self._inline(inlined[0], self._held_back(args) if _recomputes(eqn) else args)
        if inside and name == "cond":
            return self._cond(eqn, args)
        if inside and name == "scan" and 0 < eqn.params["length"] <= self.room and all(map(self._is_straight, inside)):
            return self._unroll(eqn, inside[0], args)
        if inside and name not in ("scan", "while"):
            raise CutError(
                f"an exchange inside `{name}` cannot be cut at {compat.source_of(eqn)}: jaxcross inlines jit, remat and"
                " custom derivatives, splits cond, unrolls short scans and keeps other loops whole. Move the exchange"
                " out of it."
            )
        outs = [compat.new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=args, outvars=outs))
        return list(outs)

    def _held_back(self, args: list[Any]) -> list[Any]:
        """`args`, but that what equations made of them can only be had together: what `checkpoint` recomputes waits for
        the gradients that need it, here as under `jit`.
        """
        made = [a for a in args if not isinstance(a, compat.Literal) and a not in self.invars]
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in made]
        barrier = jax.make_jaxpr(lambda *values: lax.optimization_barrier(values))(*types)
        held = dict(zip(made, self._inline(barrier, made), strict=True))
        return [a if isinstance(a, compat.Literal) else held.get(a, a) for a in args]

    def _has_exchange(self, jaxpr: Any) -> bool:
        key = id(jaxpr)
        if key not in self._holds:
            # The jaxpr is kept, so that its id stays its own.
            self._holds[key] = (jaxpr, holds_exchange(jaxpr, self.axes, self.wire))
        return self._holds[key][1]

    def _is_straight(self, jaxpr: Any) -> bool:
        """Whether what a jaxpr exchanges depends on no condition: a `cond` in an unrolled loop would send more."""
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
            inside = [j for j in compat.sub_jaxprs(eqn) if self._has_exchange(j)]
            if inside and not (eqn.primitive.name in (*INLINED, "scan") and all(map(self._is_straight, inside))):
                return False
        return True

    def _unroll(self, eqn: Any, body: Any, args: list[Any]) -> list[Any]:
        """A `scan` as its iterations, one after another: each is cut, and like segments of theirs share executables."""
        (n_consts, n_carry), length = compat.scan_counts(eqn), eqn.params["length"]
        consts, carry, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
        rows = [self._take_apart(x, length) for x in xs]
        ys: list[list[Any]] = [[]] * length
        room, self.room = self.room, self.room // length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            outs = self._inline(body, [*consts, *carry, *(row[i] for row in rows)])
            carry, ys[i] = outs[:n_carry], outs[n_carry:]
        self.room = room
        return [*carry, *map(self._stack, zip(*ys, strict=True))]

    def _take_apart(self, whole: Any, length: int) -> Sequence[Any]:
        """The rows of an array. One equation makes all of them: slices would tell each iteration's from another's."""
        if isinstance(whole, compat.Literal):
            return self._trace(lambda x: _rows_of(x, length), whole)
        if whole not in self._rows:
            self._rows[whole] = self._trace(lambda x: _rows_of(x, length), whole)
        return self._rows[whole]

    def _stack(self, rows: Sequence[Any]) -> Any:
        """The rows as an array, which a later loop, as that of the gradient, need not take apart again."""
        (whole,) = self._trace(lambda *r: [jax.lax.concatenate([jnp.expand_dims(x, 0) for x in r], 0)], *rows)
        self._rows[whole] = rows
        return whole

    def _trace(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in args]
        return self._inline(jax.make_jaxpr(function)(*types), args)

    def _check_shard_map(self, eqn: Any, body: Any, args: Sequence[Any]) -> None:
        for given, wanted in zip(args, compat.open_jaxpr(body)[0].invars, strict=True):
            if given.aval.shape != wanted.aval.shape:
                raise CutError(
                    f"a `shard_map` at {compat.source_of(eqn)} splits an argument of shape {given.aval.shape} into"
                    f" {wanted.aval.shape}, but under jaxcross a step gets its rank's own shards. Make the whole step"
                    " one `shard_map`, with nothing before or after it."
                )

    def _cond(self, eqn: Any, args: list[Any]) -> list[Any]:
        index, *operands = args
        branches = list(eqn.params["branches"])
        if isinstance(index, compat.Literal):
            choice = int(index.val)
        else:
            predicate = self._predicate(index, len(branches))
            choice = None if predicate is None else self.choose(predicate)
        if choice is not None:
            return self._inline(branches[min(max(choice, 0), len(branches) - 1)], operands)
        return self._split_cond(eqn, index, operands, [self._flat_branch(b) for b in branches])

    def _predicate(self, index: Any, branches: int) -> Predicate | None:
        """The backward slice of `index`, if it reads nothing but scalar integers and booleans of the input."""
        producer = {v: eqn for eqn in self.eqns for v in eqn.outvars}
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
                if self._exchanges(eqn) or any(not compat.is_named_axis_effect(e) for e in eqn.effects):
                    return None
                if eqn.primitive.name == "axis_index" or any(self._speaks_of_rank(j) for j in compat.sub_jaxprs(eqn)):
                    return None
                if id(eqn) not in needed:
                    needed.add(id(eqn))
                    stack.extend(eqn.invars)
            elif atom in self.invars:
                if atom not in leaves:
                    leaves.append(atom)
            else:
                return None
        positions = {v: i for i, v in enumerate(self.invars)}
        leaves.sort(key=positions.__getitem__)
        eqns = [e for e in self.eqns if id(e) in needed]
        jaxpr = compat.make_jaxpr_of(leaves, [index], eqns, self._like)
        return Predicate(inputs=tuple(positions[v] for v in leaves), jaxpr=jaxpr, branches=branches)

    def _speaks_of_rank(self, jaxpr: Any) -> bool:
        inner, _ = compat.open_jaxpr(jaxpr)
        return any(compat.is_named_axis_effect(e) for e in inner.effects)

    def _exchanges(self, eqn: Any) -> bool:
        return self.wire.recognise(eqn, self.axes) is not None or any(
            self._has_exchange(j) for j in compat.sub_jaxprs(eqn)
        )

    def _acts(self, eqn: Any) -> bool:
        """Whether an equation does more than to compute and to exchange: it calls back."""
        if self.wire.recognise(eqn, self.axes) is not None or all(map(compat.is_named_axis_effect, eqn.effects)):
            return False
        inside = [e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns]
        return not inside or any(map(self._acts, inside))

    def _flat_branch(self, branch: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """A branch as (inputs, flat equations, results)."""
        inner, _ = compat.open_jaxpr(branch)
        invars = [compat.new_var(v.aval) for v in inner.invars]
        walker = Flattener(self.axes, self.wire, lambda _: None, invars, self._like, room=0)
        walker._holds = self._holds
        outs = walker.run(branch)
        self.consts.update(walker.consts)
        # Constants of a branch become further operands, so that every branch is closed.
        return invars, drop_unread(walker.eqns, outs), outs

    def _split_cond(self, eqn: Any, index: Any, operands: list[Any], branches: list[Any]) -> list[Any]:
        """`cond(p, pre; X; post | other)` -> `cond(p, pre | zeros)`, X, `cond(p, post | other)`, repeated.

        X is always made, with zeros where its branch is not taken, so that ranks cannot disagree about who takes part.
        Only the branch taken contributes to the result. Follows cut rule 5.
        """
        consts = [v for v in self.consts if any(v in e.invars for _, eqns, _ in branches for e in eqns)
                  or any(v is o for _, _, outs in branches for o in outs)]  # fmt: skip
        shared = [*operands, *consts]
        work = [([*invars, *consts], eqns, outs) for invars, eqns, outs in branches]
        while True:
            which = next((i for i, (_, eqns, _) in enumerate(work) if any(map(self._exchanges, eqns))), None)
            if which is None:
                return self._emit_cond(eqn, index, shared, [self._close(*branch) for branch in work])
            invars, eqns, outs = work[which]
            at = next(i for i, e in enumerate(eqns) if self._exchanges(e))
            pre, exchange, post = eqns[:at], eqns[at], eqns[at + 1 :]
            if _holds_while(exchange):
                # X runs on zeros where its branch is not taken, and nothing says that the loop would ever end on them.
                raise CutError(
                    f"an exchange inside `while` inside `cond` cannot be cut at {compat.source_of(exchange)}: the host"
                    " cannot know the predicate, and the loop might not end where its branch is not taken. Use"
                    " `lax.scan`, or a predicate made of counters alone."
                )
            if self._acts(exchange):
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
                self._close(invars, pre, handed) if i == which else self._close(ivs, [], handed, zeros=True)
                for i, (ivs, _, _) in enumerate(work)
            ]
            values = self._emit_cond(eqn, index, shared, first)
            packed = iter(values)
            received = [compat.new_var(v.aval) for v in exchange.outvars]
            args = [a if isinstance(a, compat.Literal) else next(packed) for a in exchange.invars]
            self.eqns.append(exchange.replace(invars=args, outvars=received))
            # The rest of this branch reads the residuals and what was received; the other branches ignore them.
            extra = [*values[len(sent) :], *received]
            local = [*residuals, *exchange.outvars]
            shared = [*shared, *extra]
            work = [
                ([*ivs, *(local if i == which else [compat.new_var(v.aval) for v in local])],
                 post if i == which else body, res)
                for i, (ivs, body, res) in enumerate(work)
            ]  # fmt: skip

    def _close(self, invars: list[Any], eqns: list[Any], outs: list[Any], *, zeros: bool = False) -> Any:
        """A closed branch whose variables are its own; with `zeros`, one that returns zeros shaped like `outs`."""
        if zeros:
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
            like = [(o.aval.shape, o.aval.dtype) for o in outs]
            return jax.make_jaxpr(lambda *_: [jnp.zeros(s, d) for s, d in like])(*shapes)
        kept = drop_unread(eqns, outs)
        return compat.make_jaxpr_of(invars, outs, kept, self._like)

    def _emit_cond(self, eqn: Any, index: Any, operands: list[Any], branches: list[Any]) -> list[Any]:
        outs = [compat.new_var(a.aval) for a in compat.open_jaxpr(branches[0])[0].outvars]
        params = dict(eqn.params, branches=tuple(branches))
        effects = set().union(*(compat.open_jaxpr(b)[0].effects for b in branches))
        self.eqns.append(eqn.replace(invars=[index, *operands], outvars=outs, params=params, effects=effects))
        return list(outs)


def _holds_while(eqn: Any) -> bool:
    """Whether an equation is a loop of unknown length, or holds one."""
    return eqn.primitive.name == "while" or any(
        _holds_while(inner) for jaxpr in compat.sub_jaxprs(eqn) for inner in compat.open_jaxpr(jaxpr)[0].eqns
    )


def _rows_of(x: jax.Array, length: int) -> list[jax.Array]:
    return [jax.lax.squeeze(row, (0,)) for row in jax.lax.split(x, [1] * length)]


def drop_unread(eqns: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """The equations whose results are read in the end, or that have a real effect, in order."""
    live = {a for a in outs if not isinstance(a, compat.Literal)}
    kept = []
    for eqn in reversed(eqns):
        lasting = any(not compat.is_named_axis_effect(e) for e in eqn.effects)
        if lasting or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
    return kept[::-1]
