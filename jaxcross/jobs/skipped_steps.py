"""Counts a job's skipped steps, and detects a job that would skip all further steps.

With `nonfinite="skip"`, we check only the values that are exchanged. If they aren't finite, the
step is skipped, i.e. the state stays as it was before. This fails if a nonfinite value is already
in the state. For example, with gradient accumulation, a local step may add a NaN to the accumulated
gradient. It isn't skipped, because it doesn't exchange anything. The next exchange then sends the
NaN, so that step is skipped, and since skipping doesn't change the state, the NaN stays there and
all further steps are skipped too. So if too many steps in a row are skipped, we check whether the
state is finite.
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
"""We check the state whenever this many steps in a row have been skipped."""

_NOTE = "skipped"  # the number of skipped steps in total, and in a row


@final
class SkippedSteps:
    """The skipped steps of a job on one rank, including those of earlier runs.

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
        """Returns the numbers as notes for a checkpoint."""
        return {_NOTE: f"{self.total} {self._in_a_row}"} if self.total else {}

    def count(self, *, skipped: bool) -> None:
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0

    def check(self) -> None:
        """Checks the state if `MOST_IN_A_ROW` steps in a row, or a multiple of it, were skipped.

        If it checks the state, waits until the state has been computed.

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
                "the state is not finite, so all further steps would be skipped too. A step that "
                "did not exchange the value has left it there, as with gradients that are pending "
                'or accumulated, and with local steps. Use `nonfinite="raise"` for such a job, and '
                "resume from an earlier checkpoint."
            )


def _first_nonfinite(state: PyTree) -> str | None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        # Scalars may be infinite on purpose, such as the best value so far.
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim and not is_finite(leaf):
            return jax.tree_util.keystr(path) or "state"
    return None
