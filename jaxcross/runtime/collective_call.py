"""What jobs do together: work on every rank that may talk to the others, in which one rank's failure is everyone's.

Before each thing that ranks say to each other, and behind the last one, they compare how they are: about to talk, done,
or failed. So nobody waits for a rank whose work has ended otherwise. Costs one small all-reduce more each time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from jaxcross.errors import JobError
from jaxcross.runtime.failure_text import describe
from jaxcross.world.control_plane import Control

_FAILED, _DONE, _GATHERS, _REDUCES = range(4)  # the last one and above: how many values


def meet(work: Callable[[Any], Any], control: Control) -> Any:
    """Runs `work(control)` on every rank and returns what it returns. Waits for all ranks.

    Raises:
        JobError: On ranks whose work did not fail, if another rank's did, or if ranks do not talk equally often.
        Exception: What `work` raises.
    """
    meeting = _Meeting(control)
    try:
        result = work(meeting)
    except Exception as error:
        meeting.fail(error)
        raise
    meeting.compare(_DONE)
    return result


class _Meeting:
    """A `Control` that compares first."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._broken: JobError | None = None
        self.rank, self.size = control.rank, control.size

    def allreduce_min(self, values: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(values, dtype=np.int64)  # what can fail comes before the others are told
        self.compare(_REDUCES + values.size)
        return self._control.allreduce_min(values)

    def allgather_text(self, text: str) -> list[str]:
        if not isinstance(text, str):
            raise TypeError(f"`allgather_text` takes a text, not `{type(text).__name__}`")
        self.compare(_GATHERS)
        return self._control.allgather_text(text)

    def fail(self, error: Exception) -> None:
        """Lets the others know, if they do not."""
        if self._broken is None:
            with suppress(JobError):  # this very failure
                self.compare(_FAILED, describe(error))

    def compare(self, mine: int, text: str = "") -> None:
        """Returns if all ranks are as this one is.

        Raises:
            JobError: They are not, now or earlier; or one has failed.
        """
        if self._broken is None:
            low, high = self._control.allreduce_min(np.array([mine, -mine], np.int64))
            if low == _FAILED:
                told = self._control.allgather_text(text)
                which = "; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(told) if text)
                self._broken = JobError(f"Ranks did something together, in which {which}")
            elif low != -high:
                does = {_DONE: "is done", _GATHERS: "gathers texts"}.get(mine, f"reduces {mine - _REDUCES} values")
                self._broken = JobError(
                    f"Ranks did something together, but not all of them talk alike: rank {self.rank} {does}."
                )
        if self._broken is not None:
            raise self._broken
