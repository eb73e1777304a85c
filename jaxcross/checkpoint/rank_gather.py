"""Texts about one job's checkpoints: to the log and the person who watches the run, and between the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxcross.errors import JobError, clause
from jaxcross.world.control_plane import Control, gather

_log = logging.getLogger("jaxcross")
RunOnAllRanks = Callable[[str, Callable[[Any], Any]], Any]
"""`(label, work)` -> `work(control)`, run on all ranks in the same slot of the exchange lane."""


@dataclass(frozen=True, slots=True)
class JobLog:
    """Warnings and errors about one job. `note` shows a line where the run is watched."""

    job: str
    note: Callable[[str], None]

    def warn(self, text: str) -> None:
        """Logs a warning, and notes it."""
        _log.warning("Job `%s`: %s.", self.job, clause(text))
        self.note(text)

    def error(self, text: str) -> JobError:
        """Makes the error to raise."""
        return JobError(f"Job `{self.job}` {text}")


@dataclass(frozen=True, slots=True)
class RankGather:
    """The exchange of texts that one operation on a job's checkpoints makes with the other ranks.

    Every method but `check` waits for all ranks, and must be called on all of them in the same order.
    """

    log: JobLog
    run_on_all_ranks: RunOnAllRanks

    def gather_text(self, what: str, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        return self.run_on_all_ranks(f"checkpoint: {what}", lambda control: control.allgather_text(text))

    def gather(self, what: str, value: object, *, then: Callable[[list[Any]], None] | None = None) -> list[Any]:
        """Returns every rank's value, by rank. Values travel as JSON: tuples arrive as lists.

        Args:
            what: A few words for it.
            value: This rank's value.
            then: Called with all values in the same slot of the exchange lane, hence before any later vote of the
                ranks. Must not wait.
        """

        def work(control: Control) -> list[Any]:
            values = gather(control, value)
            if then is not None:
                then(values)
            return values

        return self.run_on_all_ranks(f"checkpoint: {what}", work)

    def check(self, what: str, errors: Sequence[str], cause: Exception | None = None) -> None:
        """Raises if the text of a rank is not empty.

        Raises:
            JobError: With the text of the first such rank.
        """
        for rank, text in enumerate(errors):
            if text:
                raise self.log.error(f"{what}, on rank {rank}: {text}") from cause
