"""`nonfinite="skip"`: a step with one more argument that says, after its exchanges, whether its state shall change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross.errors import CutError
from jaxcross.jobs.latest_state import form


@cache
def go() -> jax.Array:
    """That it shall: what a step is called with. The commit vote may put False in its place."""
    return jnp.ones((), bool)


def guarded(function: Callable[..., Any], name: str, state: Sequence[int], *, donated: bool) -> Callable[..., Any]:
    """`function` with `go` as its last positional argument: where that is False, its state comes back as it came.

    The state is what the arguments numbered `state` have in common with the results: of each, the part that has its
    structure, shapes and types, wherever it stands; of an argument that is one array, a whole result. If `donated` is
    false it may have none: an evaluation returns no state.

    Raises:
        CutError: (when traced) no donated argument is like a result, one is like several, or it seems to come back in
            another structure; an argument that is not in `state` comes back beside one that is.
    """

    def guard(*args: Any, **kwargs: Any) -> Any:
        *own, changes = args
        results = _Results(function(*own, **kwargs), name)
        states = {n: own[n] for n in state if n < len(own)}
        lacking = results.keep(states, changes)
        if donated and not results.kept:
            raise CutError(
                f"`{name}` cannot skip a step: none of its results has the structure, shapes and types of an argument"
                ' that it donates. With `nonfinite="skip"` a step returns its new state, in a tuple with its metrics'
                " perhaps."
            )
        fixed = [n for n, *_ in static]
        numbers = [n for n in range(len(own) + len(fixed)) if n not in fixed]  # as the caller counts
        if donated:
            results.check_scattered({numbers[n]: states[n] for n in lacking})
        elif results.kept:
            results.check_others({numbers[n]: old for n, old in enumerate(own) if n not in states})
        return results.tree()

    static = getattr(function, "static", ())
    guard.__name__ = name
    guard.static = static  # type: ignore[attr-defined]
    guard.guards = True  # type: ignore[attr-defined]
    return guard


class _Results:
    """What a step returns, with its state kept where it shall not change."""

    def __init__(self, results: Any, name: str) -> None:
        flat, self._structure = jax.tree.flatten_with_path(results)
        self._results, self._name = results, name
        self._paths, self._leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
        self.kept: set[int] = set()  # leaves that are state

    def tree(self) -> Any:
        """The results, as the step returned them."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def keep(self, states: dict[int, Any], changes: Any) -> list[int]:
        """Lets parts of the results be what they were, unless the state `changes`. Returns the numbers of the arguments
        that are like no part.
        """
        lacking: list[int] = []
        alike = _by_form(states)
        # Those that lie least deep first: parts of a state may be like another argument.
        for kind, numbers in sorted(alike, key=lambda item: self._places(item[0])[0]):
            depth, places = self._places(kind)
            if places and not depth:
                del numbers[1:]  # the one result there is
            if places and len(places) != len(numbers):
                raise CutError(
                    f"`{self._name}` cannot skip a step: {len(places)} of its results have the structure, shapes and"
                    f" types of {len(numbers)} argument{'s' * (len(numbers) > 1)}, and which of them is the new state"
                    " is not to be told. Return it alone, or in a tuple with parts that are not alike."
                )
            for place, number in zip(places, numbers, strict=False):
                for n, old in zip(place, jax.tree.leaves(states[number]), strict=True):
                    self._leaves[n] = jax.lax.select(changes, jnp.asarray(self._leaves[n]), jnp.asarray(old))
                self.kept.update(place)
            lacking += numbers if not places else []
        return lacking

    def check_scattered(self, donated: dict[int, Any]) -> None:
        """Raises CutError if one of these arguments, which are like no part, comes back in pieces: it would change."""
        free = Counter(form([leaf for n, leaf in enumerate(self._leaves) if n not in self.kept])[1])
        for number, old in donated.items():
            arrays = Counter(form(_arrays(old))[1])
            if arrays and not arrays - free:
                raise CutError(
                    f"`{self._name}` cannot skip a step: it donates argument {number} and returns arrays of the same"
                    " shapes and types in another structure, while a skipped step would keep its other arguments alone."
                    " Return each argument that is state in the structure that it has, and donate no others."
                )

    def check_others(self, others: dict[int, Any]) -> None:
        """Raises CutError if one of these arguments, which nobody has called state, seems to be."""
        for number, old in others.items():
            kind = form(old)
            if _arrays(old) and not _bare(kind) and self._places(kind)[1]:
                raise CutError(
                    f"`{self._name}` cannot skip a step: its first argument is its state, as it donates none, but"
                    f" argument {number} comes back in its structure as well. Name by `donate_argnums` all that are"
                    " state."
                )

    def _places(self, kind: Any) -> tuple[int, list[list[int]]]:
        """Where something of this form stands outside of what is kept: the depth, and the leaves of each that lies no
        deeper. One array counts as a result of its own only: metrics are arrays, too.
        """
        found: list[tuple[int, list[int]]] = []
        for path, part in jax.tree.leaves_with_path(self._results, is_leaf=lambda part: form(part) == kind):
            if form(part) != kind or (_bare(kind) and len(path) > (type(self._results) is tuple)):
                continue
            place = [n for n, own in enumerate(self._paths) if own[: len(path)] == path]
            if self.kept.isdisjoint(place):
                found.append((len(path), place))
        least = min((depth for depth, _ in found), default=0)
        return least, [place for depth, place in found if depth == least]


def _by_form(states: dict[int, Any]) -> list[tuple[Any, list[int]]]:
    """The arguments' numbers by what they are made like."""
    found: list[tuple[Any, list[int]]] = []
    for number, state in states.items():
        own = form(state)
        alike = next((numbers for kind, numbers in found if kind == own), None)
        if alike is not None:
            alike.append(number)
        elif own[1]:  # not one without arrays
            found.append((own, [number]))
    return found


def _bare(kind: Any) -> bool:
    """Whether that is the form of one array."""
    return bool(jax.tree_util.treedef_is_leaf(kind[0]))


def _arrays(tree: Any) -> list[Any]:
    """What is no scalar: metrics are scalars, too."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.ndim(leaf)]
