"""Tracks the latest state of a job, so that it is known however the job ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._pytree import PyTree

T = TypeVar("T")
_copy_array = jax.jit(jnp.copy)  # 13 us a scalar to dispatch, where `jnp.copy` takes 57


class LatestState:
    """A job's state as its function last set it, and the results of its latest committed step. On one rank; used by
    the job's thread, and by the runner after it.

    Only references to one step's results are held: arrays that the next step donates are deleted here as well.

    Attributes:
        state: The state that the job restored, saved or returned.
        is_guess: Whether `state` is a step's results, while the job's function is known to change results before the
            next step: it may have been about to change these.
    """

    __slots__ = ("_changed", "_part", "_results", "_results_step", "_state_step", "_structure", "is_guess", "state")

    def __init__(self) -> None:
        self.state: PyTree = None
        self.is_guess = False
        self._changed = False  # the function changes a step's results before the next step
        self._structure = jax.tree.structure(None)  # of the results to which `_part` belongs
        self._part: int | None = None  # the index of the result that is like the state; -1: all of them; None: unknown
        self._state_step = 0
        self._results: PyTree = None
        self._results_step = 0

    @property
    def step(self) -> int:
        """The number of steps after which `state` is the job's."""
        return self._state_step

    def set(self, state: PyTree, step: int) -> None:
        """Sets the state that the job's function has after `step` steps."""
        self.state, self._state_step, self.is_guess = state, step, False

    def note_arguments(self, arguments: Sequence[object]) -> None:
        """Notes whether the next step takes the latest one's results, or others that the function made of them."""
        if self._changed or self._results is None or self._state_step == self._results_step:
            return
        structure = jax.tree.structure(self._results)
        if structure != self._structure:  # compared once for each structure: this runs before every step
            self._structure, self._part = structure, self._part_like_state()
        if self._part is None:
            return
        given = set(map(id, arguments))
        part = self._results if self._part < 0 else self._results[self._part]
        self._changed = any(id(leaf) not in given for leaf in jax.tree.leaves(part) if isinstance(leaf, jax.Array))

    def _part_like_state(self) -> int | None:
        found = select_state(self.state, self._results)
        if form(found) != form(self.state):
            return None
        return -1 if found is self._results else [id(part) for part in self._results].index(id(found))

    def note_results(self, results: PyTree, step: int) -> None:
        """Notes the results of a call that all ranks committed, after `step` calls of the training step."""
        # Another function's results are not the state, unless it took the training step's results by donation.
        if step > self._results_step or has_deleted(self._results):
            self._results, self._results_step = results, step

    def latest(self) -> tuple[PyTree, int]:
        """Returns the newest state that is known and not donated, and its number of steps.

        It is `state`, or the one of the last committed step.
        """
        if self._results_step and (self._state_step < self._results_step or has_deleted(self.state)):
            found = select_state(self.state, self._results)
            if not has_deleted(found):
                return found, self._results_step
        return self.state, self._state_step

    def adopt_results(self) -> None:
        """Sets `state` to the one of the last committed step, for a job whose function ended before it did so."""
        state, step = self.latest()
        is_guess = self._changed and state is not self.state
        self.set(state, step)
        self.is_guess = is_guess

    def release(self) -> None:
        """Drops the step's results."""
        self._results = None


def select_state(state: PyTree, results: PyTree) -> PyTree:
    """Returns the part of a step's results that corresponds to `state`.

    This is the only element of a tuple with the structure, shapes and element types of `state`; if none or several
    have them, all of `results`.
    """
    if state is not None and isinstance(results, tuple) and jax.tree.structure(results) != jax.tree.structure(state):
        alike = [part for part in results if form(part) == form(state)]
        return alike[0] if len(alike) == 1 else results
    return results


def holds_state(state: PyTree, results: PyTree) -> bool:
    """Whether a function's results hold an array for each one of `state`, as a step's do, in any order."""
    wanted, found = (Counter(map(_shape_and_type, jax.tree.leaves(tree))) for tree in (state, results))
    return wanted <= found


def own_copy(state: T) -> T:
    """Returns a copy of `state` that shares no array with it. Dispatches the copies of JAX arrays; does not wait."""
    return jax.tree.map(_copy, state)


def _copy(leaf: PyTree) -> PyTree:
    if isinstance(leaf, jax.Array):
        return _copy_array(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def has_deleted(tree: PyTree) -> bool:
    """Whether an array of the tree was donated."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def form(tree: PyTree) -> tuple[object, list[object]]:
    """Returns the structure of a tree, and the shapes and types of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [_shape_and_type(leaf) for leaf in leaves]


def _shape_and_type(leaf: object) -> object:
    try:
        aval = jax.typeof(leaf)
    except TypeError:  # not an array, for example a text
        return type(leaf)
    return aval.shape, aval.dtype
