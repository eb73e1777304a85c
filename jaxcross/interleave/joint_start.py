"""The joint start: no job makes its first step before all initial jobs are ready to make theirs.

All ranks must hold back the same jobs, so the set of held-back jobs is part of the state that's
identical across ranks. It only changes on events that all ranks process at the same point between
two exchanges: a vote delivers its result, or a job ends, pauses or resumes.

**Why it can't deadlock.** The other jobs keep waiting for a job only as long as the policy lets it
run, it hasn't reached its first step on all ranks yet, and no rank has excused it, i.e. exempted
the others from waiting for it. So the wait ends as soon as the job arrives, leaves, is paused or is
excused.

Excuses are needed because a job may itself be waiting for another job's results, in which case it
would never get to its first step. If it waits in one of our own calls, e.g. for another job's end,
its rank excuses it at once. Any other wait looks just like ordinary work, so a rank also excuses a
job whose thread spends too long on anything other than tracing and compiling its first step.

Only the first step is held back. Up to that point, a job runs as usual: it can read batches, run
work on all ranks, and call functions that don't count as steps, such as evaluations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, final

from jaxcross.interleave.vote import AtStart

Arrival = Literal["coming", "excused", "late", "here"]
"""A job's progress at a joint start. The other jobs wait for it only while it's `coming`.

A `late` job has been excused because it took too long.
"""

_EXCUSES: Mapping[AtStart, Arrival] = {AtStart.EXCUSED: "excused", AtStart.LATE: "late"}


@final
class JointStart:
    """The jobs whose first steps are held back. Empty unless a joint start is in progress."""

    __slots__ = ("_arrivals",)

    def __init__(self) -> None:
        self._arrivals: dict[int, Arrival] = {}

    def begin(self, jobs: Iterable[int]) -> None:
        """Holds back the first steps of these jobs, which must be all initial jobs of the run."""
        self._arrivals = dict.fromkeys(jobs, "coming")

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    def holds(self, job: int) -> bool:
        return job in self._arrivals

    def is_here(self, job: int) -> bool:
        """Whether the job has reached its first step on all ranks and is being held back there."""
        return self._arrivals.get(job) == "here"

    def awaited(self, running: Collection[int]) -> tuple[int, ...]:
        """Returns the running jobs that the other jobs are waiting for."""
        return tuple(
            job for job, arrival in self._arrivals.items() if arrival == "coming" and job in running
        )

    def apply(self, verdicts: Mapping[int, AtStart]) -> list[tuple[int, Arrival]]:
        """Applies a vote's verdicts on how far jobs have come.

        Returns the jobs that, according to this vote, have now arrived or been excused.
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
        """Removes a job that has ended."""
        self._arrivals.pop(job, None)

    def settle(self, running: Collection[int]) -> None:
        """Ends the joint start if no running job is being waited for any more."""
        if not self.awaited(running):
            self._arrivals = {}
