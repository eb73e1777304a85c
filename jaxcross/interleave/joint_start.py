"""The joint start: no job makes its first step before all initial jobs are ready for theirs.

This is part of the shared state. It changes only with vote verdicts, and when jobs end, pause or
resume, so it's identical across ranks.

**Why it can't deadlock.** The others wait for a job only while the job may run, hasn't reached its
first step on all ranks, and no rank has excused it. So the wait ends when the job arrives, leaves,
is paused or is excused. A rank excuses a job if its thread spends too long on anything other than
preparing its first step; a job that waits for another job's results would do so. Only first steps
are held back. Until then, a job can still read batches, work on all ranks, and make calls that
aren't steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, final

from jaxcross.interleave.vote import AtStart

Arrival = Literal["coming", "excused", "late", "here"]
"""A job's progress at a joint start. The others wait only for a job that's `coming`.

A `late` job is one that was excused because it took too long.
"""

_EXCUSES: Mapping[AtStart, Arrival] = {AtStart.EXCUSED: "excused", AtStart.LATE: "late"}


@final
class JointStart:
    """The jobs whose first steps are held back: none if there's no joint start or it has ended."""

    __slots__ = ("_arrivals",)

    def __init__(self) -> None:
        self._arrivals: dict[int, Arrival] = {}

    def begin(self, jobs: Iterable[int]) -> None:
        """Holds back the first steps of these jobs, which are those that begin the run."""
        self._arrivals = dict.fromkeys(jobs, "coming")

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def holds(self, job: int) -> bool:
        return job in self._arrivals

    def is_here(self, job: int) -> bool:
        """Whether the job's first step is held back although all ranks have reached it."""
        return self._arrivals.get(job) == "here"

    def awaited(self, running: Collection[int]) -> tuple[int, ...]:
        """Returns those of the running jobs that the others wait for."""
        return tuple(
            job for job, arrival in self._arrivals.items() if arrival == "coming" and job in running
        )

    def apply(self, verdicts: Mapping[int, AtStart]) -> list[tuple[int, Arrival]]:
        """Applies what a vote decided about some jobs.

        Returns the jobs that this vote found to have arrived or to be excused.
        """
        changed: list[tuple[int, Arrival]] = []
        for job, verdict in verdicts.items():
            arrival = self._arrivals.get(job)
            if verdict is AtStart.HERE and arrival not in (None, "here"):
                changed.append((job, "here"))
            elif verdict in _EXCUSES and arrival == "coming":
                changed.append((job, _EXCUSES[verdict]))
        self._arrivals.update(changed)
        return changed

    def leave(self, job: int) -> None:
        """Drops a finished job."""
        self._arrivals.pop(job, None)

    def settle(self, running: Collection[int]) -> None:
        """Ends the joint start if no running job is awaited any more."""
        if not self.awaited(running):
            self._arrivals = {}
