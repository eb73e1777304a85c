"""Counts a job's skipped steps, and notices one that skips all of them because its state holds what
is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import jax
import numpy as np

from jaxcross._pytree import PyTree
from jaxcross.errors import JobError
from jaxcross.jobs.latest_state import LatestState, form
from jaxcross.program.nonfinite import is_finite

MOST_IN_A_ROW = 10
"""Skipped steps in a row, after which the state is looked at."""

_NOTE = "skipped"  # the note of a checkpoint: all skipped steps, and those in a row


@final
class SkippedSteps:
    """The skipped steps of a job on one rank, those of earlier runs included.

    A skipped step leaves the state as it was. Where a step before has put a value into it that is
    not finite, and that is exchanged later (a gradient that is pending or accumulated, parameters
    of local steps), every further step is skipped.

    Args:
        job: The job's name.
        latest: Its latest state.

    Attributes:
        total: How many there are.
        before: How many of them earlier runs made.
    """

    __slots__ = ("_in_a_row", "_job", "_latest", "before", "total")

    def __init__(self, job: str, latest: LatestState) -> None:
        self._job, self._latest, self._in_a_row = job, latest, 0
        self.before = self.total = 0

    def resume(self, notes: Mapping[str, str]) -> None:
        """Goes on from the notes of a checkpoint."""
        total, in_a_row = notes.get(_NOTE, "0 0").split()
        self.before = self.total = int(total)
        self._in_a_row = int(in_a_row)

    def to_notes(self) -> dict[str, str]:
        """Returns what a restart must know."""
        return {_NOTE: f"{self.total} {self._in_a_row}"} if self.total else {}

    def count(self, *, skipped: bool) -> None:
        """Counts a step."""
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0

    def check(self) -> None:
        """Looks at the state after each `MOST_IN_A_ROW` skipped steps. Waits for the state then.

        Raises:
            JobError: On a rank whose state holds what is not finite.
        """
        if not self._in_a_row or self._in_a_row % MOST_IN_A_ROW:
            return
        state, _ = self._latest.latest()
        path = (
            _first_nonfinite(state) if form(state) == form(self._latest.state) else None
        )  # else metrics, perhaps
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
