"""Proves that values are equal on all ranks, based on the equations that compute them.

If a loop contains exchanges, all ranks must make the same number of iterations. Usually, the ranks
vote before each iteration on whether to continue (`lockstep`). The vote is unnecessary if the
loop's predicate is certain to be equal on all ranks, and this module tries to prove that.

The proof starts from values that are certainly the same on all ranks: literals, and the results of
reductions and gathers, which are equal along the axes that they go over. The step's inputs, its
constants and `axis_index` may differ. Any other result is equal if it's computed from equal values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED
from jaxcross.program.ir import Exchange, Wire

# These give every rank the same result.
_EQUALISING = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast"})
# These may give each rank a different result.
_RANK_LOCAL = frozenset({"pure_callback", "ffi_call", "rng_uniform", "infeed"})
_PLAIN = (bool, int, float, str, np.dtype)


@dataclass(frozen=True, slots=True)
class Known:
    """Facts that the equations prove about one value.

    Attributes:
        axes: The axes along which all ranks hold the same value.
        basis: The literals and equations that the value is computed from, as text. The proof
            assumes that all ranks have traced the same ones. But a Python number in the code may
            differ between ranks, so the ranks compare the basis.
    """

    axes: frozenset[str]
    basis: frozenset[str] = frozenset()

    def meet(self, *others: Known) -> Known:
        """Returns the facts about a value computed from this value and `others`.

        This is the meet of a lattice with `UNKNOWN` at the bottom.
        """
        axes = self.axes.intersection(*(o.axes for o in others))
        return Known(axes, self.basis.union(*(o.basis for o in others))) if axes else UNKNOWN


UNKNOWN = Known(frozenset())


@dataclass(slots=True)
class Equality:
    """A forward walk over equations that records whether ranks may diverge.

    Attributes:
        sizes: The number of ranks along each axis.
        wire: Recognises exchanges.
        diverges: Whether a value that isn't proved equal decides how often a loop or conditional
            exchanges.
        basis: What the deciding values of all other loops and conditionals follow from; see
            `Known.basis`.
    """

    sizes: Mapping[str, int]
    wire: Wire
    diverges: bool = False
    basis: set[str] = field(default_factory=set)

    def exchange_axes(self, eqn: compat.Equation) -> frozenset[str]:
        """Returns the axes with several ranks that an equation exchanges over.

        mpi4jax's own calls name no axes, so they aren't included.
        """
        return frozenset(a for x in self.exchanges(eqn) for a in x.axes if self.sizes[a] > 1)

    def decided_together(self, eqn: compat.Equation, decided: Known) -> bool:
        """Whether the deciding value is equal on all ranks that exchange in an equation.

        If the equation doesn't exchange, the value must be equal on all ranks.
        """
        return (self.exchange_axes(eqn) or frozenset(self.sizes)) <= decided.axes

    def exchanges(self, eqn: compat.Equation) -> list[Exchange]:
        """Returns all exchanges of an equation, including those of equations inside it."""
        found = self.wire.recognise(eqn, self.sizes)
        if found is not None:
            return list(found)
        inner = (e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns)
        return [x for e in inner for x in self.exchanges(e)]

    def walk(self, jaxpr: compat.Jaxpr, known: Sequence[Known]) -> list[Known]:
        """Returns the facts about a jaxpr's results, given the facts about its arguments."""
        inner, consts = compat.open_jaxpr(jaxpr)
        env = dict.fromkeys(inner.constvars[: len(consts)], UNKNOWN)
        env.update(zip([*inner.constvars[len(consts) :], *inner.invars], known, strict=True))
        for eqn in inner.eqns:
            env.update(
                zip(
                    eqn.outvars,
                    self.results(eqn, [self.read(env, a) for a in eqn.invars]),
                    strict=True,
                )
            )
        return [self.read(env, a) for a in inner.outvars]

    def read(self, env: Mapping[Any, Known], atom: compat.Atom) -> Known:
        """Returns the facts about an atom: `UNKNOWN` for a variable that isn't in `env`."""
        if not isinstance(atom, compat.Literal):
            return env.get(atom, UNKNOWN)
        return Known(
            frozenset(self.sizes), frozenset({f"{atom.aval} {np.asarray(atom.val).tolist()}"})
        )

    def results(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        """Returns the facts about an equation's results."""
        name = eqn.primitive.name
        found = self.wire.recognise(eqn, self.sizes)
        if found is not None:
            return self._exchanged(eqn, found, known)
        if name == "axis_index":
            axis = eqn.params["axis_name"]
            # Ranks that only differ along other axes have the same index along this axis.
            own = {axis} if isinstance(axis, str) else set(axis)
            return [
                Known(frozenset(self.sizes) - own, frozenset({f"axis_index {sorted(own)}"})).meet()
            ]
        if name == "while":
            return self._while(eqn, known)
        if name == "scan":
            return self._scan(eqn, known)
        if name == "cond":
            return self._cond(eqn, known)
        inside = list(compat.sub_jaxprs(eqn))
        if name in INLINED and inside:
            return self.walk(inside[0], known)
        if (
            inside
            or name in _RANK_LOCAL
            or any(not compat.is_named_axis_effect(e) for e in eqn.effects)
        ):
            return [UNKNOWN] * len(eqn.outvars)
        return [Known(frozenset(self.sizes), frozenset({_text(eqn)})).meet(*known)] * len(
            eqn.outvars
        )

    def while_carry(
        self, eqn: compat.Equation, known: Sequence[Known]
    ) -> tuple[list[Known], Known]:
        """Returns the facts about a `while` loop's carry in every iteration, and its predicate."""
        n = eqn.params["cond_nconsts"]
        m = n + eqn.params["body_nconsts"]
        carry = list(known[m:])
        inner, _ = compat.open_jaxpr(eqn.params["body_jaxpr"])
        # If the body returns a carry unchanged, the carry stays equal for any number of iterations.
        constant = [a is b for a, b in zip(inner.invars[m - n :], inner.outvars, strict=True)]
        # The search starts from assumptions that may be wrong, and only its last round is known to
        # be right. Whatever follows from the earlier rounds mustn't be recorded in `self`, so we
        # search with a separate object.
        trial = Equality(self.sizes, self.wire)
        # Find the axes along which the loop's carry is equal in every iteration (a greatest fixed
        # point). We first assume that these are the same axes as before the loop. Then we walk
        # through the body again and again, each time dropping the axes for which this turns out to
        # be wrong, until nothing changes.
        while True:
            (more,) = trial.walk(eqn.params["cond_jaxpr"], [*known[:n], *carry])
            outs = trial.walk(eqn.params["body_jaxpr"], [*known[n:m], *carry])
            # If ranks make different numbers of iterations, they end up with different values of
            # everything that changes in the loop. So unless the ranks decide together when the loop
            # ends, we can't assume that its results are equal. That includes loops that a rank may
            # leave early (`lockstep.FROZEN`).
            changed = more if self.decided_together(eqn, more) else UNKNOWN
            after = [
                c if same else c.meet(o, changed)
                for c, o, same in zip(carry, outs, constant, strict=True)
            ]
            if after == carry:
                return carry, more
            carry = after

    def scan_carry(
        self, eqn: compat.Equation, known: Sequence[Known]
    ) -> tuple[list[Known], list[Known]]:
        """Returns the facts about a `scan` loop's carry and stacked results in every iteration."""
        n_consts, n_carry = compat.scan_counts(eqn)
        consts = known[:n_consts]
        carry = list(known[n_consts:][:n_carry])
        xs = known[n_consts + n_carry :]
        trial = Equality(self.sizes, self.wire)
        while True:
            outs = trial.walk(eqn.params["jaxpr"], [*consts, *carry, *xs])
            after = [c.meet(o) for c, o in zip(carry, outs[:n_carry], strict=True)]
            if after == carry:
                return carry, outs[n_carry:]
            carry = after

    def _while(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        carry, more = self.while_carry(eqn, known)
        self._record_decision(eqn, more)
        n = eqn.params["cond_nconsts"]
        m = n + eqn.params["body_nconsts"]
        # Now that the facts are certain, walk once more to record the decisions of loops and
        # conditionals inside.
        self.walk(eqn.params["cond_jaxpr"], [*known[:n], *carry])
        self.walk(eqn.params["body_jaxpr"], [*known[n:m], *carry])
        return carry

    def _scan(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        carry, ys = self.scan_carry(eqn, known)
        n_consts, n_carry = compat.scan_counts(eqn)
        self.walk(eqn.params["jaxpr"], [*known[:n_consts], *carry, *known[n_consts + n_carry :]])
        return [*carry, *ys]

    def _cond(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        index, *operands = known
        branches = [self.walk(b, operands) for b in eqn.params["branches"]]
        self._record_decision(eqn, index)
        return [index.meet(*outs) for outs in zip(*branches, strict=True)]

    def _record_decision(self, eqn: compat.Equation, known: Known) -> None:
        axes = self.exchange_axes(eqn)
        if not axes:
            return
        if axes <= known.axes:
            self.basis |= known.basis
        else:
            self.diverges = True

    def _exchanged(
        self, eqn: compat.Equation, found: Sequence[Exchange], known: Sequence[Known]
    ) -> list[Known]:
        if len(found) != len(eqn.outvars) or not all(x.axes for x in found):
            return [UNKNOWN] * len(eqn.outvars)  # mpi4jax's own calls
        results = []
        for x, before in zip(found, known, strict=True):
            others = before.axes - set(x.axes)
            equal = x.op in _EQUALISING and "groups" not in dict(x.params)
            # A reduction has the same result on all ranks along its axes, even if its operand
            # differs. So what the operand was computed from (its basis) only matters if we also
            # claim that the result is equal along other axes.
            axes = others | set(x.axes) if equal else others
            basis = before.basis if others else frozenset()
            results.append(Known(axes, basis) if axes else UNKNOWN)
        return results


def fingerprint(basis: set[str]) -> str:
    """Returns a hash of a basis, as eight hexadecimal digits that ranks compare."""
    return hashlib.sha256("\n".join(sorted(basis)).encode()).hexdigest()[:8]


def _text(eqn: compat.Equation) -> str:
    """Returns an equation's name and its numeric or textual parameters; leaves out operands."""

    def plain(value: Any) -> bool:
        return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(plain, value)))

    params = [f"{name}={value}" for name, value in sorted(eqn.params.items()) if plain(value)]
    return " ".join([eqn.primitive.name, *params])
