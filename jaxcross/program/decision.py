"""Counts how many ranks took each branch of a conditional, or left an inner loop early.

If ranks disagree about a conditional, those that don't take a branch exchange zeros instead.
Similarly, a rank that leaves a loop early exchanges something other than the loop's actual result.
This would go unnoticed, because the exchange itself succeeds.

So along with the exchange, the ranks count how many of them decided which way. Since they all
receive the same counts, either all of them fail the step or none of them do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcross import _jax_compat as compat
from jaxcross.errors import quoted
from jaxcross.program.emitter import Emitter

Group = tuple[tuple[str, ...], Any]
"""The ranks that take part in an exchange: its axes and, if given, the groups along them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchDecision:
    """A `cond` or `switch` with exchanges that's decided by values on the device.

    Attributes:
        axes: The axes that it exchanges over.
        takers: The branches that contain exchanges. Each has its own count, followed by a single
            count for all other branches.
        source: The user's line.
    """

    axes: tuple[str, ...]
    takers: tuple[int, ...]
    source: str

    def mismatch(self, counts: Sequence[float]) -> str | None:
        """Returns an error text if ranks took different branches, otherwise None.

        Args:
            counts: How many ranks took each branch, not counting failed ranks.
        """
        ways = [*(f"branch {n}, which exchanges" for n in self.takers), "one that does not"]
        taken = [f"{n:.0f} took {way}" for n, way in zip(counts, ways, strict=False) if n > 0]
        if len(taken) < 2:
            return None
        return (
            f"ranks decided the conditional at {self.source} differently. Of those that exchange "
            f"in it over {quoted(self.axes)}, {', and '.join(taken)}. They would "
            "average in zeros from ranks that do not take part, and drift apart. Decide by a value "
            "that all of them share, e.g. `lax.pmax(flag, axis)`. `optax.apply_if_finite`, and "
            "`optax.MultiSteps` with a function that skips, look at a rank's own gradients, so "
            "exchange the gradients before them rather than inside."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExit:
    """A loop that ranks may finish at different times, and whose inner loops feed an exchange.

    Attributes:
        source: The user's line.
        inner: The lines of the inner loops that a finished rank may leave before they end.
    """

    source: str
    inner: tuple[str, ...]

    def mismatch(self, counts: Sequence[float]) -> str | None:
        """Returns an error text if any rank left an inner loop early, as counted by `counts`."""
        if not counts[0]:
            return None
        return (
            f"ranks make different numbers of iterations of the loop at {self.source}. On "
            f"{counts[0]:.0f} of the ranks that had finished it, an inner loop, at "
            f"{' or '.join(self.inner)}, "
            "did not end within the iterations that jaxcross tries on the outer loop's last "
            "values. Its result would be exchanged, but is not what `vmap` gives. Limit the inner "
            "loop's iterations, or let it end at once on the outer loop's last values."
        )


def count(
    flat: Emitter, eqn: compat.Equation, index: Any, branches: Sequence[Sequence[Any]]
) -> dict[Group, Any]:
    """Emits a sum that counts the ranks per branch, for each group of ranks that exchange.

    Each sum takes four bytes per branch with exchanges, plus four for all other branches together,
    e.g. eight bytes if one of two branches exchanges. It can share a buffer with other small sums.
    """
    found: dict[Group, list[int]] = {}
    counts: dict[Group, Any] = {}
    for n, eqns in enumerate(branches):
        for group in dict.fromkeys(g for e in eqns for g in groups_of(flat, e)):
            found.setdefault(group, []).append(n)
    for (axes, groups), takers in found.items():

        def counted(
            i: Any, axes: Any = axes, groups: Any = groups, takers: Any = tuple(takers)
        ) -> Any:
            ways = [lax.eq(i, jnp.asarray(n, i.dtype)) for n in takers]
            if len(ways) < len(branches):
                other = ways[0]
                for way in ways[1:]:
                    other = lax.bitwise_or(other, way)
                ways.append(lax.bitwise_not(other))
            # Floats, so that the counts can share a message with gradients.
            one_hot = lax.concatenate(
                [lax.reshape(lax.convert_element_type(w, jnp.float32), (1,)) for w in ways], 0
            )
            # A failed rank runs its collective segments on zeros. If its choice of branch were
            # computed there, from these zeros, it would be counted as having taken a branch. The
            # barrier prevents this: since it isn't a host operation, everything in front of it ends
            # up in a compute segment.
            return lax.psum(lax.optimization_barrier(one_hot), axes, axis_index_groups=groups)

        var = _emit(flat, eqn, counted, index)
        flat.decisions[var] = BranchDecision(
            axes=axes, takers=tuple(takers), source=compat.source_of(eqn)
        )
        counts[axes, groups] = var
    return counts


def count_early_exits(
    flat: Emitter,
    eqn: compat.Equation,
    exited: Any,
    counted: Sequence[Any],
    axes: tuple[str, ...],
    inner: tuple[str, ...],
) -> None:
    """Emits a sum that counts the ranks that left an inner loop early.

    Args:
        flat: Receives the equations.
        eqn: The outer loop.
        exited: 1 if this rank has left one of the `inner` loops early, otherwise 0.
        counted: Results of the loop's exchanges. The sum is kept if any of them is read.
        axes: The axes that the loop exchanges over.
        inner: The lines of the inner loops.
    """

    def summed(x: Any) -> Any:
        one = lax.reshape(lax.convert_element_type(x, jnp.float32), (1,))
        # As in `count`, the barrier keeps this out of the collective segment.
        return lax.psum(lax.optimization_barrier(one), axes)

    var = _emit(flat, eqn, summed, exited)
    flat.decisions[var] = EarlyExit(source=compat.source_of(eqn), inner=inner)
    for v in counted:
        flat.counters.setdefault(v, set()).add(var)


def _emit(flat: Emitter, eqn: compat.Equation, function: Callable[..., Any], value: Any) -> Any:
    aval = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
    (var,) = flat.emit_for(
        eqn, jax.make_jaxpr(function, axis_env=list(flat.axes.items()))(aval), [value]
    )
    return var


def groups_of(flat: Emitter, eqn: compat.Equation) -> Iterator[Group]:
    """Yields the group of each exchange in an equation, skipping exchanges over a single rank."""
    found = flat.wire.recognise(eqn, flat.axes)
    if found is not None:
        yield from (
            (x.axes, dict(x.params).get("groups"))
            for x in found
            if any(flat.axes[a] > 1 for a in x.axes)
        )
        return
    for jaxpr in compat.sub_jaxprs(eqn):
        for inner in compat.open_jaxpr(jaxpr)[0].eqns:
            yield from groups_of(flat, inner)
