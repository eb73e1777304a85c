"""Tracks the latest state of a job, so that it's available however the job ends.

A job's function runs `state, metrics = step(state, batch)` in some form, and may be stopped between
the step's commit and the moment at which it tells us the new state. By then, the step may have
donated the old state. So besides the state that the function set, we keep the results of the latest
committed step and find the state among them by its structure, shapes and types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._pytree import PyTree, shape_and_type

T = TypeVar("T")
_copy_array = jax.jit(jnp.copy)  # dispatches in 13 us per scalar; `jnp.copy` takes 57 us


class JobState:
    """A job's state as its function last set it, and its latest committed step's results.

    Only the job's thread changes this object, and after that thread the runner does. However, once
    a vote has ended the job, another job's exchange lane may call `newest` at the same time, to
    find out how much memory this job still holds. That's why the results are a single attribute
    that's read once, and why `release` is called only after the state has been set.

    Only references to one step's results are held, so arrays that the next step donates are deleted
    here too. The results are held as leaves, because the job's function may write into the dicts
    and NNX states around them.

    Attributes:
        state: The state that the job restored, saved or returned.
        is_guess: Whether `state` is taken from a step's results although the job's function is
            known to change results before the next step. It may have been about to change these
            too.
    """

    __slots__ = (
        "_changed",
        "_kind",
        "_part",
        "_results",
        "_results_step",
        "_state_step",
        "is_guess",
        "state",
    )

    def __init__(self) -> None:
        self.state: PyTree = None
        self.is_guess = False
        self._changed = False  # whether the function changes results before the next step
        # The structure of the results to which `_part` belongs.
        self._kind = jax.tree.structure(None)
        # Which leaves of the results correspond to the state; None if unknown.
        self._part: slice | None = None
        self._state_step = 0
        self._results = jax.tree.flatten(None)
        self._results_step = 0

    @property
    def step(self) -> int:
        """The number of steps after which `state` was set."""
        return self._state_step

    def set(self, state: PyTree, step: int) -> None:
        """Sets the state that the job's function has after `step` steps."""
        self.state, self._state_step, self.is_guess = state, step, False

    def note_arguments(self, arguments: Sequence[object]) -> None:
        """Finds out whether the function passes the latest results to the next step unchanged."""
        leaves, structure = self._results
        if self._changed or not leaves or self._state_step == self._results_step:
            return
        # We search only once per structure, because this runs before every step.
        if structure != self._kind:
            self._kind, self._part = (
                structure,
                self._part_like_state(jax.tree.unflatten(structure, leaves)),
            )
        if self._part is None:
            return
        given = set(map(id, arguments))
        self._changed = any(
            id(leaf) not in given for leaf in leaves[self._part] if isinstance(leaf, jax.Array)
        )

    def _part_like_state(self, results: PyTree) -> slice | None:
        found = select_state(self.state, results)
        if form_of(found) != form_of(self.state):
            return None
        if found is results:
            return slice(None)
        before = results[: [id(part) for part in results].index(id(found))]
        start = len(jax.tree.leaves(before))
        return slice(start, start + len(jax.tree.leaves(found)))

    def note_results(self, results: PyTree, step: int) -> None:
        """Records the results of a call that all ranks committed, after `step` steps."""
        # The results of another function aren't the state, unless the training step's results were
        # donated to it.
        if step > self._results_step or has_deleted(self._results[0]):
            self._results = jax.tree.flatten(results)
            self._results_step = step

    def newest(self) -> tuple[PyTree, int]:
        """Returns the newest known state that hasn't been donated, and its number of steps.

        That's either `state` or the state after the last committed step.
        """
        leaves, structure = self._results
        if leaves and (self._state_step < self._results_step or has_deleted(self.state)):
            found = select_state(self.state, jax.tree.unflatten(structure, leaves))
            if not has_deleted(found):
                return found, self._results_step
        return self.state, self._state_step

    def adopt_results(self) -> None:
        """Sets `state` to the one after the last committed step.

        For a job whose function ended before it set that state itself.
        """
        state, step = self.newest()
        is_guess = self._changed and state is not self.state
        self.set(state, step)
        self.is_guess = is_guess

    def release(self) -> None:
        """Drops the references to the step's results."""
        self._results = jax.tree.flatten(None)


def select_state(state: PyTree, results: PyTree) -> PyTree:
    """Returns the part of a step's results that corresponds to `state`.

    If the results are a tuple, that's its only element with the structure, shapes and element types
    of `state`. If no element or more than one matches, all of `results` is returned.
    """
    if (
        state is not None
        and isinstance(results, tuple)
        and jax.tree.structure(results) != jax.tree.structure(state)
    ):
        alike = [part for part in results if form_of(part) == form_of(state)]
        return alike[0] if len(alike) == 1 else results
    return results


def holds_state(state: PyTree, results: PyTree) -> bool:
    """Whether a function's results contain an array for each one of `state`, in any order.

    The results of a training step do.
    """
    wanted, found = (
        Counter(map(_shape_and_type, jax.tree.leaves(tree))) for tree in (state, results)
    )
    return wanted <= found


def own_copy(state: T) -> T:
    """Returns a copy of `state` that shares no array with it. Doesn't wait for the copies."""
    return jax.tree.map(_copy, state)


def _copy(leaf: PyTree) -> PyTree:
    if isinstance(leaf, jax.Array):
        return _copy_array(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def has_deleted(tree: PyTree) -> bool:
    """Whether an array of the tree was donated."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def form_of(tree: PyTree) -> tuple[object, list[object]]:
    """Returns the structure of a tree and the shapes and types of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [_shape_and_type(leaf) for leaf in leaves]


def _shape_and_type(leaf: object) -> object:
    try:
        return shape_and_type(leaf)
    except TypeError:  # not an array but, e.g., a string
        return type(leaf)
