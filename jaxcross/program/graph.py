"""Represents a traced step as a graph: which equations compute, read and exchange each variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED
from jaxcross.program.ir import Exchange
from jaxcross.program.jaxpr_utils import holds_exchange

if TYPE_CHECKING:
    from jaxcross.program.trace import Traced


@dataclass(frozen=True, slots=True)
class Group:
    """The exchanges of one collective segment, and host operations between them (cut rule 4).

    If the step calls mpi4jax, the group is the unit, which may contain any equations, in their
    original order (`as_written`). A group of carried exchanges (`carried`) also includes the host
    operations that compute their operands from the step's inputs (`before`). If other equations
    read the results of these operations, the operations are repeated in another segment.
    """

    levels: tuple[tuple[int, ...], ...]
    between: frozenset[int] = frozenset()
    as_written: bool = False
    carried: bool = False
    before: frozenset[int] = frozenset()

    @property
    def exchanges(self) -> tuple[int, ...]:
        return tuple(i for level in self.levels for i in level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The segment of every equation, as chosen by the cut rules.

    Attributes:
        groups: The exchanges of each collective segment.
        position: Equation -> its segment. `2 * g` computes before group `g`, `2 * g + 1` is that
            group, and the last position is the tail.
        recomputed: Position -> equations of earlier positions that it repeats.
    """

    groups: Sequence[Group]
    position: Mapping[int, int]
    recomputed: Mapping[int, set[int]]


@dataclass(slots=True)
class Graph:
    """The equations of a traced step, and which of them compute, read and exchange each variable.

    Equations are referred to by index.

    Attributes:
        wires: Equation -> its exchanges.
        opaque: The equations in `wires` whose exchanges are nested inside them, i.e. loops.
        ordered: The equations in `wires` that must stay in their original order, regardless of what
            they depend on. These are mpi4jax's own calls, which a peer may answer one by one.
        followers: Equation -> ordered callbacks that must not come before it, even though they
            don't read any of its results.
        level: Equation -> how many exchanges have to be made before it, one after another. Levels
            are as low as dependences allow, except for exchanges whose result is larger than their
            operand, which are delayed.
    """

    traced: Traced
    eqns: Sequence[Any] = field(init=False)
    maker: dict[Any, int] = field(init=False)
    readers: dict[Any, list[int]] = field(init=False)
    wires: dict[int, tuple[Exchange, ...]] = field(init=False)
    opaque: frozenset[int] = field(init=False)
    ordered: frozenset[int] = field(init=False)
    level: list[int] = field(init=False)
    followers: dict[int, list[int]] = field(init=False)
    _makers: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        inner, _ = compat.open_jaxpr(self.traced.jaxpr)
        self.eqns = inner.eqns
        self.maker = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self._makers = [
            [self.maker[v] for v in variables(e.invars) if v in self.maker] for e in self.eqns
        ]
        self.followers = {}
        self.readers = {}
        for i, eqn in enumerate(self.eqns):
            for v in variables(eqn.invars):
                self.readers.setdefault(v, []).append(i)
        self.wires = {}
        opaque = set()
        for i, eqn in enumerate(self.eqns):
            found = exchanges_of(eqn, self.traced)
            if found:
                self.wires[i] = found
                if self.traced.wire.recognise(eqn, self.traced.axes) is None:
                    opaque.add(i)
        self.opaque = frozenset(opaque)
        self._chain_ordered()
        self.ordered = frozenset(
            i
            for i in self.wires
            if any(not compat.is_named_axis_effect(e) for e in self.eqns[i].effects)
        )
        # Start with the lowest possible levels. From these, `_late` works out how long to hold back
        # exchanges whose result is larger than their operand.
        self.level = self._levels({})
        self.level = self._levels(self._late())

    def _chain_ordered(self) -> None:
        """Adds dependences that keep callbacks with `ordered=True` in program order."""
        last: dict[Any, int] = {}
        for i, eqn in enumerate(self.eqns):
            for effect in eqn.effects if i not in self.wires else ():
                if compat.is_ordered_effect(effect):
                    if effect in last:
                        self._makers[i].append(last[effect])
                        self.followers.setdefault(last[effect], []).append(i)
                    last[effect] = i

    def _levels(self, least: Mapping[int, int]) -> list[int]:
        """Returns the lowest level that dependences and `least` allow for each equation."""
        found: list[int] = []
        last: int | None = None
        for i in range(len(self.eqns)):
            level = max((found[p] + (p in self.wires) for p in self.makers(i)), default=0)
            level = max(level, least.get(i, 0))
            if i in self.ordered:
                # A loop gets its own segment, after everything else of its level.
                apart = last is not None and (i in self.opaque or last in self.opaque)
                level = max(level, 0 if last is None else found[last] + apart)
                last = i
            found.append(level)
        return found

    def _late(self) -> dict[int, int]:
        """Returns the latest level at which each enlarging exchange doesn't hold up any other.

        To save memory, an exchange whose result is larger than its operand should be made as late
        as possible. For example, gathering weights doesn't depend on anything, so we could gather
        the weights of all layers right at the start. But then all of them would be in memory before
        the first matrix product needs any of them.
        """
        late: dict[int, int] = {}
        # Equation -> the lowest level of an exchange that depends on it.
        next_wire: dict[int, int] = {}
        # Go backwards: an exchange has to be at least one level ahead of the first exchange that
        # depends on it.
        for i in reversed(range(len(self.eqns))):
            after = [r for v in self.eqns[i].outvars for r in self.readers.get(v, ())]
            levels = [
                self.level[r] if r in self.wires else next_wire[r]
                for r in after
                if r in self.wires or r in next_wire
            ]
            if not levels:
                continue
            next_wire[i] = min(levels)
            if i in self.wires and i not in self.ordered and self._enlarges(i):
                late[i] = max(self.level[i], next_wire[i] - 1)
        return late

    def _enlarges(self, i: int) -> bool:
        return sum(map(nbytes, self.eqns[i].outvars)) > sum(
            map(nbytes, variables(self.eqns[i].invars))
        )

    def makers(self, i: int) -> list[int]:
        """Returns the equations whose results equation `i` reads, or that must come before it."""
        return self._makers[i]

    def ancestors(self, of: Sequence[int], stop: Mapping[int, Any], above: int = -1) -> set[int]:
        """Returns the equations that `of` depend on and whose level is above `above`.

        Leaves out equations in `stop`, and anything that only they depend on.
        """
        seen: set[int] = set()
        stack = [p for i in of for p in self.makers(i)]
        while stack:
            i = stack.pop()
            if i not in seen and i not in stop and self.level[i] > above:
                seen.add(i)
                stack.extend(self.makers(i))
        return seen


def by_place(place: Mapping[int, int]) -> dict[int, list[int]]:
    """Returns the equations at each position, in their original order."""
    found: dict[int, list[int]] = {}
    for i in sorted(place):
        found.setdefault(place[i], []).append(i)
    return found


def exchanges_of(eqn: compat.Equation, traced: Traced) -> tuple[Exchange, ...]:
    """Returns the exchanges of one flat equation; a loop's exchanges name the loop in `params`."""
    found = traced.wire.recognise(eqn, traced.axes)
    if found is not None:
        return found
    if not any(holds_exchange(j, traced.axes, traced.wire) for j in compat.sub_jaxprs(eqn)):
        return ()
    calls_once = eqn.primitive.name in INLINED
    # Ranks compare the parameters of their exchanges before the first step. For exchanges inside a
    # loop, the parameters therefore include the kind of loop and its length.
    loop = [] if calls_once else [("loop", f"{eqn.primitive.name} {eqn.params.get('length', '?')}")]
    until = traced.until.get(eqn.outvars[0]) if eqn.outvars else None
    if until:
        loop.append(("until", until))
    inside: list[Exchange] = []
    for jaxpr in compat.sub_jaxprs(eqn):
        for inner in compat.open_jaxpr(jaxpr)[0].eqns:
            inside += [replace(x, params=(*x.params, *loop)) for x in exchanges_of(inner, traced)]
    return tuple(inside)


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Returns the atoms that aren't literals, in order and without duplicates."""
    return list(dict.fromkeys(a for a in atoms if not isinstance(a, compat.Literal)))


def nbytes(var: Any) -> int:
    """Returns the size of a variable's array in bytes."""
    size = int(np.prod(var.aval.shape, dtype=np.int64))
    return size * getattr(var.aval.dtype, "itemsize", 8)
