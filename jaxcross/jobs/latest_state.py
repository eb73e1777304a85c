"""The state that a job is left with, however it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_copy_array = jax.jit(jnp.copy)  # 13 us a scalar to dispatch, where `jnp.copy` takes 57


class LatestState:
    """A job's state as its function last gave it, and the results of its latest committed step. On one rank; used by
    the job's thread, and by the runner after it.

    Only references are held, of one step's results: arrays that the next step donates are gone from here as well.

    Attributes:
        state: What the job restored, saved or returned.
        is_guess: Whether `state` is a step's results, and the function of the job is known to change those before the
            next step: what it was about to make of them is not known.
    """

    __slots__ = ("_changed", "_made", "_part", "_results", "_results_step", "_state_step", "is_guess", "state")

    def __init__(self) -> None:
        self.state: Any = None
        self.is_guess = False
        self._changed = False
        self._made = jax.tree.structure(None)  # the structure of results of which `_part` tells
        self._part: int | None = None  # of a step's results, the one that is like the state; -1: all; None: not known
        self._state_step = 0
        self._results: Any = None
        self._results_step = 0

    @property
    def step(self) -> int:
        """After how many steps `state` is the job's."""
        return self._state_step

    def give(self, state: Any, step: int) -> None:
        """The job's function says: this is the state after `step` steps."""
        self.state, self._state_step, self.is_guess = state, step, False

    def used(self, arguments: Sequence[Any]) -> None:
        """Notes whether the next step is given what the latest one left, or what the function has made of it."""
        if self._changed or self._results is None or self._state_step == self._results_step:
            return
        if (made := jax.tree.structure(self._results)) != self._made:
            self._made, self._part = made, self._part_like_state()
        if self._part is None:
            return
        given = set(map(id, arguments))
        left = self._results if self._part < 0 else self._results[self._part]
        self._changed = any(id(leaf) not in given for leaf in jax.tree.leaves(left) if isinstance(leaf, jax.Array))

    def _part_like_state(self) -> int | None:
        found = matching(self.state, self._results)
        if form(found) != form(self.state):
            return None
        return -1 if found is self._results else [id(part) for part in self._results].index(id(found))

    def committed(self, results: Any, step: int) -> None:
        """A call came through on all ranks; `step` counts those of the training step so far."""
        # Another function's results are no state, unless it was given what the training step had left.
        if step > self._results_step or deleted(self._results):
            self._results, self._results_step = results, step

    def latest(self) -> tuple[Any, int]:
        """The newest state that is known and not donated, and after how many steps: `state`, or that of the last
        committed step.
        """
        if self._results_step and (self._state_step < self._results_step or deleted(self.state)):
            found = matching(self.state, self._results)
            if not deleted(found):
                return found, self._results_step
        return self.state, self._state_step

    def settle(self) -> None:
        """The job ended early: makes `state` the one of the last committed step, if its function did not do so."""
        state, step = self.latest()
        guess = self._changed and state is not self.state
        self.give(state, step)
        self.is_guess = guess

    def release(self) -> None:
        """Lets go of the step's results."""
        self._results = None


def matching(state: Any, results: Any) -> Any:
    """The part of a step's results that is made like `state`: all of it, or the only element of a tuple that has its
    structure, shapes and element types; all of it if none has, or several have.
    """
    if state is not None and isinstance(results, tuple) and jax.tree.structure(results) != jax.tree.structure(state):
        alike = [part for part in results if form(part) == form(state)]
        return alike[0] if len(alike) == 1 else results
    return results


def holds_state(state: Any, results: Any) -> bool:
    """Whether a function's results hold an array for each one of `state`, as a step's do, in whatever order."""
    wanted, found = (Counter(map(_kind, jax.tree.leaves(tree))) for tree in (state, results))
    return wanted <= found


def own_copy(state: Any) -> Any:
    """`state` in arrays that nobody else has, of JAX or NumPy as they were. Dispatched; does not wait."""
    return jax.tree.map(_copy, state)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return _copy_array(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def deleted(tree: Any) -> bool:
    """Whether an array of the tree was donated."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def form(tree: Any) -> tuple[Any, list[Any]]:
    """Structure, and shapes and types, of what holds the same state."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [_kind(leaf) for leaf in leaves]


def _kind(leaf: Any) -> Any:
    try:
        aval = jax.typeof(leaf)
    except TypeError:  # what is no array: a text, say
        return type(leaf)
    return aval.shape, aval.dtype
