"""Finds exchanged values that aren't finite, and applies the job's policy to them.

**Problem.** An exchange spreads a NaN from one rank to all others, so we check the results of every
collective segment on the host (`FiniteCheck`). But a segment may compute with the exchanged values
before it returns anything. If its result isn't finite, we want to name the exchange behind it, so
`_exchange_behind` searches backwards.

Conversely, a result may be finite even though an exchanged value isn't: dividing by an infinite
gradient norm gives 0.

**Idea.** For each segment, `masked_by` finds the exchanged values whose NaNs and infinities might
be hidden by a later operation. The segment returns these values on top of its own results so that
they can be checked, too.

Under the policy `nonfinite="skip"`, a step keeps its old state if some exchanged value wasn't
finite. The ranks vote on that at the end of the step (`interleave/vote`). The outcome is passed to
the step as an additional argument, the commit flag (`step/commit_flag`), which selects between its
new and its old state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError
from jaxcross.program.graph import Graph, Group, exchanges_of, variables
from jaxcross.program.ir import Exchange, Program, Segment

NonFinite = Literal["ignore", "raise", "skip", "eject"]
"""What a job does if a step's exchanged values aren't all finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteOutcome:
    """What happens to a step whose exchanged values aren't all finite.

    Attributes:
        error: Why the step fails, or None if it doesn't.
        ejects: Whether the job is ejected instead of failing.
        skips: Whether the step must keep its old state.
    """

    error: FloatingPointError | None = None
    ejects: bool = False
    skips: bool = False

    @classmethod
    def by_policy(cls, policy: NonFinite, what: str, *, skippable: bool) -> NonFiniteOutcome:
        """Returns the outcome under a job's policy; `what` describes the non-finite values.

        Under `skip`, calls that can't be skipped, such as evaluations, ignore the values.
        """
        if policy == "skip":
            return cls(skips=skippable)
        return cls(error=FloatingPointError(what), ejects=policy == "eject")


@final
class FiniteCheck:
    """Checks the exchanged values of a single step in flight, under a job's policy."""

    __slots__ = ("_arrived", "_policy", "_program")

    def __init__(self, program: Program, policy: NonFinite) -> None:
        self._program = program
        self._policy: NonFinite = policy
        self._arrived: dict[int, Sequence[Any]] = {}

    def keep(self, index: int, results: Sequence[Any]) -> None:
        """Holds on to a collective segment's results until they are checked."""
        self._arrived[index] = results

    def outcome(self, index: int) -> NonFiniteOutcome | None:
        """Returns what follows from a segment's results, or None if they're all finite.

        Waits for the results.
        """
        program = self._program
        what = _bad_exchange(program, program.segments[index], self._arrived.pop(index))
        if what is None:
            return None
        skippable = bool(program.commit_flag_inputs)
        return NonFiniteOutcome.by_policy(self._policy, what, skippable=skippable)


def refuse_to_skip(program: Program) -> None:
    """Raises a CutError for a step that can't be skipped.

    Programs without exchanges needn't be skippable.
    """
    if program.exchanges:
        raise CutError(
            f"`{program.name}` cannot skip a step: none of its results has the structure, shapes "
            "and types of its first argument, and it donates no argument, so it is not known which "
            "argument is its state. Pass the positions of its state as `donate_argnums`, and "
            "return the new state. If this is an evaluation, call it after the first step, because "
            'with `nonfinite="skip"`, the first function with exchanges that a job calls counts as '
            "its step. "
            "See docs/howto/nonfinite.md#what-skip-needs."
        )


# If any operand of these operations isn't finite, we assume that the result isn't either, so it's
# enough to check the result. For `div`, this is only true of the numerator: dividing by infinity
# gives 0.
_CARRY = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "all_gather",
        "all_gather_invariant",
        "all_to_all",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "div",
        "dynamic_slice",
        "dynamic_update_slice",
        "expand_dims",
        "mul",
        "neg",
        "optimization_barrier",
        "pbroadcast",
        "ppermute",
        "psum",
        "psum_invariant",
        "psum_scatter",
        "reduce_precision",
        "reduce_scatter",
        "reshape",
        "slice",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "sub",
        "transpose",
    }
)


def masked_by(graph: Graph, group: Group, body: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Returns exchanged values that may be non-finite although the segment's outputs are finite.

    Checking the segment's outputs isn't enough. An exchanged value may be used only inside the
    segment, by an operation that hides a NaN or an infinity in it. For example, dividing the
    gradients by an infinite norm gives 0.
    """
    exchanged = {
        v
        for i in group.exchanges
        for v in graph.eqns[i].outvars
        if jnp.issubdtype(v.aval.dtype, jnp.inexact)
    }
    if (
        group.as_written
    ):  # its outputs may be anything that the step computes, so only exchanged values are checked
        return [v for e in body for v in e.outvars if v in exchanged and v not in outs]
    # Walk backwards through the segment, collecting the masked values, i.e. those that may be
    # non-finite even though everything that leaves the segment is finite.
    masked: set[Any] = set()
    leaving = set(outs)
    for e in reversed(body):
        carries = e.primitive.name in _CARRY and all(
            jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in e.outvars
        )
        lost = not masked.isdisjoint(e.outvars) and not exchanges_of(
            e, graph.traced
        )  # an exchange's results are checked themselves
        # An operand is masked if the operation itself may hide that it isn't finite, or if a later
        # operation may hide it in the result.
        if lost or not carries:
            masked.update(variables(e.invars))
        elif e.primitive.name == "div":
            masked.update(variables(e.invars[1:]))
    return [
        v for e in body for v in e.outvars if v in exchanged and v in masked and v not in leaving
    ]


def _bad_exchange(program: Program, segment: Segment, results: Sequence[Any]) -> str | None:
    """Names the first exchange with non-finite results in a collective segment, or returns None.

    Waits for the results.

    Args:
        program: The program that the segment belongs to.
        segment: A collective segment.
        results: The segment's results, on the host.
    """
    # A unit's other results may be anything that the step computes.
    bad = [
        place
        for place, value in enumerate(results)
        if not is_finite(value) and (not program.is_unit or _is_exchanged(program, segment, place))
    ]
    if not bad:
        return None
    _, exchange = min(
        (_exchange_behind(program, segment, place) for place in bad), key=lambda found: found[0]
    )
    return f"`{exchange.line()}` at {exchange.source} made values that are not finite"


def is_finite(value: jax.Array | np.ndarray) -> bool:
    """Whether an array is free of infinities and NaNs.

    This usually takes a single pass over the array, because if a sum is finite, so are all of its
    terms. Only if it isn't do we look at each element, since the sum may merely have overflowed.
    """
    if not isinstance(value.dtype, np.dtype):
        return True  # random keys
    array = np.asarray(value)
    if array.dtype.kind == "V":
        array = array.astype(np.float32)  # bfloat16 and narrower types, which NumPy sums slowly
    if array.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(array)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())  # finite terms may overflow


def _is_exchanged(program: Program, segment: Segment, place: int) -> bool:
    """Whether a result comes straight from an exchange, without any computation in between."""
    inner, _ = compat.open_jaxpr(segment.jaxpr)
    result = inner.outvars[place]
    return any(
        result is v and exchanges_of(e, program.traced) for e in inner.eqns for v in e.outvars
    )


def _exchange_behind(program: Program, segment: Segment, place: int) -> tuple[int, Exchange]:
    """Returns the nearest exchange that a result was computed from, and its equation's position."""
    inner, _ = compat.open_jaxpr(segment.jaxpr)
    maker = {v: (at, eqn) for at, eqn in enumerate(inner.eqns) for v in eqn.outvars}
    # Breadth-first search from the result back to the exchanges.
    queue = [inner.outvars[place]]
    for var in queue:  # grows during the loop
        if isinstance(var, compat.Literal) or var not in maker:
            continue
        at, eqn = maker[var]
        found = exchanges_of(eqn, program.traced)
        if found:
            return at, found[min(eqn.outvars.index(var), len(found) - 1)]
        queue += eqn.invars
    return 0, segment.exchanges[0]
