"""Work that runs on every rank at once and may communicate, in which the failure of one rank is
that of all.

Before each message, and after the last one, the ranks compare their states: about to communicate,
done, or failed. So no rank waits for one whose work has ended in another way. This costs one small
all-reduce more for each message.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, final

import numpy as np

from jaxcross.errors import JobError, first_line, shortened
from jaxcross.runtime.failure_text import describe
from jaxcross.world.control_plane import Control

T = TypeVar("T")
_LONGEST = 60  # characters that say what a rank is in
_FAILED, _DONE, _GATHERS, _REDUCES = range(4)  # from _REDUCES on: the number of values above it


@final
class CollectiveCall(Generic[T]):
    """Work that a job's thread asks for and the exchange lane runs; holds its result or error for
    the job.

    Attributes:
        what: A few words for the work, the same on every rank.
    """

    __slots__ = ("_error", "_values", "_work", "what")

    def __init__(self, label: str, work: Callable[[Control], T]) -> None:
        self.what = shortened(first_line(label), _LONGEST)
        self._work = work
        self._values: tuple[T, ...] = ()
        self._error: Exception | None = None

    def run(self, control: Control) -> None:
        """Runs the work, on the exchange lane. Waits for all ranks; raises nothing that `work`
        raises.
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
        JobError: On ranks whose work did not fail, if another rank's did, or if ranks do not
            communicate equally often.
        Exception: What `work` raises.
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
        values = np.ascontiguousarray(values, dtype=np.int64)  # first what can fail here alone
        self.compare(_REDUCES + values.size)
        return self._control.allreduce_min(values)

    def allgather_text(self, text: str) -> list[str]:
        if not isinstance(text, str):
            raise TypeError(f"`allgather_text` takes a text, not `{type(text).__name__}`")
        self.compare(_GATHERS)
        return self._control.allgather_text(text)

    def fail(self, error: Exception) -> None:
        """Reports this rank's failure to the others, unless they know."""
        if self._broken is None:
            with suppress(JobError):  # this very failure
                self.compare(_FAILED, describe(error))

    def compare(self, mine: int, text: str = "") -> None:
        """Returns if all ranks are in the same state as this one.

        Raises:
            JobError: They are not, now or earlier; or one has failed.
        """
        if self._broken is None:
            # Equal on all ranks if the minimum is the maximum. A failure has the lowest number, so
            # one is enough.
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
