"""`nonfinite="skip"`: steps that keep their old state after a non-finite exchange.

After a step's exchanges, the ranks vote on whether to skip it. To make the compiled step depend on
the outcome, we give it an extra boolean argument, the commit flag. For each array of the state, the
step then returns the new value if the flag is true, and the old value otherwise. The exchanges
don't depend on the flag, so they don't have to wait for the vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxcross._arguments import in_words
from jaxcross._pytree import PyTree, hold_static, release_static
from jaxcross.errors import CutError
from jaxcross.jobs import form_of

Form: TypeAlias = tuple[Any, list[Any]]  # structure, followed by shapes and types; see `form_of`


@cache
def commit_flag() -> jax.Array:
    """Returns the default value of the commit flag, True.

    It's replaced by False if the ranks vote to skip the step.
    """
    return jnp.ones((), bool)


def with_commit_flag(
    function: Callable[..., PyTree], name: str, state: Sequence[int | str], *, donated: bool
) -> Callable[..., PyTree]:
    """Returns `function` with a commit flag as an extra last positional argument.

    If the flag is False, the new function returns the same results except that the state keeps its
    old values. The state consists of the arguments whose numbers or names are listed in `state`.

    For each argument that's part of the state, we look for a part of the results with the same
    structure, shapes and types, at any depth. An argument that's just a single array only matches a
    top-level result. If `donated` is false, it's fine if the results don't contain any state,
    because the step may be an evaluation.

    Raises:
        CutError: (when traced) No result looks like a donated argument, several results look like
            the same argument, or a donated argument seems to come back in a different structure.
            Without donated arguments: an argument that isn't in `state` comes back alongside an
            argument that is.
    """

    def flagged(*args: PyTree, **kwargs: PyTree) -> PyTree:
        *given, commits = args
        # We need the old values of the arguments in case the step is skipped. But a step may update
        # a dict it was given in place and return it. So copy the dicts and other containers first
        # (but not the arrays in them), and take the old values from the copies.
        # Static leaves have no old value to keep, so they're made part of the structure.
        own = {
            place: jax.tree.map(lambda leaf: leaf, hold_static(argument))
            for place, argument in (*enumerate(given), *kwargs.items())
        }
        results = _Results(hold_static(function(*given, **kwargs)), name)
        states = {place: own[place] for place in state if place in own}
        lacking = results.keep(states, commits)
        if donated and not results.kept:
            raise CutError(
                f"`{name}` cannot skip a step: none of its results has the structure, shapes and "
                'types of an argument that it donates. With `nonfinite="skip"`, return the new '
                "state, either alone or in a tuple with the metrics. "
                "See docs/howto/nonfinite.md#what-skip-needs."
            )
        fixed = [place for place, *_ in static if isinstance(place, int)]
        # Number the arguments in error messages as the caller would, i.e. including static
        # arguments.
        numbers = [n for n in range(len(given) + len(fixed)) if n not in fixed]
        called = {**dict(enumerate(numbers)), **{key: key for key in kwargs}}
        if donated:
            results.check_scattered({called[place]: states[place] for place in lacking})
        elif results.kept:
            results.check_others(
                {called[place]: old for place, old in own.items() if place not in states}
            )
        return release_static(results.tree())

    static = getattr(function, "static", ())
    flagged.__name__ = name
    flagged.static = static  # type: ignore[attr-defined]
    flagged.has_commit_flag = True  # type: ignore[attr-defined]
    return flagged


class _Results:
    """A step's results, in which the state only changes if the step is committed."""

    def __init__(self, results: PyTree, name: str) -> None:
        flat, self._structure = jax.tree.flatten_with_path(results)
        self._results = results
        self._name = name
        self._paths = [path for path, _ in flat]
        self._leaves = [leaf for _, leaf in flat]
        self.kept: set[int] = set()  # indices of the leaves that are state

    def tree(self) -> PyTree:
        return jax.tree.unflatten(self._structure, self._leaves)

    def keep(self, states: dict[int | str, PyTree], commits: jax.Array) -> list[int | str]:
        """Makes every part of the results that's state depend on the commit flag, `commits`.

        Returns the numbers or names of the arguments we couldn't find in the results.
        """
        lacking: list[int | str] = []
        alike = _by_form(states)
        # An argument may happen to have the same form (structure, shapes and types) as some inner
        # part of a larger state. So start with the forms closest to the top of the results: once
        # the larger state has been matched as a whole, its inner parts can't be mistaken for that
        # argument any more.
        for kind, numbers in sorted(alike, key=lambda item: self._positions(item[0])[0]):
            depth, parts = self._positions(kind)
            if parts and not depth:
                del numbers[1:]  # a step with a single result
            if parts and len(parts) != len(numbers):
                raise CutError(
                    f"`{self._name}` cannot skip a step: {len(parts)} of its results have the "
                    f"structure, shapes and types of {len(numbers)} "
                    f"argument{'s' * (len(numbers) > 1)}, so it is ambiguous which of them is the "
                    "new state. Return the state alone, or in a tuple whose other elements differ "
                    "from it in structure, shapes or types. "
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

        A skipped step must leave the state as it was. We find the state among the results by the
        structure of the donated arguments. If a donated argument came back in a different
        structure, we'd miss it, and its arrays would change even in a step that's skipped.
        """
        free = Counter(
            form_of([leaf for n, leaf in enumerate(self._leaves) if n not in self.kept])[1]
        )
        for place, old in donated.items():
            arrays = Counter(form_of(_arrays(old))[1])
            if arrays and not arrays - free:
                raise CutError(
                    f"`{self._name}` cannot skip a step: it donates argument {in_words(place)} and "
                    "returns arrays of the same shapes and types in another structure, so a "
                    "skipped step would not keep that argument as it was. Return each argument "
                    "that is state in its original structure, and donate no others. "
                    "See docs/howto/nonfinite.md#what-skip-needs."
                )

    def check_others(self, others: dict[int | str, PyTree]) -> None:
        """Raises CutError if an argument that isn't declared as state looks like state."""
        for place, old in others.items():
            kind = form_of(old)
            if _arrays(old) and not _bare(kind) and self._positions(kind)[1]:
                raise CutError(
                    f"`{self._name}` cannot skip a step: it donates no argument, so the first one "
                    f"is taken as its state, but argument {in_words(place)} is returned in its own "
                    "structure as well. Name all arguments that are state with `donate_argnums` or "
                    "`donate_argnames`. "
                    "See docs/howto/nonfinite.md#what-skip-needs."
                )

    def _positions(self, kind: Form) -> tuple[int, list[list[int]]]:
        """Finds parts of this form closest to the top. Returns their depth and each part's leaves.

        We use this to find an argument's new value among the step's results, skipping parts that
        already belong to another argument. A single array only matches a top-level result, i.e.
        what the step returns or an element of the tuple it returns. Any deeper, an array of the
        right shape might just as well be a metric.
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
    """Groups the arguments by form, leaving out those without arrays."""
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
    """Returns all leaves except scalars, which may be metrics."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.ndim(leaf)]
