"""Proves that values are equal on all ranks, based on the equations that compute them.

In a loop that contains exchanges, all ranks have to make the same number of iterations. Normally,
they vote before each iteration on whether to continue (`lockstep`). But if we can prove that the
loop's predicate is the same on all ranks, there's no need to vote. This module tries to find such a
proof.

We start from values that are certain to be equal: literals, and the results of reductions and
gathers, which are equal along the axes they run over. The step's inputs and constants may differ,
and so may `axis_index`. Any other result is equal if everything it's computed from is equal.
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
    """What the equations prove about a value.

    Attributes:
        axes: The axes along which all ranks hold the same value.
        basis: The literals and equations that the value is computed from, as text. The proof only
            holds if all ranks have traced the same literals and equations, but e.g. a Python number
            in the code may differ between ranks. So the ranks compare what they have here.
    """

    axes: frozenset[str]
    basis: frozenset[str] = frozenset()

    def meet(self, *others: Known) -> Known:
        """Returns what's known about a result if this and `others` are known about its operands.

        This is the meet of a lattice with `UNKNOWN` at the bottom: the result is only certain to be
        equal along an axis if all operands are.
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
        diverges: Whether a value that we can't prove equal decides how often some loop or
            conditional exchanges.
        basis: What the decisions of all other loops and conditionals are based on; see
            `Known.basis`.
    """

    sizes: Mapping[str, int]
    wire: Wire
    diverges: bool = False
    basis: set[str] = field(default_factory=set)

    def exchange_axes(self, eqn: compat.Equation) -> frozenset[str]:
        """Returns the axes with more than one rank that an equation exchanges over.

        This doesn't cover mpi4jax's own calls, which don't name any axes.
        """
        return frozenset(a for x in self.exchanges(eqn) for a in x.axes if self.sizes[a] > 1)

    def decided_together(self, eqn: compat.Equation, decided: Known) -> bool:
        """Whether all ranks that exchange in an equation are known to agree on the deciding value.

        If the equation doesn't exchange anything, this applies to all ranks.
        """
        return (self.exchange_axes(eqn) or frozenset(self.sizes)) <= decided.axes

    def exchanges(self, eqn: compat.Equation) -> list[Exchange]:
        """Returns all exchanges of an equation, including those of nested equations."""
        found = self.wire.recognise(eqn, self.sizes)
        if found is not None:
            return list(found)
        inner = (e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns)
        return [x for e in inner for x in self.exchanges(e)]

    def walk(self, jaxpr: compat.Jaxpr, known: Sequence[Known]) -> list[Known]:
        """Returns what we know about a jaxpr's results, given what we know about its arguments."""
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
        """Returns what we know about an atom; `UNKNOWN` for a variable that isn't in `env`."""
        if not isinstance(atom, compat.Literal):
            return env.get(atom, UNKNOWN)
        return Known(
            frozenset(self.sizes), frozenset({f"{atom.aval} {np.asarray(atom.val).tolist()}"})
        )

    def results(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        """Returns what we know about an equation's results."""
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
        """Returns what's true of a `while` loop's carry in every iteration and its predicate."""
        n = eqn.params["cond_nconsts"]
        m = n + eqn.params["body_nconsts"]
        carry = list(known[m:])
        inner, _ = compat.open_jaxpr(eqn.params["body_jaxpr"])
        # Carries that the body returns unchanged stay equal, no matter how many iterations there
        # are.
        constant = [a is b for a, b in zip(inner.invars[m - n :], inner.outvars, strict=True)]
        # The search starts from assumptions that may turn out to be wrong, and only its last round
        # can be trusted. Use a separate object, so that nothing from the earlier rounds gets
        # recorded in `self`.
        trial = Equality(self.sizes, self.wire)
        # Find the axes along which the carry is equal in every iteration (a greatest fixed point).
        # We start by assuming that these are the same axes as before the loop. Then we walk through
        # the body over and over, dropping any axes for which that turns out to be wrong, until
        # nothing changes.
        while True:
            (more,) = trial.walk(eqn.params["cond_jaxpr"], [*known[:n], *carry])
            outs = trial.walk(eqn.params["body_jaxpr"], [*known[n:m], *carry])
            # Ranks that make different numbers of iterations end up with different values for
            # everything that changes in the loop. So unless they decide together when to stop, we
            # can't assume that the results are equal. That includes loops that a rank may leave
            # early (`lockstep.FROZEN`).
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
        """Returns what's true of a `scan` loop's carry and stacked results in every iteration."""
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
        # Now that we know what's true, walk through once more to record the decisions of nested
        # loops and conditionals.
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
            # A reduction gives all ranks along its axes the same result, even if their operands
            # differ. So an operand's basis (what it was computed from) only matters if we also
            # claim that the result is equal along other axes.
            axes = others | set(x.axes) if equal else others
            basis = before.basis if others else frozenset()
            results.append(Known(axes, basis) if axes else UNKNOWN)
        return results


def fingerprint(basis: set[str]) -> str:
    """Hashes a basis to eight hexadecimal digits, which ranks compare."""
    return hashlib.sha256("\n".join(sorted(basis)).encode()).hexdigest()[:8]


def _text(eqn: compat.Equation) -> str:
    """Returns an equation's name and its numeric and textual parameters, without its operands."""

    def plain(value: Any) -> bool:
        return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(plain, value)))

    params = [f"{name}={value}" for name, value in sorted(eqn.params.items()) if plain(value)]
    return " ".join([eqn.primitive.name, *params])
