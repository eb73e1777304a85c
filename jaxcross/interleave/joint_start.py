"""The joint start: no job makes its first step before all jobs that began the run have come to
theirs.

Part of the state that all ranks share: it changes by the verdicts of votes, and by what ends,
pauses or resumes jobs.

**Why it cannot hang.** A job is waited for while it may run, has not come to its first step on all
ranks, and no rank has excused it. So it must come, leave, be paused or be excused. A rank excuses a
job whose thread spends too long on other work than to prepare its first step, as one that waits for
another job's results does. Only the first steps are held back: until then a job's batches, its work
on all ranks, and calls that are no steps go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, final

from jaxcross.interleave.vote import AtStart

Arrival = Literal["coming", "excused", "late", "here"]
"""How far a job is at a joint start. The others wait for one that is `coming`; `late` is excused
for its time alone.
"""

_EXCUSES: Mapping[AtStart, Arrival] = {AtStart.EXCUSED: "excused", AtStart.LATE: "late"}


@final
class JointStart:
    """The jobs whose first steps are held back; none where there is no joint start, and once it is
    over.
    """

    __slots__ = ("_arrivals",)

    def __init__(self) -> None:
        self._arrivals: dict[int, Arrival] = {}

    def begin(self, jobs: Iterable[int]) -> None:
        """Holds back the first steps of these jobs, those that begin the run."""
        self._arrivals = dict.fromkeys(jobs, "coming")

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def holds(self, job: int) -> bool:
        """Whether the job's first step is held back."""
        return job in self._arrivals

    def is_here(self, job: int) -> bool:
        """Whether the job's first step is held back, and the job has come to it on all ranks."""
        return self._arrivals.get(job) == "here"

    def awaited(self, running: Collection[int]) -> tuple[int, ...]:
        """Returns the jobs that the others wait for, of those that may run."""
        return tuple(
            job for job, arrival in self._arrivals.items() if arrival == "coming" and job in running
        )

    def apply(self, verdicts: Mapping[int, AtStart]) -> list[tuple[int, Arrival]]:
        """Applies a vote's outcome about some jobs, and returns those that have come, or are
        excused, by it.
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
        """Forgets a job that is over."""
        self._arrivals.pop(job, None)

    def settle(self, running: Collection[int]) -> None:
        """Ends the joint start if no job that may run is waited for any more."""
        if not self.awaited(running):
            self._arrivals = {}
