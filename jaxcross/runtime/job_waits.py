"""Waits of jobs between their steps: where votes go on without result, nothing else would notice them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from jaxcross.runtime.local import OWN
from jaxcross.world.standing import Standing

if TYPE_CHECKING:
    from jaxcross.runtime.seat import RunWorld

Wait = tuple[int, str, int]
"""The step to come, what the job waits for, and a number that changes with whatever moves on."""


class JobWaits:
    """Has the watchdog watch each wait of a job that is seen twice in a row.

    A job waits for what all ranks do together (a batch, a call of the step, its end), hence for every rank that is not
    there; or for what is its rank's own affair, as its data. Both may last for ever, while votes say again and again
    that nothing has changed. A rank that waits for its own affair is not blamed by others: it knows best for how long.

    Args:
        world: Who watches.
    """

    def __init__(self, world: RunWorld) -> None:
        self._world = world
        self._seen: Mapping[str, Wait] = {}
        self._watched: dict[str, AbstractContextManager[None]] = {}

    def look(self, waits: Mapping[str, Wait]) -> None:
        """These jobs wait now, by name. To be called now and then; neither waits nor communicates."""
        before, self._seen = self._seen, dict(waits)
        for job in [job for job in self._watched if waits.get(job) != before[job]]:
            self._watched.pop(job).__exit__(None, None, None)
        for job, wait in waits.items():
            if before.get(job) == wait and job not in self._watched:
                self._watched[job] = watch = self._watch(job, *wait[:2])
                watch.__enter__()

    def _watch(self, job: str, step: int, what: str) -> AbstractContextManager[None]:
        def awaited(answers: Mapping[int, Standing | None]) -> dict[int, str]:
            return absent(job, what, self._world.rank, answers)

        return self._world.watching(job=job, step=step, segment=-1, what=what, awaited=awaited)


def absent(job: str, what: str, rank: int, answers: Mapping[int, Standing | None]) -> dict[int, str]:
    """The ranks for which a job's wait on `rank` is, and why. Pure.

    Args:
        job: Its name.
        what: What it waits for.
        rank: Where.
        answers: Every other rank's standing; None where none came.
    """
    if what.startswith(OWN):
        return {rank: f"{what} is its own affair"}
    found = {}
    for other, standing in answers.items():
        if standing is not None:
            waits = [wait.what for wait in standing.waits if wait.job == job]
            if what not in waits and not any(wait.startswith(OWN) for wait in waits):
                found[other] = f"it waits for its {waits[-1]}" if waits else f"its job {job!r} has not come so far"
    return found
