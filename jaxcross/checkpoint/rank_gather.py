"""Messages about one job's checkpoints: to the log, to the report, and between ranks."""

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
    """Logs warnings and creates errors about one job. `note` shows a line in the run's output."""

    job: str
    note: Callable[[str], None]

    def warn(self, text: str) -> None:
        """Logs a warning, and also shows it as a note."""
        _log.warning("Job `%s`: %s.", self.job, clause(text))
        self.note(text)

    def error(self, text: str) -> JobError:
        """Returns an error for the caller to raise."""
        return JobError(f"Job `{self.job}` {text}")


@dataclass(frozen=True, slots=True)
class RankGather:
    """Exchanges values between ranks, for one operation on a job's checkpoints.

    Except for `check`, all methods wait for all ranks, which must call them in the same order.
    """

    log: JobLog
    run_on_all_ranks: RunOnAllRanks

    def gather_text(self, what: str, text: str) -> list[str]:
        """Returns the texts of all ranks, by rank."""
        return self.run_on_all_ranks(
            f"checkpoint: {what}", lambda control: control.allgather_text(text)
        )

    def gather(
        self, what: str, value: object, *, then: Callable[[list[Any]], None] | None = None
    ) -> list[Any]:
        """Returns the values of all ranks, by rank. Sent as JSON, so tuples become lists.

        Args:
            what: A short description, which becomes part of the label.
            value: This rank's value.
            then: Called with the values of all ranks, in the same slot of the exchange lane, which
                means that it takes effect before any later vote. Must not wait.
        """

        def work(control: Control) -> list[Any]:
            values = gather(control, value)
            if then is not None:
                then(values)
            return values

        return self.run_on_all_ranks(f"checkpoint: {what}", work)

    def check(self, what: str, errors: Sequence[str], cause: Exception | None = None) -> None:
        """Raises an error if any rank has passed an error text. Doesn't communicate.

        Raises:
            JobError: Contains the first error text, in the order of ranks.
        """
        for rank, text in enumerate(errors):
            if text:
                raise self.log.error(f"{what}, on rank {rank}: {text}") from cause
