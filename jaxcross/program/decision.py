"""Do ranks take the same branch of a conditional that exchanges, and come to the end of loops inside loops? They count
it beside the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcross import _jax_compat as compat
from jaxcross.program.emitter import Emitter

Group = tuple[tuple[str, ...], Any]
"""Axes, and the groups along them, if an exchange names some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A `cond` or `switch` that only values decide, as the ranks that may exchange in it do.

    Attributes:
        axes: Those that it exchanges over.
        takers: The branches that do. Ranks count who takes each of them, and last who takes another.
        source: The user's line.
    """

    axes: tuple[str, ...]
    takers: tuple[int, ...]
    source: str

    def mismatch(self, counts: Sequence[float]) -> str | None:
        """What people are told where the ranks took more than one way.

        Args:
            counts: How many ranks took each; a rank that has failed took none.
        """
        ways = [*(f"branch {n}, which exchanges" for n in self.takers), "one that does not"]
        taken = [f"{n:.0f} took {way}" for n, way in zip(counts, ways, strict=False) if n > 0]
        if len(taken) < 2:
            return None
        return (
            f"ranks decided the conditional at {self.source} differently. Of those that exchange in it over"
            f" {', '.join(f'`{a}`' for a in self.axes)}, {', and '.join(taken)}. They would average zeros of those that"
            " take no part, and drift apart. Decide by what all of them share, as `lax.pmax(flag, axis)`."
            " `optax.apply_if_finite`, and `optax.MultiSteps` with a function that skips, look at a rank's own"
            " gradients: put the exchange in front of them, not inside."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExit:
    """A loop with inner ones, of whose results a rank that is through with it may have to exchange something.

    Attributes:
        source: The user's line.
        inner: The lines of the inner loops that such a rank may leave before their end. Ranks count who did.
    """

    source: str
    inner: tuple[str, ...]

    def mismatch(self, counts: Sequence[float]) -> str | None:
        """What people are told where a rank did; `counts` holds how many."""
        if not counts[0]:
            return None
        return (
            f"ranks make different numbers of iterations of the loop at {self.source}, and {counts[0]:.0f} that"
            f" {'is' if counts[0] == 1 else 'are'} through with it did not come to the end of an inner one, at"
            f" {' or '.join(self.inner)}, on the values that the outer one ended with: not within as many iterations as"
            " are tried where no other rank makes them. What it made would be exchanged, and would be no number that"
            " `vmap` gives. Bound the inner loop's iterations, or let it end at once on the outer one's last values."
        )


def count(flat: Emitter, eqn: compat.Equation, index: Any, branches: Sequence[Sequence[Any]]) -> dict[Group, Any]:
    """Emits, for each group of ranks that exchange in a conditional, a sum over it of who takes which branch.

    Eight bytes, where one of two branches exchanges. They share the buffer of other small sums.
    """
    found: dict[Group, list[int]] = {}
    counts: dict[Group, Any] = {}
    for n, eqns in enumerate(branches):
        for group in dict.fromkeys(g for e in eqns for g in groups_of(flat, e)):
            found.setdefault(group, []).append(n)
    for (axes, groups), takers in found.items():

        def counted(i: Any, axes: Any = axes, groups: Any = groups, takers: Any = tuple(takers)) -> Any:
            ways = [lax.eq(i, jnp.asarray(n, i.dtype)) for n in takers]
            if len(ways) < len(branches):
                other = ways[0]
                for way in ways[1:]:
                    other = lax.bitwise_or(other, way)
                ways.append(lax.bitwise_not(other))
            # Floats, that they may travel with gradients.
            one_hot = lax.concatenate([lax.reshape(lax.convert_element_type(w, jnp.float32), (1,)) for w in ways], 0)
            # No light work, that it is not done between exchanges: of zeros in place of what a rank has failed to make
            # it would make a vote.
            return lax.psum(lax.optimization_barrier(one_hot), axes, axis_index_groups=groups)

        var = _emit(flat, eqn, counted, index)
        flat.decisions[var] = Decision(axes=axes, takers=tuple(takers), source=compat.source_of(eqn))
        counts[axes, groups] = var
    return counts


def count_stopped(
    flat: Emitter,
    eqn: compat.Equation,
    stopped: Any,
    counted: Sequence[Any],
    axes: tuple[str, ...],
    inner: tuple[str, ...],
) -> None:
    """Emits a sum over `axes`, those that a loop exchanges over, of `stopped`: 1 on a rank that has left one of the
    `inner` loops, named by their lines, before its end. It is taken where what is `counted` is needed.
    """

    def summed(x: Any) -> Any:
        one = lax.reshape(lax.convert_element_type(x, jnp.float32), (1,))
        return lax.psum(lax.optimization_barrier(one), axes)  # a barrier and a float, as in `count`

    var = _emit(flat, eqn, summed, stopped)
    flat.decisions[var] = EarlyExit(source=compat.source_of(eqn), inner=inner)
    for v in counted:
        flat.counters.setdefault(v, set()).add(var)


def _emit(flat: Emitter, eqn: compat.Equation, function: Callable[..., Any], value: Any) -> Any:
    aval = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
    (var,) = flat.emit_for(eqn, jax.make_jaxpr(function, axis_env=list(flat.axes.items()))(aval), [value])
    return var


def groups_of(flat: Emitter, eqn: compat.Equation) -> Iterator[Group]:
    """The groups of several ranks that exchange in an equation, one for each exchange."""
    if (found := flat.wire.recognise(eqn, flat.axes)) is not None:
        yield from ((x.axes, dict(x.params).get("groups")) for x in found if any(flat.axes[a] > 1 for a in x.axes))
        return
    for jaxpr in compat.sub_jaxprs(eqn):
        for inner in compat.open_jaxpr(jaxpr)[0].eqns:
            yield from groups_of(flat, inner)
