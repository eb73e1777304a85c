"""What is said about one job's checkpoints: to the other ranks, to a person, to the caller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxcross.errors import JobError, clause

_log = logging.getLogger("jaxcross")
Together = Callable[[str, Callable[[Any], Any]], Any]
"""`(label, work)` -> `work(control)`, run on all ranks at the same place in the order of exchanges."""


@dataclass(frozen=True, slots=True)
class RankGather:
    """One job's voice. `note` shows a line where the run is watched."""

    job: str
    note: Callable[[str], None]

    def gather(self, together: Together, what: str, text: str) -> list[str]:
        """Every rank's text, by rank. Waits for all ranks."""
        return together(f"checkpoint: {what}", lambda control: control.allgather_text(text))

    def warn(self, text: str) -> None:
        """Logs a warning, and notes it."""
        _log.warning("Job `%s`: %s.", self.job, clause(text))
        self.note(text)

    def error(self, text: str) -> JobError:
        """What to raise."""
        return JobError(f"Job `{self.job}` {text}")

    def check(self, what: str, troubles: Sequence[str], cause: Exception | None = None) -> None:
        """Raises if a rank has said what is wrong.

        Raises:
            JobError: With the first such text.
        """
        for rank, trouble in enumerate(troubles):
            if trouble:
                raise self.error(f"{what}, on rank {rank}: {trouble}") from cause
