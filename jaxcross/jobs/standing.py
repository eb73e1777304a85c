"""`JobStanding`: the results of a `Job` that has no `JobContext` of its own.

That's the case before the run, and for the members of a fused job, which share its context.
"""

from __future__ import annotations

from typing import Any, final

from jaxcross._endings import JobStatus
from jaxcross._pytree import PyTree
from jaxcross.errors import JobError
from jaxcross.jobs.thread import JobDone
from jaxcross.runtime.job_record import NonFinite


@final
class JobStanding:
    """Stands in for a `Job`'s `JobContext` before the run, and if a fused job trains it.

    Attributes:
        fused_into: The name of the fused job that trains it; "" before any run.

    The other attributes are those of `JobContext`.
    """

    paused = False
    skipped = 0

    def __init__(
        self, name: str, state: PyTree, *, nonfinite: NonFinite, fused_into: str = ""
    ) -> None:
        self.name = name
        self.state = state
        self.nonfinite: NonFinite = nonfinite
        self.fused_into = fused_into
        self.step = 0
        self.history: list[tuple[int, Any]] = []
        self.status: JobStatus | None = None
        self.error: Exception | None = None
        self.done = JobDone()
        self.examples_per_step: float | None = None
        self.unit = "examples"

    def stop(self) -> None:
        self._refuse()

    def pause(self) -> None:
        self._refuse()

    def resume(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        """Refuses a request, unless the job has ended, so that the request comes too late."""
        if self.status is not None:
            return
        if self.fused_into:
            raise JobError(
                f"Job `{self.name}` cannot be stopped or paused alone: it is trained by the fused "
                f"job `{self.fused_into}`. Run it without `jaxcross.fuse`."
            )
        raise JobError(
            f"Job `{self.name}` is not running: it can be stopped or paused during "
            "`jaxcross.run` only."
        )
