"""Texts about one job's checkpoints: for the log, for whoever watches, and between ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxcross.errors import JobError, clause
from jaxcross.world import Control, RunOnAllRanks, gather

_log = logging.getLogger("jaxcross")


@dataclass(frozen=True, slots=True)
class JobLog:
    """Warnings and errors about one job. `note` shows a line to whoever watches the run."""

    job: str
    note: Callable[[str], None]

    def warn(self, text: str) -> None:
        """Logs a warning, and shows it as a note."""
        _log.warning("Job `%s`: %s.", self.job, clause(text))
        self.note(text)

    def error(self, text: str) -> JobError:
        """Returns an error for the caller to raise."""
        return JobError(f"Job `{self.job}` {text}")


@dataclass(frozen=True, slots=True)
class RankGather:
    """Exchanges texts between ranks for one operation on a job's checkpoints.

    Every method except `check` waits for all ranks. All ranks must call them in the same order.
    """

    log: JobLog
    run_on_all_ranks: RunOnAllRanks

    def gather_text(self, what: str, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        return self.run_on_all_ranks(
            f"checkpoint: {what}", lambda control: control.allgather_text(text)
        )

    def gather(
        self, what: str, value: object, *, then: Callable[[list[Any]], None] | None = None
    ) -> list[Any]:
        """Returns every rank's value, by rank. Values are sent as JSON, so tuples arrive as lists.

        Args:
            what: A short description for the label.
            value: This rank's value.
            then: Called with all values in the same slot of the exchange lane, so before any later
                vote. Must not wait.
        """

        def work(control: Control) -> list[Any]:
            values = gather(control, value)
            if then is not None:
                then(values)
            return values

        return self.run_on_all_ranks(f"checkpoint: {what}", work)

    def check(self, what: str, errors: Sequence[str], cause: Exception | None = None) -> None:
        """Raises if any rank's text isn't empty. Doesn't communicate.

        Raises:
            JobError: With the text of the first such rank.
        """
        for rank, text in enumerate(errors):
            if text:
                raise self.log.error(f"{what}, on rank {rank}: {text}") from cause
