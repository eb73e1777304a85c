"""Counts skipped steps, and detects jobs that would never stop skipping.

With `nonfinite="skip"`, we only check the values that are exchanged. If they aren't finite, the
step is skipped, which means that the state stays as it was. This breaks down once the state itself
contains a nonfinite value. With gradient accumulation, for example, a local step may add a NaN to
the accumulated gradient without being skipped, as it doesn't exchange anything. The next exchange
then sends the NaN, so its step is skipped. But skipping leaves the state unchanged, NaN included,
so the same happens to all further steps. To detect this, we check whether the state is finite
whenever too many steps in a row have been skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax
import numpy as np

from jaxcross._pytree import PyTree
from jaxcross.errors import JobError
from jaxcross.jobs.job_state import JobState, form_of
from jaxcross.program import is_finite

MOST_IN_A_ROW = 10
"""The state is checked whenever this many steps in a row have been skipped."""

_NOTE = "skipped"  # the number of skipped steps in total, and in a row


@final
class SkippedSteps:
    """A job's skipped steps on one rank, including those of earlier runs.

    Args:
        job: The job's name.
        latest: The job's latest state.

    Attributes:
        total: The number of skipped steps.
        before: How many of these were skipped in earlier runs.
    """

    __slots__ = ("_in_a_row", "_job", "_latest", "before", "total")

    def __init__(self, job: str, latest: JobState) -> None:
        self._job = job
        self._latest = latest
        self._in_a_row = 0
        self.before = self.total = 0

    def resume(self, notes: Mapping[str, str]) -> None:
        """Resumes from a checkpoint's notes."""
        total, in_a_row = notes.get(_NOTE, "0 0").split()
        self.before = self.total = int(total)
        self._in_a_row = int(in_a_row)

    def to_notes(self) -> dict[str, str]:
        """Returns the counts as notes for a checkpoint."""
        return {_NOTE: f"{self.total} {self._in_a_row}"} if self.total else {}

    def count(self, *, skipped: bool) -> None:
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0

    def check(self) -> None:
        """Checks the state after every `MOST_IN_A_ROW` steps skipped in a row.

        Waits for the state to be computed if it checks it.

        Raises:
            JobError: This rank's state contains a nonfinite value.
        """
        if not self._in_a_row or self._in_a_row % MOST_IN_A_ROW:
            return
        state, _ = self._latest.newest()
        # If the structure, shapes or types differ, these may be metrics rather than a state.
        path = _first_nonfinite(state) if form_of(state) == form_of(self._latest.state) else None
        if path is not None:
            raise JobError(
                f"Job `{self._job}`: the last {self._in_a_row} steps were skipped, and `{path}` of "
                "the state is not finite, so all further steps would be skipped too. The value "
                "comes from a step that did not exchange it, which can happen with pending or "
                'accumulated gradients and with local steps. Use `nonfinite="raise"` for such a '
                "job, and resume from an earlier checkpoint."
            )


def _first_nonfinite(state: PyTree) -> str | None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        # Scalars may be infinite on purpose, e.g. the best value so far.
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim and not is_finite(leaf):
            return jax.tree_util.keystr(path) or "state"
    return None
