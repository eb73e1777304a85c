"""Work that runs on all ranks at once and may communicate. A failure on one rank fails them all.

The danger is a deadlock: one rank's work fails or returns while another rank is still waiting for
its message. So before each message, and once the work is done, the ranks compare their states:
about to communicate, done, or failed. This costs one additional small all-reduce per message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, final

import numpy as np

from jaxcross.errors import JobError, first_line, shortened
from jaxcross.runtime.failure_text import describe
from jaxcross.world import Control

T = TypeVar("T")
_LONGEST = 60  # the maximum length of `CollectiveCall.what`, in characters
_FAILED, _DONE, _GATHERS, _REDUCES = range(
    4
)  # from `_REDUCES` on, the state includes the number of values to reduce


@final
class CollectiveCall(Generic[T]):
    """Work that a job's thread requests and the exchange lane runs.

    Holds the work's result or error until the job's thread fetches it.

    Attributes:
        what: A short description of the work, identical across ranks.
    """

    __slots__ = ("_error", "_values", "_work", "what")

    def __init__(self, label: str, work: Callable[[Control], T]) -> None:
        self.what = shortened(first_line(label), _LONGEST)
        self._work = work
        self._values: tuple[T, ...] = ()
        self._error: Exception | None = None

    def run(self, control: Control) -> None:
        """Runs the work on the exchange lane. Waits for all ranks.

        Doesn't raise what `work` raises; `result` does that, in the job's thread.
        """
        try:
            self._values = (run_collectively(self._work, control),)
        except Exception as error:
            self._error = error

    def result(self) -> T:
        """Returns what the work returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        (value,) = self._values
        return value


def run_collectively(work: Callable[[Control], T], control: Control) -> T:
    """Runs `work(control)` on every rank and returns its result. Waits for all ranks.

    Raises:
        JobError: On ranks whose own work didn't fail, if another rank's work did or if the ranks'
            messages don't match up.
        Exception: Whatever `work` raises.
    """
    compared = _ComparingControl(control)
    try:
        result = work(compared)
    except Exception as error:
        compared.fail(error)
        raise
    compared.compare(_DONE)
    return result


@final
class _ComparingControl:
    """A `Control` that compares the ranks' states before each message."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._broken: JobError | None = None
        self.rank = control.rank
        self.size = control.size

    def allreduce_min(self, values: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(
            values, dtype=np.int64
        )  # before comparing, because this can fail on one rank only
        self.compare(_REDUCES + values.size)
        return self._control.allreduce_min(values)

    def allgather_text(self, text: str) -> list[str]:
        if not isinstance(text, str):
            raise TypeError(f"`allgather_text` takes a text, not `{type(text).__name__}`")
        self.compare(_GATHERS)
        return self._control.allgather_text(text)

    def fail(self, error: Exception) -> None:
        """Reports this rank's failure to the other ranks, unless they have it already."""
        if self._broken is None:
            with suppress(JobError):  # the failure that we are reporting
                self.compare(_FAILED, describe(error))

    def compare(self, mine: int, text: str = "") -> None:
        """Returns if all ranks are in the same state as this one.

        Raises:
            JobError: The ranks' states differ or differed earlier, or some rank has failed.
        """
        if self._broken is None:
            # The states are equal on all ranks if the minimum is the maximum. A failure has the
            # lowest number, so the minimum shows it even if just one rank failed.
            low, high = self._control.allreduce_min(np.array([mine, -mine], np.int64))
            if low == _FAILED:
                texts = self._control.allgather_text(text)
                which = "; ".join(
                    f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text
                )
                self._broken = JobError(f"Ranks did something together, in which {which}")
            elif low != -high:
                does = {_DONE: "is done", _GATHERS: "gathers texts"}.get(
                    mine, f"reduces {mine - _REDUCES} values"
                )
                self._broken = JobError(
                    "Ranks did something together, but not all of them talk alike: rank "
                    f"{self.rank} {does}."
                )
        if self._broken is not None:
            raise self._broken
