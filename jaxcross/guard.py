"""`nonfinite="skip"`: a step with one more argument that says, after its exchanges, whether its state shall change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross.errors import CutError
from jaxcross.runtime.kept import form


@cache
def go() -> jax.Array:
    """That it shall: what a step is called with. The commit vote may put False in its place."""
    return jnp.ones((), bool)


def guarded(function: Callable[..., Any], name: str, state: Sequence[int], *, donated: bool) -> Callable[..., Any]:
    """`function` with `go` as its last positional argument: where that is False, its state comes back as it came.

    The state is what the arguments numbered `state` have in common with the results: of each, the result that has its
    structure, shapes and types. If `donated` is false it may have none: an evaluation returns no state.

    Raises:
        CutError: (when traced) no donated argument is like a result, or one is like several.
    """

    def guard(*args: Any, **kwargs: Any) -> Any:
        *own, changes = args
        results = function(*own, **kwargs)
        return _keep(results, [own[n] for n in state if n < len(own)], changes, name, donated)

    guard.__name__ = name
    guard.static = getattr(function, "static", ())  # type: ignore[attr-defined]
    guard.guards = True  # type: ignore[attr-defined]
    return guard


def _keep(results: Any, states: Sequence[Any], changes: Any, name: str, donated: bool) -> Any:
    for old in states:
        if form(old) == form(results):
            return _select(changes, results, old)
    parts = list(results) if type(results) is tuple else [results]
    forms, kept = [form(part) for part in parts], False
    for kind, olds in _by_form(states):
        places = [n for n, other in enumerate(forms) if other == kind]
        if places and len(places) != len(olds):
            raise CutError(
                f"`{name}` cannot skip a step: {len(places)} of its results have the structure, shapes and types of"
                f" {len(olds)} argument{'s' * (len(olds) > 1)}, and which of them is the new state is not to be told."
                " Return it alone, or in a tuple with parts that are not alike."
            )
        for n, old in zip(places, olds, strict=False):
            parts[n], kept = _select(changes, parts[n], old), True
    if donated and not kept:
        raise CutError(
            f"`{name}` cannot skip a step: none of its results has the structure, shapes and types of an argument that"
            ' it donates. With `nonfinite="skip"` a step returns its new state, in a tuple with its metrics perhaps.'
        )
    return tuple(parts) if type(results) is tuple else parts[0]


def _by_form(states: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    found: list[tuple[Any, list[Any]]] = []
    for state in states:
        own = form(state)
        alike = next((olds for kind, olds in found if kind == own), None)
        if alike is not None:
            alike.append(state)
        elif own[1]:  # not one without arrays
            found.append((own, [state]))
    return found


def _select(changes: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda x, y: jax.lax.select(changes, jnp.asarray(x), jnp.asarray(y)), new, old)
