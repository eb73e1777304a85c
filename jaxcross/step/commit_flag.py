"""`nonfinite="skip"`: steps that leave their state unchanged if an exchange isn't finite.

Whether a step may change its state is known only after its exchanges, when the ranks vote. So the
step gets one more argument, the commit flag, which no exchange reads. The program uses it to select
between the old and the new value of each array of the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxcross._arguments import in_words
from jaxcross._pytree import PyTree
from jaxcross.errors import CutError
from jaxcross.jobs import form_of

Form: TypeAlias = tuple[Any, list[Any]]  # structure, then shapes and types; see `form_of`


@cache
def commit_flag() -> jax.Array:
    """Returns the last argument of a step with a commit flag, which is True.

    The commit vote may replace it by False.
    """
    return jnp.ones((), bool)


def with_commit_flag(
    function: Callable[..., PyTree], name: str, state: Sequence[int | str], *, donated: bool
) -> Callable[..., PyTree]:
    """Returns `function` with one more argument: if that `commit_flag` is False, the state is kept.

    The flag is the last positional argument. The state is the part of the results that corresponds
    to the arguments whose numbers or names are in `state`. For each of them, that's the part with
    the same structure, shapes and types, wherever it is in the results. An argument that is a
    single array corresponds only to a whole result. If `donated` is false, there may be no state,
    because an evaluation returns none.

    Raises:
        CutError: (when traced) No donated argument is like a result, an argument is like several
            results, or a donated argument seems to come back in a different structure. Or, without
            donated arguments, an argument that isn't in `state` comes back alongside one that is.
    """

    def flagged(*args: PyTree, **kwargs: PyTree) -> PyTree:
        *given, commits = args
        # A step may write into a dict or an NNX state that it was given. Without a copy of the
        # structure, that would then hold the new values.
        own = {
            place: jax.tree.map(lambda leaf: leaf, argument)
            for place, argument in (*enumerate(given), *kwargs.items())
        }
        results = _Results(function(*given, **kwargs), name)
        states = {place: own[place] for place in state if place in own}
        lacking = results.keep(states, commits)
        if donated and not results.kept:
            raise CutError(
                f"`{name}` cannot skip a step: none of its results has the structure, shapes and "
                'types of an argument that it donates. With `nonfinite="skip"` a step returns its '
                "new state, in a tuple with its metrics perhaps."
            )
        fixed = [place for place, *_ in static if isinstance(place, int)]
        # Numbered as in the caller's arguments, i.e. including static ones.
        numbers = [n for n in range(len(given) + len(fixed)) if n not in fixed]
        called = {**dict(enumerate(numbers)), **{word: word for word in kwargs}}
        if donated:
            results.check_scattered({called[place]: states[place] for place in lacking})
        elif results.kept:
            results.check_others(
                {called[place]: old for place, old in own.items() if place not in states}
            )
        return results.tree()

    static = getattr(function, "static", ())
    flagged.__name__ = name
    flagged.static = static  # type: ignore[attr-defined]
    flagged.has_commit_flag = True  # type: ignore[attr-defined]
    return flagged


class _Results:
    """A step's results, in which the state keeps its old values if the step isn't committed."""

    def __init__(self, results: PyTree, name: str) -> None:
        flat, self._structure = jax.tree.flatten_with_path(results)
        self._results, self._name = results, name
        self._paths, self._leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
        self.kept: set[int] = set()  # numbers of the leaves that are state

    def tree(self) -> PyTree:
        """Returns the results in their original structure."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def keep(self, states: dict[int | str, PyTree], commits: jax.Array) -> list[int | str]:
        """Makes each part that is state take its old value, unless the step `commits`.

        Returns the arguments that no part is like.
        """
        lacking: list[int | str] = []
        alike = _by_form(states)
        # Shallowest parts first, because a part of a state may look like another argument.
        for kind, numbers in sorted(alike, key=lambda item: self._positions(item[0])[0]):
            depth, parts = self._positions(kind)
            if parts and not depth:
                del numbers[1:]  # a step with a single result
            if parts and len(parts) != len(numbers):
                raise CutError(
                    f"`{self._name}` cannot skip a step: {len(parts)} of its results have the "
                    f"structure, shapes and types of {len(numbers)} "
                    f"argument{'s' * (len(numbers) > 1)}, and which of them is the new state is "
                    "ambiguous. Return it alone, or in a tuple with parts that are not alike."
                )
            for part, number in zip(parts, numbers, strict=False):
                for n, old in zip(part, jax.tree.leaves(states[number]), strict=True):
                    self._leaves[n] = jax.lax.select(
                        commits, jnp.asarray(self._leaves[n]), jnp.asarray(old)
                    )
                self.kept.update(part)
            lacking += numbers if not parts else []
        return lacking

    def check_scattered(self, donated: dict[int | str, PyTree]) -> None:
        """Raises CutError if an argument without a matching part is scattered over the results.

        Its arrays would change even if the step is skipped.
        """
        free = Counter(
            form_of([leaf for n, leaf in enumerate(self._leaves) if n not in self.kept])[1]
        )
        for place, old in donated.items():
            arrays = Counter(form_of(_arrays(old))[1])
            if arrays and not arrays - free:
                raise CutError(
                    f"`{self._name}` cannot skip a step: it donates argument {in_words(place)} and "
                    "returns arrays of the same shapes and types in another structure, while a "
                    "skipped step would keep its other arguments alone. Return each argument that "
                    "is state in the structure that it has, and donate no others."
                )

    def check_others(self, others: dict[int | str, PyTree]) -> None:
        """Raises CutError if an argument that isn't declared as state seems to be state."""
        for place, old in others.items():
            kind = form_of(old)
            if _arrays(old) and not _bare(kind) and self._positions(kind)[1]:
                raise CutError(
                    f"`{self._name}` cannot skip a step: its first argument is its state, as it "
                    f"donates none, but argument {in_words(place)} comes back in its structure as "
                    "well. Name by `donate_argnums` or `donate_argnames` all that are state."
                )

    def _positions(self, kind: Form) -> tuple[int, list[list[int]]]:
        """Returns the smallest depth at which parts of this form occur, and the leaves of each.

        Parts that are already known to be state don't count. A single array counts only if it's a
        whole result, because metrics are arrays too.
        """
        found: list[tuple[int, list[int]]] = []
        for path, part in jax.tree.leaves_with_path(
            self._results, is_leaf=lambda part: form_of(part) == kind
        ):
            if form_of(part) != kind or (
                _bare(kind) and len(path) > (type(self._results) is tuple)
            ):
                continue
            part_leaves = [n for n, own in enumerate(self._paths) if own[: len(path)] == path]
            if self.kept.isdisjoint(part_leaves):
                found.append((len(path), part_leaves))
        least = min((depth for depth, _ in found), default=0)
        return least, [leaves for depth, leaves in found if depth == least]


def _by_form(states: dict[int | str, PyTree]) -> list[tuple[Form, list[int | str]]]:
    """Groups the arguments by their form, leaving out arguments without arrays."""
    found: list[tuple[Form, list[int | str]]] = []
    for number, state in states.items():
        own = form_of(state)
        alike = next((numbers for kind, numbers in found if kind == own), None)
        if alike is not None:
            alike.append(number)
        elif own[1]:
            found.append((own, [number]))
    return found


def _bare(kind: Form) -> bool:
    """Whether this is the form of a single array."""
    return bool(jax.tree_util.treedef_is_leaf(kind[0]))


def _arrays(tree: PyTree) -> list[PyTree]:
    """Returns the leaves that aren't scalars. Scalars may be metrics."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.ndim(leaf)]
