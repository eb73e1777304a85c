"""Which values of a step are the same on all ranks, by the equations that make them.

A literal is, and so is the result of a reduction or a gather, along the axes that it goes over. A step's inputs, its
constants and `axis_index` are not. What is computed of equal values is equal. Used to decide where ranks may make
different numbers of iterations of a loop that exchanges.
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

_LEVELS = frozenset({"psum", "pmax", "pmin", "all_gather", "pbroadcast"})  # every rank gets the same
_OWN = frozenset({"pure_callback", "ffi_call", "rng_uniform", "infeed"})  # may give each rank another result
_PLAIN = (bool, int, float, str, np.dtype)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one value.

    Attributes:
        axes: Those along which all ranks hold the same value.
        how: The numbers and equations in the code that it is made of, as text: a Python number may differ by rank.
    """

    axes: frozenset[str]
    how: frozenset[str] = frozenset()

    def meet(self, *others: Known) -> Known:
        """What is known of a value that is made of several."""
        axes = self.axes.intersection(*(o.axes for o in others))
        return Known(axes, self.how.union(*(o.how for o in others))) if axes else UNKNOWN


UNKNOWN = Known(frozenset())


@dataclass(slots=True)
class Equality:
    """Walks equations forward, and records whether ranks may part at a loop or conditional that exchanges.

    Attributes:
        sizes: Ranks along each axis.
        apart: Whether one exchanges as often as a value says that is not known to be equal.
        how: What the number of iterations of all other loops that exchange is made of.
    """

    sizes: Mapping[str, int]
    wire: Wire
    apart: bool = False
    how: set[str] = field(default_factory=set)

    def needed(self, eqn: compat.Equation) -> frozenset[str]:
        """The axes of several ranks that an equation exchanges over. mpi4jax's own calls name none."""
        return frozenset(a for x in self.exchanges(eqn) for a in x.axes if self.sizes[a] > 1)

    def together(self, eqn: compat.Equation, decided: Known) -> bool:
        """Whether all ranks that exchange in an equation, or just all, decide alike how often it does what it holds."""
        return (self.needed(eqn) or frozenset(self.sizes)) <= decided.axes

    def exchanges(self, eqn: compat.Equation) -> list[Exchange]:
        """Everything that an equation or one inside it exchanges."""
        if (found := self.wire.recognise(eqn, self.sizes)) is not None:
            return list(found)
        inner = (e for j in compat.sub_jaxprs(eqn) for e in compat.open_jaxpr(j)[0].eqns)
        return [x for e in inner for x in self.exchanges(e)]

    def walk(self, jaxpr: compat.Jaxpr, known: Sequence[Known]) -> list[Known]:
        """What is known of a jaxpr's results, if so much is known of its arguments."""
        inner, consts = compat.open_jaxpr(jaxpr)
        env = dict.fromkeys(inner.constvars[: len(consts)], UNKNOWN)
        env.update(zip([*inner.constvars[len(consts) :], *inner.invars], known, strict=True))
        for eqn in inner.eqns:
            env.update(zip(eqn.outvars, self.results(eqn, [self.read(env, a) for a in eqn.invars]), strict=True))
        return [self.read(env, a) for a in inner.outvars]

    def read(self, env: Mapping[Any, Known], atom: compat.Atom) -> Known:
        """What is known of an atom; of a variable that is not in `env` nothing."""
        if not isinstance(atom, compat.Literal):
            return env.get(atom, UNKNOWN)
        return Known(frozenset(self.sizes), frozenset({f"{atom.aval} {np.asarray(atom.val).tolist()}"}))

    def results(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        """What is known of an equation's results."""
        name = eqn.primitive.name
        if (found := self.wire.recognise(eqn, self.sizes)) is not None:
            return self._exchanged(eqn, found, known)
        if name == "axis_index":
            axis = eqn.params["axis_name"]
            own = {axis} if isinstance(axis, str) else set(axis)
            return [Known(frozenset(self.sizes) - own, frozenset({f"axis_index {sorted(own)}"})).meet()]
        if name == "while":
            return self._while(eqn, known)
        if name == "scan":
            return self._scan(eqn, known)
        if name == "cond":
            return self._cond(eqn, known)
        inside = list(compat.sub_jaxprs(eqn))
        if name in INLINED and inside:
            return self.walk(inside[0], known)
        if inside or name in _OWN or any(not compat.is_named_axis_effect(e) for e in eqn.effects):
            return [UNKNOWN] * len(eqn.outvars)
        return [Known(frozenset(self.sizes), frozenset({_text(eqn)})).meet(*known)] * len(eqn.outvars)

    def carried(self, eqn: compat.Equation, known: Sequence[Known]) -> tuple[list[Known], Known]:
        """What is known of a `while` loop's carry in every iteration, and of its predicate."""
        n, m = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        carry = list(known[m:])
        inner, _ = compat.open_jaxpr(eqn.params["body_jaxpr"])
        constant = [a is b for a, b in zip(inner.invars[m - n :], inner.outvars, strict=True)]
        trial = Equality(self.sizes, self.wire)  # records nothing of what turns out not to be equal
        while True:
            (more,) = trial.walk(eqn.params["cond_jaxpr"], [*known[:n], *carry])
            outs = trial.walk(eqn.params["body_jaxpr"], [*known[n:m], *carry])
            # Ranks that make another number of iterations end with another value of what changes. Where a loop is cut
            # short on some (`lockstep.FROZEN`), nothing is known of it.
            changed = more if self.together(eqn, more) else UNKNOWN
            after = [c if same else c.meet(o, changed) for c, o, same in zip(carry, outs, constant, strict=True)]
            if after == carry:
                return carry, more
            carry = after

    def repeated(self, eqn: compat.Equation, known: Sequence[Known]) -> tuple[list[Known], list[Known]]:
        """What is known of a `scan` loop's carry in every iteration, and of what it stacks."""
        n_consts, n_carry = compat.scan_counts(eqn)
        consts, carry, xs = known[:n_consts], list(known[n_consts:][:n_carry]), known[n_consts + n_carry :]
        trial = Equality(self.sizes, self.wire)
        while True:
            outs = trial.walk(eqn.params["jaxpr"], [*consts, *carry, *xs])
            after = [c.meet(o) for c, o in zip(carry, outs[:n_carry], strict=True)]
            if after == carry:
                return carry, outs[n_carry:]
            carry = after

    def _while(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        carry, more = self.carried(eqn, known)
        self._decides(eqn, more)
        n, m = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        self.walk(eqn.params["cond_jaxpr"], [*known[:n], *carry])  # for what is inside
        self.walk(eqn.params["body_jaxpr"], [*known[n:m], *carry])
        return carry

    def _scan(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        carry, ys = self.repeated(eqn, known)
        n_consts, n_carry = compat.scan_counts(eqn)
        self.walk(eqn.params["jaxpr"], [*known[:n_consts], *carry, *known[n_consts + n_carry :]])
        return [*carry, *ys]

    def _cond(self, eqn: compat.Equation, known: Sequence[Known]) -> list[Known]:
        index, *operands = known
        branches = [self.walk(b, operands) for b in eqn.params["branches"]]
        self._decides(eqn, index)
        return [index.meet(*outs) for outs in zip(*branches, strict=True)]

    def _decides(self, eqn: compat.Equation, known: Known) -> None:
        if needed := self.needed(eqn):
            self.apart |= not needed <= known.axes
            self.how |= known.how if needed <= known.axes else set()

    def _exchanged(self, eqn: compat.Equation, found: Sequence[Exchange], known: Sequence[Known]) -> list[Known]:
        if len(found) != len(eqn.outvars) or not all(x.axes for x in found):
            return [UNKNOWN] * len(eqn.outvars)  # mpi4jax's own calls
        results = []
        for x, before in zip(found, known, strict=True):
            others = before.axes - set(x.axes)
            level = x.op in _LEVELS and "groups" not in dict(x.params)
            # Along its own axes a reduction is equal whatever it is made of.
            axes = others | set(x.axes) if level else others
            results.append(Known(axes, before.how if others else frozenset()) if axes else UNKNOWN)
        return results


def fingerprint(how: set[str]) -> str:
    """Eight hexadecimal digits that ranks compare."""
    return hashlib.sha256("\n".join(sorted(how)).encode()).hexdigest()[:8]


def _text(eqn: compat.Equation) -> str:
    """An equation without its operands: what of its parameters is a number or a name."""

    def plain(value: Any) -> bool:
        return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(plain, value)))

    params = [f"{name}={value}" for name, value in sorted(eqn.params.items()) if plain(value)]
    return " ".join([eqn.primitive.name, *params])
