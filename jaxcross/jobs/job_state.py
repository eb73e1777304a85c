"""Tracks a job's latest state, making it available no matter how the job ends.

Suppose that a job is stopped right after `state, metrics = step(state, batch)`, before its function
could assign the new state to `job.state`. The state we know about is one step old, and most likely
its arrays are gone, because they were donated to the step. The only place to find the new state is
in the step's results. That's why we also hold on to the results of the latest committed step: if
the function doesn't get around to setting its state, we search them for an element with the same
structure, shapes and types as the last state that it did set.
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
    """The latest state that a job's function has set, and its latest committed step's results.

    Only the job's thread makes changes to this object, and after that thread has ended, the runner.
    However, once a vote has ended the job, the exchange lane may call `newest` concurrently, to
    find out how much memory the job is still holding. This is safe without a lock, since the
    results are stored in a single attribute that `newest` reads only once, and `release` is called
    only after the state has been set.

    We hold references to the step's results, not copies. If the next step donates one of these
    arrays, we can't use it any more either.

    The results are stored as a flat list of leaves, so it doesn't matter if the job's function
    modifies the dicts and NNX states in the tree.

    Attributes:
        state: The state that the job restored, saved or returned.
        is_guess: Whether `state` might be wrong. That's the case if we took it from a step's
            results, but have seen the job's function modify results before passing them to the next
            step. It may have been about to do so again.
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
        self._changed = False  # whether the function changes results before it passes them on
        # The structure of the results that `_part` refers to.
        self._kind = jax.tree.structure(None)
        # Which leaves of the results make up the state; None if unknown.
        self._part: slice | None = None
        self._state_step = 0
        self._results = jax.tree.flatten(None)
        self._results_step = 0

    @property
    def step(self) -> int:
        """How many steps had been made when `state` was set."""
        return self._state_step

    def set(self, state: PyTree, step: int) -> None:
        """Sets the state of the job's function after `step` steps."""
        self.state = state
        self._state_step = step
        self.is_guess = False

    def note_arguments(self, arguments: Sequence[object]) -> None:
        """Checks whether the function passes the latest results to the next step unchanged."""
        leaves, structure = self._results
        if self._changed or not leaves or self._state_step == self._results_step:
            return
        # This runs before every step, so only search for the state if the results have a new
        # structure.
        if structure != self._kind:
            # Set `_kind` last. If the search raises, e.g. in a pytree node of the user's, the next
            # call has to search again instead of using the part of an earlier structure.
            self._part = self._part_like_state(jax.tree.unflatten(structure, leaves))
            self._kind = structure
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
        """Records the results of a call that all ranks have committed, after `step` steps."""
        # We usually keep only the results of the training step, because other functions (e.g. for
        # evaluation) don't return the state. But if those results have since been donated to
        # another function, the state can only be in that function's results.
        if step > self._results_step or has_deleted(self._results[0]):
            self._results = jax.tree.flatten(results)
            self._results_step = step

    def newest(self) -> tuple[PyTree, int]:
        """Returns the newest state that hasn't been donated, and the step it belongs to.

        It comes from either `state` or the results of the latest committed step.
        """
        leaves, structure = self._results
        if leaves and (self._state_step < self._results_step or has_deleted(self.state)):
            found = select_state(self.state, jax.tree.unflatten(structure, leaves))
            if not has_deleted(found):
                return found, self._results_step
        return self.state, self._state_step

    def adopt_results(self) -> None:
        """Sets `state` to the state after the latest committed step.

        Call this if the job's function may have ended before setting that state itself.
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

    A step usually returns a tuple such as `(state, metrics)`, in which the state can be recognised
    as the element with the same structure, shapes and element types as `state`. If the results
    aren't such a tuple, or the number of matching elements isn't exactly one, we can't tell and
    return all of `results`.
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
    """Whether the results contain all arrays of `state`, in any order, going by shape and type.

    If so, the function is probably a training step that returns the new state.
    """
    wanted, found = (
        Counter(map(_shape_and_type, jax.tree.leaves(tree))) for tree in (state, results)
    )
    return wanted <= found


def own_copy(state: T) -> T:
    """Returns a copy of `state` that doesn't share arrays with it. Doesn't wait for the device."""
    return jax.tree.map(_copy, state)


def _copy(leaf: PyTree) -> PyTree:
    if isinstance(leaf, jax.Array):
        return _copy_array(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def has_deleted(tree: PyTree) -> bool:
    """Whether any array in the tree has been donated."""
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
