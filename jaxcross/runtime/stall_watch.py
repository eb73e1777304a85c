"""Waits of jobs between their steps: where votes go on without result, nothing else would notice them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from jaxcross.health.activity import RankStatus, missing
from jaxcross.interleave.local_state import Wait

if TYPE_CHECKING:
    from jaxcross.health.watchdog import Watch
    from jaxcross.runtime.job_record import RunWorld


class JobWaits:
    """Has the watchdog watch each wait of a job that is seen twice in a row.

    A job waits for what all ranks do together (a batch, a call of the step, its end), hence for every rank that is not
    there; or for what is its rank's own affair, as its data. Both may last for ever, while votes say again and again
    that nothing has changed. A rank that waits for its own affair, or has done so lately, is not blamed by others: it
    knows best for how long.

    Args:
        world: Who watches.
    """

    def __init__(self, world: RunWorld) -> None:
        self._world = world
        self._seen: Mapping[str, Wait] = {}
        self._watched: dict[str, Watch] = {}

    def look(self, waits: Mapping[str, Wait]) -> None:
        """These jobs wait now, by name. To be called now and then; neither waits nor communicates."""
        before, self._seen = self._seen, dict(waits)
        same = {job for job, wait in waits.items() if job in before and before[job].point == wait.point}
        for job in self._watched.keys() - same:
            self._watched.pop(job).__exit__(None, None, None)
        for job in same:
            if job not in self._watched:
                self._watched[job] = watch = self._watch(job, waits[job])
                watch.__enter__()
            elif before[job].moved != waits[job].moved:
                self._watched[job].renew()

    def _watch(self, job: str, wait: Wait) -> Watch:
        def awaited(answers: Mapping[int, RankStatus | None]) -> dict[int, str]:
            return absent(job, wait.what, answers)

        return self._world.watching(
            job=job, step=wait.step, segment=-1, what=wait.what, own=wait.own, awaited=None if wait.own else awaited
        )


def after_run(world: RunWorld, what: str, *, job: str = "", step: int = 0) -> Watch:
    """A wait for all ranks at the end of a run; one whose job is still in work that it declared may take its time."""
    others = [rank for rank in range(world.size) if rank != world.rank]
    awaited = partial(missing, job, what, others, patient=True)
    return world.watching(job=job, step=step, segment=-1, what=what, awaited=awaited)


def absent(job: str, what: str, answers: Mapping[int, RankStatus | None]) -> dict[int, str]:
    """The other ranks for which a job's wait is, and why. Pure.

    Args:
        job: Its name.
        what: What it waits for.
        answers: Every other rank's standing; None where none came.
    """
    found = {}
    for other, standing in answers.items():
        if standing is not None and not standing.excused(job):
            waits = [wait for wait in standing.waits if wait.job == job]
            if not any(wait.what == what for wait in waits):
                found[other] = f"it waits for its {waits[-1].what}" if waits else f"its job {job!r} has not come so far"
    return found
