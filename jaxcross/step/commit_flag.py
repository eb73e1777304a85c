"""`nonfinite="skip"`: steps that keep their old state if an exchange isn't finite.

The ranks decide whether to skip a step in a vote, which takes place after the step's exchanges. To
let the compiled step depend on the outcome, we add a boolean argument to it, the commit flag. For
each array of the state, the step then returns the new value if the flag is true, and the old value
otherwise. The exchanges don't read the flag, so they can run before the vote.
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
    """Returns the value that a call passes as its commit flag, True.

    If the ranks vote to skip the step, it's replaced by False.
    """
    return jnp.ones((), bool)


def with_commit_flag(
    function: Callable[..., PyTree], name: str, state: Sequence[int | str], *, donated: bool
) -> Callable[..., PyTree]:
    """Returns `function` with a commit flag as an additional last positional argument.

    If the flag is False, the returned function computes the same results, except that the state
    keeps its old values. The state consists of the arguments whose numbers or names are in `state`.
    For each of these, we search the results for a part with the same structure, shapes and types,
    which may be anywhere in the results. If the argument is a single array, we only accept a whole
    result. If `donated` is false, the results needn't contain a state, because the step may be an
    evaluation.

    Raises:
        CutError: (when traced) No result looks like a donated argument, several results look like
            the same argument, or a donated argument seems to come back in a different structure.
            Or, without donated arguments, an argument that isn't in `state` comes back alongside
            one that is.
    """

    def flagged(*args: PyTree, **kwargs: PyTree) -> PyTree:
        *given, commits = args
        # We need the arguments' old values in case the step is skipped. But a step may write new
        # values into a dict that it was given, and return this dict. So we first copy the dicts and
        # other containers, without copying the arrays in them, and take the old values from these
        # copies.
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
                "new state, in a tuple with its metrics perhaps. "
                "See docs/howto/nonfinite.md#what-skip-needs."
            )
        fixed = [place for place, *_ in static if isinstance(place, int)]
        # Error messages number the arguments as the caller does, i.e. including the static ones.
        numbers = [n for n in range(len(given) + len(fixed)) if n not in fixed]
        called = {**dict(enumerate(numbers)), **{key: key for key in kwargs}}
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
    """A step's results, whose state keeps its old values unless the step is committed."""

    def __init__(self, results: PyTree, name: str) -> None:
        flat, self._structure = jax.tree.flatten_with_path(results)
        self._results = results
        self._name = name
        self._paths = [path for path, _ in flat]
        self._leaves = [leaf for _, leaf in flat]
        self.kept: set[int] = set()  # numbers of the leaves that are state

    def tree(self) -> PyTree:
        """Returns the results in their original structure."""
        return jax.tree.unflatten(self._structure, self._leaves)

    def keep(self, states: dict[int | str, PyTree], commits: jax.Array) -> list[int | str]:
        """Makes the parts of the results that are state depend on the commit flag, `commits`.

        Returns the numbers or names of the arguments for which there's no such part.
        """
        lacking: list[int | str] = []
        alike = _by_form(states)
        # An argument may happen to have the same form (structure, shapes and types) as an inner
        # part of some larger state. So we first match the forms that occur closest to the top of
        # the results. Once the larger state has been matched as a whole, its inner parts can't be
        # mistaken for that argument.
        for kind, numbers in sorted(alike, key=lambda item: self._positions(item[0])[0]):
            depth, parts = self._positions(kind)
            if parts and not depth:
                del numbers[1:]  # a step with a single result
            if parts and len(parts) != len(numbers):
                raise CutError(
                    f"`{self._name}` cannot skip a step: {len(parts)} of its results have the "
                    f"structure, shapes and types of {len(numbers)} "
                    f"argument{'s' * (len(numbers) > 1)}, and which of them is the new state is "
                    "ambiguous. Return it alone, or in a tuple with parts that are not alike. "
                    "See docs/howto/nonfinite.md#what-skip-needs."
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
        """Raises CutError if a donated argument seems to come back in a different structure.

        When a step is skipped, the state must keep its old values. We find the state in the results
        by the structure of the donated arguments. If a donated argument comes back in a different
        structure, we can't find it there, so its arrays would change even though the step was
        skipped.
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
                    "is state in the structure that it has, and donate no others. "
                    "See docs/howto/nonfinite.md#what-skip-needs."
                )

    def check_others(self, others: dict[int | str, PyTree]) -> None:
        """Raises CutError if an argument that isn't declared as state seems to be state."""
        for place, old in others.items():
            kind = form_of(old)
            if _arrays(old) and not _bare(kind) and self._positions(kind)[1]:
                raise CutError(
                    f"`{self._name}` cannot skip a step: its first argument is its state, as it "
                    f"donates none, but argument {in_words(place)} comes back in its structure as "
                    "well. Name by `donate_argnums` or `donate_argnames` all that are state. "
                    "See docs/howto/nonfinite.md#what-skip-needs."
                )

    def _positions(self, kind: Form) -> tuple[int, list[list[int]]]:
        """Returns the smallest depth at which parts of this form occur, and each part's leaves.

        We use this to find an argument's new value among the step's results. A part that already
        belongs to another argument doesn't count. If the argument is a single array, only a whole
        result counts, i.e. what the step returns, or an element of the tuple that it returns.
        Deeper inside, an array of the right shape could just as well be a metric.
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
    """Groups the arguments by their form. Leaves out arguments that contain no arrays."""
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
    """Returns the leaves that aren't scalars, because scalars may be metrics."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.ndim(leaf)]
