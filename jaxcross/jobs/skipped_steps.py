"""Counts a job's skipped steps, and notices a job that can only skip from now on.

With `nonfinite="skip"`, a step whose exchanged values aren't finite leaves the state as it was. Now
suppose that the state itself holds a nonfinite value that is exchanged later, e.g. a pending or
accumulated gradient, or parameters of local steps. A step that didn't exchange the value has left
it there. Then every further step is skipped too, so we check the state if too many steps in a row
are skipped.
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
"""After this many skipped steps in a row, the state is checked."""

_NOTE = "skipped"  # in a checkpoint's notes: all skipped steps, and those in a row


@final
class SkippedSteps:
    """The skipped steps of a job on one rank, including those of earlier runs.

    Args:
        job: The job's name.
        latest: The job's latest state.

    Attributes:
        total: The number of skipped steps.
        before: How many of them were in earlier runs.
    """

    __slots__ = ("_in_a_row", "_job", "_latest", "before", "total")

    def __init__(self, job: str, latest: JobState) -> None:
        self._job, self._latest, self._in_a_row = job, latest, 0
        self.before = self.total = 0

    def resume(self, notes: Mapping[str, str]) -> None:
        """Resumes from a checkpoint's notes."""
        total, in_a_row = notes.get(_NOTE, "0 0").split()
        self.before = self.total = int(total)
        self._in_a_row = int(in_a_row)

    def to_notes(self) -> dict[str, str]:
        """Returns what a restart needs, as notes for a checkpoint."""
        return {_NOTE: f"{self.total} {self._in_a_row}"} if self.total else {}

    def count(self, *, skipped: bool) -> None:
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0

    def check(self) -> None:
        """Checks the state after every `MOST_IN_A_ROW` skipped steps in a row. Waits for it then.

        Raises:
            JobError: On a rank whose state contains a nonfinite value.
        """
        if not self._in_a_row or self._in_a_row % MOST_IN_A_ROW:
            return
        state, _ = self._latest.newest()
        # If the form differs, the results may be metrics.
        path = _first_nonfinite(state) if form_of(state) == form_of(self._latest.state) else None
        if path is not None:
            raise JobError(
                f"Job `{self._job}`: the last {self._in_a_row} steps were skipped, and `{path}` of "
                "the state is not finite: all further ones would be, too. A step that did not "
                "exchange the value has left it there, as with gradients that are pending or "
                'accumulated, and with local steps. Let such a job end by `nonfinite="raise"`, and '
                "go on from a checkpoint that was written before."
            )


def _first_nonfinite(state: PyTree) -> str | None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        # Scalars may be infinite on purpose, such as the best value so far.
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim and not is_finite(leaf):
            return jax.tree_util.keystr(path) or "state"
    return None
