"""Describes the part of an array that an equation reads or writes, and the constant by which it
multiplies.
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
        result: The number of the result.

    Returns:
        For each operand the part or the factor as text, empty if all of it does so unchanged, or
        None if it does not.
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
    """Whether an equation of one result reads or writes elements by an index."""
    return eqn.primitive.name.startswith("scatter") or eqn.primitive.name == "gather"


def ways_by_index(eqn: compat.Equation, makers: Mapping[Any, Any]) -> Sequence[str | None] | None:
    """Does the same for an equation that `picks`; returns None where the index is not written in
    the code.
    """
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
    """Describes the dimensions that a slice cuts. The others do not matter: a batch may be short
    there.
    """
    steps = strides or [1] * len(shape)
    cut = [
        x
        for x in zip(range(len(shape)), starts, limits, steps, shape, strict=True)
        if x[1:4] != (0, x[4], 1)
    ]
    return str(cut) if cut else ""


def _constant(atom: compat.Atom, makers: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """Returns the integers that an index is made of, None if they are not written in the code."""
    if isinstance(atom, compat.Literal):
        return (int(atom.val),)
    eqn = makers.get(atom)
    if eqn is not None and eqn.primitive.name in _THROUGH:
        return _constant(eqn.invars[0], makers)
    if eqn is not None and eqn.primitive.name == "concatenate":
        parts = [_constant(a, makers) for a in eqn.invars]
        return None if None in parts else tuple(n for part in parts for n in part or ())
    return None
