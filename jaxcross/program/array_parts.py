"""Describes the part of an array that an equation reads or writes, and any constant factor.

`provenance` uses the texts to tell apart exchanges of different parts of one array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from jaxcross import _jax_compat as compat

_THROUGH = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})


def ways_through(
    eqn: compat.Equation, makers: Mapping[Any, Any], result: int
) -> Sequence[str | None]:
    """Describes how each operand of a layout or element-wise equation reaches one of its results.

    Args:
        eqn: The equation.
        makers: The equation that computes each variable.
        result: The index of the result.

    Returns:
        One entry per operand: the part or the constant factor as text, or None if the operand
        doesn't reach the result (or only as an index). The text is empty if the whole operand
        passes through unscaled, and also if the part or the factor isn't a literal in the code.
    """
    name = eqn.primitive.name
    params = eqn.params
    ways: list[str | None] = [""] * len(eqn.invars)
    if name == "slice":
        ways[0] = _slice(
            params["start_indices"],
            params["limit_indices"],
            params["strides"],
            compat.array_type(eqn.invars[0]).shape,
        )
    elif name == "split":
        ways[0] = f"{params['axis']} {result} of {params['sizes']}"
    elif name == "concatenate":
        dim = params["dimension"]
        ends = list(accumulate(compat.array_type(a).shape[dim] for a in eqn.invars))
        if len(ends) > 1:
            ways = [f"{dim} to {end} of {ends[-1]}" for end in ends]
    elif name in ("dynamic_slice", "dynamic_update_slice"):
        n = 0 if name == "dynamic_slice" else 1
        starts = [_constant(a, makers) for a in eqn.invars[n + 1 :]]
        ways[n + 1 :] = [None] * len(starts)
        if None not in starts:
            ways[n] = f"{starts} of {compat.array_type(eqn.invars[0]).shape}"
    elif name in ("mul", "div"):
        for n, atom in enumerate(eqn.invars[::-1]):
            if isinstance(atom, compat.Literal):
                ways[n] = f"{name} {n} {atom.val}"
    return ways


def picks(eqn: compat.Equation) -> bool:
    """Whether an equation with one result reads or writes elements by an index."""
    return eqn.primitive.name.startswith("scatter") or eqn.primitive.name == "gather"


def ways_by_index(eqn: compat.Equation, makers: Mapping[Any, Any]) -> Sequence[str | None] | None:
    """Like `ways_through`, for an equation that `picks`; None if the index isn't a literal."""
    at = _constant(eqn.invars[1], makers)
    if at is None:
        return None
    part = f"{at} of {compat.array_type(eqn.invars[0]).shape}"
    return [part, None] if eqn.primitive.name == "gather" else ["", None, part]


def _slice(
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int] | None,
    shape: Sequence[int],
) -> str:
    """Describes the dimensions that a slice cuts.

    The other dimensions are left out, because their size may differ between ranks: a batch may be
    short.
    """
    steps = strides or [1] * len(shape)
    cut = [
        x
        for x in zip(range(len(shape)), starts, limits, steps, shape, strict=True)
        if x[1:4] != (0, x[4], 1)
    ]
    return str(cut) if cut else ""


def _constant(atom: compat.Atom, makers: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """Returns the integers of an index, or None if they aren't literals in the code."""
    if isinstance(atom, compat.Literal):
        return (int(atom.val),)
    eqn = makers.get(atom)
    if eqn is not None and eqn.primitive.name in _THROUGH:
        return _constant(eqn.invars[0], makers)
    if eqn is not None and eqn.primitive.name == "concatenate":
        parts = [_constant(a, makers) for a in eqn.invars]
        return None if None in parts else tuple(n for part in parts for n in part or ())
    return None
