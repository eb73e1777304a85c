"""A watch over the jobs' waits between their steps.

During such a wait no exchange is blocked: the ranks just vote again and again without a result. So
nothing else would notice the stall.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from jaxcross.health import RankStatus, missing_ranks
from jaxcross.interleave import Wait

if TYPE_CHECKING:
    from jaxcross.health import Monitor
    from jaxcross.world import World


class JobWaits:
    """Passes each job wait that is seen twice in a row to the watchdog.

    A job waits either for something that all ranks do together (a batch, a call of the step, its
    end), and thus for every rank that hasn't arrived, or for something local to its rank, e.g. its
    data. Both waits may last forever. If a rank is in a local wait, or was a short while ago, the
    others don't blame it, because its own watchdog measures that wait.

    Args:
        world: Provides the watchdog.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: Mapping[str, Wait] = {}
        self._watched: dict[str, Monitor] = {}

    def look(self, waits: Mapping[str, Wait]) -> None:
        """Takes the waits that jobs are in now, by job name. Neither waits nor communicates.

        Called a few times per second.
        """
        before = self._seen
        self._seen = dict(waits)
        same = {
            job for job, wait in waits.items() if job in before and before[job].point == wait.point
        }
        # Watch a wait only if two calls in a row find the job at the same point. Most waits have
        # ended by the second call.
        for job in self._watched.keys() - same:
            self._watched.pop(job).__exit__(None, None, None)
        for job in same:
            if job not in self._watched:
                self._watched[job] = watch = self._watch(job, waits[job])
                watch.__enter__()
            elif before[job].moved != waits[job].moved:
                self._watched[job].renew()

    def _watch(self, job: str, wait: Wait) -> Monitor:
        def waiting_for(answers: Mapping[int, RankStatus | None]) -> dict[int, str]:
            return absent(job, wait.what, answers)

        return self._world.monitor(
            job=job,
            step=wait.step,
            segment=-1,
            what=wait.what,
            local=wait.own,
            waiting_for=None if wait.own else waiting_for,
        )


def after_run(world: World, what: str, *, job: str = "", step: int = 0) -> Monitor:
    """Returns the watch over a wait for all ranks at the end of a run.

    A rank that is in a local wait isn't blamed for being late.
    """
    others = [rank for rank in range(world.size) if rank != world.rank]
    waiting_for = partial(missing_ranks, job, what, others, excuse_local=True)
    return world.monitor(job=job, step=step, segment=-1, what=what, waiting_for=waiting_for)


def absent(job: str, what: str, answers: Mapping[int, RankStatus | None]) -> dict[int, str]:
    """Returns the other ranks that a job waits for, each with the reason.

    Args:
        job: The job's name.
        what: The event that the job waits for.
        answers: Every other rank's status, or None if it sent none.
    """
    found = {}
    for other, status in answers.items():
        if status is not None and not status.may_be_late(job):
            waits = [wait for wait in status.waits if wait.job == job]
            if not waits:
                found[other] = f"its job {job!r} has not come so far"
            elif all(wait.what != what for wait in waits):
                found[other] = f"it waits for its {waits[-1].what}"
    return found
