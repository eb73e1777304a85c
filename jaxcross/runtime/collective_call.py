"""Runs a function on all ranks at once. If it fails on one rank, it fails on all of them.

The function may communicate, and it may fail on a single rank, e.g. because a disk is full, in
which case the other ranks would wait for that rank's next message forever. To prevent that, the
ranks compare notes before every message and at the end: are they all about to send the same kind of
message, or are they all done, or has any of them failed? If their states differ, all ranks raise an
error instead of communicating. This costs an extra small all-reduce per message.
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
    """A function that a job's thread asks the exchange lane to run.

    Holds on to the result or the exception until the job's thread picks it up.

    Attributes:
        what: A short description, identical across ranks.
    """

    __slots__ = ("_error", "_values", "_work", "what")

    def __init__(self, label: str, work: Callable[[Control], T]) -> None:
        self.what = shortened(first_line(label), _LONGEST)
        self._work = work
        self._values: tuple[T, ...] = ()
        self._error: Exception | None = None

    def run(self, control: Control) -> None:
        """Runs the function, in the exchange lane's thread. Waits for all ranks.

        If the function raises, the exception is stored for `result` to re-raise in the job's
        thread.
        """
        try:
            self._values = (run_collectively(self._work, control),)
        except Exception as error:
            self._error = error

    def result(self) -> T:
        """Returns what the function returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        (value,) = self._values
        return value


def run_collectively(work: Callable[[Control], T], control: Control) -> T:
    """Runs `work(control)` on every rank and returns its result. Waits for all ranks.

    Raises:
        JobError: `work` has failed on another rank but not on this rank, or the ranks communicate
            in different ways.
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
    """A `Control` that compares the ranks' states before every message."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._broken: JobError | None = None
        self.rank = control.rank
        self.size = control.size

    def allreduce_min(self, values: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(
            values, dtype=np.int64
        )  # convert before comparing, because this may raise on a single rank
        self.compare(_REDUCES + values.size)
        return self._control.allreduce_min(values)

    def allgather_text(self, text: str) -> list[str]:
        if not isinstance(text, str):
            raise TypeError(f"`text` of `allgather_text` must be a text, got {text!r:.60}")
        self.compare(_GATHERS)
        return self._control.allgather_text(text)

    def fail(self, error: Exception) -> None:
        """Reports this rank's failure to the other ranks, unless they already know about one."""
        if self._broken is None:
            with suppress(JobError):  # `compare` raises the very failure that we're reporting
                self.compare(_FAILED, describe(error))

    def compare(self, mine: int, text: str = "") -> None:
        """Compares the ranks' states, and returns if they are equal.

        Raises:
            JobError: The ranks' states differ now or differed earlier, or a rank has failed.
        """
        if self._broken is None:
            # A single all-reduce takes the minimum of the ranks' states and of their negations.
            # This yields the smallest and the largest state, which are equal only if all states
            # are. A failure is the smallest possible state, so we notice it even if only one rank
            # has failed.
            low, high = self._control.allreduce_min(np.array([mine, -mine], np.int64))
            if low == _FAILED:
                texts = self._control.allgather_text(text)
                which = "; ".join(
                    f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text
                )
                self._broken = JobError(
                    f"A function that all ranks run together fails on all of them, because {which}"
                )
            elif low != -high:
                does = {_DONE: "has returned", _GATHERS: "calls `allgather_text`"}.get(
                    mine, f"calls `allreduce_min` with {mine - _REDUCES} values"
                )
                self._broken = JobError(
                    "In a function that all ranks run together, the ranks communicate differently: "
                    f"rank {self.rank} {does}, unlike some other rank. Every rank must make the "
                    "same calls of `allreduce_min` and `allgather_text` in the same order."
                )
        if self._broken is not None:
            raise self._broken
