"""Collects the equations of a flat jaxpr as the flattening passes emit them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import Atom, Equation, Jaxpr, Var
from jaxcross.program.equality import Equality, Known
from jaxcross.program.ir import RankDecision, Wire
from jaxcross.program.jaxpr_utils import drop_unread, holds_exchange


@dataclass(slots=True)
class Emitter(ABC):
    """A growing list of flat equations, along with what we know about their results.

    Attributes:
        axes: Axis name -> size.
        wire: Recognises exchanges.
        invars: The inputs of the flat jaxpr.
        like: A jaxpr whose debug information is reused.
        consts: Variable -> the array that the step closed over.
        eqns: The equations emitted so far.
        decisions: Variable that counts how many ranks decided which way -> the decision, which each
            rank makes based on its own values.
        counters: Result of an exchange -> the variables that count the decisions that led up to it.
        present: Variables that are 0 on a rank that sits out the step, and 1 otherwise.
        until: First result of a loop -> a hash of what determines the loop's number of iterations.
        always_vote: Whether ranks vote in every `while` loop, in case the loop runs on zeros.
        positions: The position of each variable in `invars`.
    """

    axes: Mapping[str, int]
    wire: Wire
    invars: Sequence[Var]
    like: Jaxpr
    consts: dict[Var, Any] = field(default_factory=dict)
    eqns: list[Equation] = field(default_factory=list)
    decisions: dict[Var, RankDecision] = field(default_factory=dict)
    counters: dict[Var, set[Var]] = field(default_factory=dict)
    present: set[Atom] = field(default_factory=set)
    until: dict[Var, str] = field(default_factory=dict)
    always_vote: bool = False
    positions: dict[Var, int] = field(init=False)
    _holds: dict[int, tuple[Jaxpr, bool]] = field(default_factory=dict)
    _makers: dict[Var, int] = field(default_factory=dict)
    _n_with_maker: int = 0  # leading equations whose results are in `_makers`
    _known: dict[Var, Known] = field(default_factory=dict)
    _n_known: int = 0  # leading equations whose results are in `_known`
    _presence: Atom | None = None

    def __post_init__(self) -> None:
        self.positions = {v: position for position, v in enumerate(self.invars)}

    @abstractmethod
    def emit(self, eqn: Equation, args: list[Atom]) -> Sequence[Atom]:
        """Flattens and emits an equation over `args`; returns its results."""

    def run(self, closed: Jaxpr) -> list[Atom]:
        """Emits the equations of `closed` over `self.invars`; returns its results as atoms."""
        return self.inline(closed, list(self.invars))

    def inline(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Atom],
        emit: Callable[[Equation, list[Atom]], Sequence[Atom]] | None = None,
    ) -> list[Atom]:
        """Emits a jaxpr's equations over `args`; returns its results as atoms.

        Equations are emitted by calling `emit`, which defaults to `self.emit`.
        """
        emit = self.emit if emit is None else emit
        inner, consts = compat.open_jaxpr(jaxpr)
        env: dict[Var, Atom] = {}
        for var, value in zip(inner.constvars, consts, strict=False):
            env[var] = fresh = compat.new_var(var.aval)
            self.consts[fresh] = value
        open_inputs = [*inner.constvars[len(consts) :], *inner.invars]
        env.update(zip(open_inputs, args, strict=True))

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, compat.Literal) else env[atom]

        for eqn in inner.eqns:
            outs = emit(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in inner.outvars]

    def keep(self, eqn: Equation, args: list[Atom]) -> list[Var]:
        """Emits an equation over `args`, but otherwise unchanged."""
        outs = [compat.new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=args, outvars=outs))
        return outs

    def emit_for(self, eqn: Equation, jaxpr: Jaxpr, args: Sequence[Atom]) -> list[Atom]:
        """Emits a closed jaxpr in place of `eqn`, with `eqn`'s source line."""
        before = len(self.eqns)
        outs = self.inline(jaxpr, args)
        self.eqns[before:] = [e.replace(source_info=eqn.source_info) for e in self.eqns[before:]]
        return outs

    def emit_function(self, function: Callable[..., list[jax.Array]], *args: Any) -> list[Atom]:
        """Traces `function` for arguments of these types and emits its equations."""
        types = [
            jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type)
            for a in args
        ]
        return self.inline(jax.make_jaxpr(function)(*types), args)

    def makers(self) -> Mapping[Var, int]:
        """Returns the position in `eqns` of the equation that computes each variable."""
        for position in range(self._n_with_maker, len(self.eqns)):
            self._makers.update(dict.fromkeys(self.eqns[position].outvars, position))
        self._n_with_maker = len(self.eqns)
        return self._makers

    def presence(self) -> Atom:
        """Returns a variable that is 0 if this rank exchanges zeros instead of values, else 1."""
        if self._presence is None:
            # A failed rank exchanges zeros in place of all its values, including this 1. If the 1
            # were a constant inside the collective segment, there'd be no way to replace it. The
            # barrier makes sure that it's computed in a compute segment and becomes an operand of
            # the exchange, which can be replaced.
            (self._presence,) = self.emit_function(lambda: [lax.optimization_barrier(jnp.int32(1))])
            self.present.add(self._presence)
        return self._presence

    def known(self, atoms: Sequence[Atom]) -> list[Known]:
        """Returns what the equations so far prove about these atoms being equal across ranks."""
        equality = Equality(self.axes, self.wire)
        for eqn in self.eqns[self._n_known :]:
            about = equality.results(eqn, [equality.read(self._known, a) for a in eqn.invars])
            self._known.update(zip(eqn.outvars, about, strict=True))
        self._n_known = len(self.eqns)
        return [equality.read(self._known, a) for a in atoms]

    def read(self, outs: Sequence[Atom]) -> list[Equation]:
        """Returns the equations that `outs` depend on, and those that count the decisions for them.

        All other decisions are dropped from `decisions`.
        """
        made = {v for e in drop_unread(self.eqns, outs) for v in e.outvars}
        # Only keep a decision if it led up to an exchange whose result is still needed.
        live = {v for x in made & self.counters.keys() for v in self.counters[x]}
        self.decisions = {v: d for v, d in self.decisions.items() if v in live}
        return drop_unread(self.eqns, [*outs, *self.decisions])

    def rename(self, before: Sequence[Var], after: Sequence[Var]) -> None:
        """Transfers what we know about variables to their new names.

        This is needed when exchanges are moved out of a branch, in front of its conditional.
        """
        names = dict(zip(before, after, strict=True))
        for v in names.keys() & self.counters.keys():
            self.counters[names[v]] = self.counters.pop(v)
        if names.keys() & self.decisions.keys():  # from conditionals inside the branch
            self.decisions = {names.get(v, v): d for v, d in self.decisions.items()}
            self.counters = {
                x: {names.get(v, v) for v in counting} for x, counting in self.counters.items()
            }
        for v in names.keys() & self.until.keys():
            self.until[names[v]] = self.until.pop(v)

    def exchanges(self, eqn: Equation) -> bool:
        """Whether an equation is, or contains, an exchange."""
        return self.wire.recognise(eqn, self.axes) is not None or any(
            map(self.has_exchange, compat.sub_jaxprs(eqn))
        )

    def has_exchange(self, jaxpr: Jaxpr) -> bool:
        """Whether a jaxpr contains an exchange.

        The answer is cached, because nested jaxprs would otherwise be searched again at every level
        of nesting.
        """
        key = id(jaxpr)
        if key not in self._holds:
            # Keep the jaxpr alive, so that its id isn't reused.
            self._holds[key] = (jaxpr, holds_exchange(jaxpr, self.axes, self.wire))
        return self._holds[key][1]
