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
    """A job's state as its function last set it, and the results of its latest committed step, on one rank.

    Only the job's thread changes it, and the runner after that thread. Once a vote has ended the job, another job's
    exchange lane may call `latest` at the same time, to see how much memory this job still holds. So the results are
    one attribute, which is read once, and `release` drops them only after the state has been set.

    Only references to one step's results are held: arrays that the next step donates are deleted here as well. The
    results are held as leaves, because the job's function may write into the dicts and NNX states that hold them.

    Attributes:
        state: The state that the job restored, saved or returned.
        is_guess: Whether `state` is a step's results, while the job's function is known to change results before the
            next step: it may have been about to change these.
    """

    __slots__ = (
        "_changed", "_kind", "_part", "_results", "_results_step", "_state_step", "is_guess", "state"
    )  # fmt: skip

    def __init__(self) -> None:
        self.state: PyTree = None
        self.is_guess = False
        self._changed = False  # the function changes a step's results before the next step
        self._kind = jax.tree.structure(None)  # the structure of the results to which `_part` belongs
        self._part: slice | None = None  # the leaves of the results that are like the state; None: unknown
        self._state_step = 0
        self._results = jax.tree.flatten(None)
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
        leaves, structure = self._results
        if self._changed or not leaves or self._state_step == self._results_step:
            return
        if structure != self._kind:  # compared once for each structure: this runs before every step
            self._kind, self._part = structure, self._part_like_state(jax.tree.unflatten(structure, leaves))
        if self._part is None:
            return
        given = set(map(id, arguments))
        self._changed = any(id(leaf) not in given for leaf in leaves[self._part] if isinstance(leaf, jax.Array))

    def _part_like_state(self, results: PyTree) -> slice | None:
        found = select_state(self.state, results)
        if form(found) != form(self.state):
            return None
        if found is results:
            return slice(None)
        before = results[: [id(part) for part in results].index(id(found))]
        start = len(jax.tree.leaves(before))
        return slice(start, start + len(jax.tree.leaves(found)))

    def note_results(self, results: PyTree, step: int) -> None:
        """Notes the results of a call that all ranks committed, after `step` calls of the training step."""
        # Another function's results are not the state, unless it took the training step's results by donation.
        if step > self._results_step or has_deleted(self._results[0]):
            self._results = jax.tree.flatten(results)
            self._results_step = step

    def latest(self) -> tuple[PyTree, int]:
        """Returns the newest state that is known and not donated, and its number of steps.

        It is `state`, or the one of the last committed step.
        """
        leaves, structure = self._results
        if leaves and (self._state_step < self._results_step or has_deleted(self.state)):
            found = select_state(self.state, jax.tree.unflatten(structure, leaves))
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
        self._results = jax.tree.flatten(None)


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
