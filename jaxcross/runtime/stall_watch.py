"""Detects jobs that are stuck between two steps.

The watchdog times exchanges. But while a job is waiting between two steps, e.g. for a batch or for
the other ranks to call the step, no exchange is blocked: the ranks just keep voting to no effect,
and the watchdog doesn't notice a thing. So these waits have to be monitored separately.
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
    """Monitors the jobs' waits between two steps, if they last.

    A job's thread may be waiting for something that all ranks have to do together (take a batch,
    call the step, end the job), i.e. for every rank that isn't there yet. Or it may be waiting for
    something local to its rank, such as its own data. Both kinds of waits may last forever, so both
    are monitored. While a rank is in a local wait, and for a short while afterwards, other ranks
    don't report it as missing, because its own watchdog is already timing that wait.

    Args:
        world: Provides the watchdog.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: Mapping[str, Wait] = {}
        self._watched: dict[str, Monitor] = {}

    def look(self, waits: Mapping[str, Wait]) -> None:
        """Starts, continues and ends monitors, given the jobs' current waits by name. Never waits.

        Called a few times per second.
        """
        before = self._seen
        self._seen = dict(waits)
        same = {
            job for job, wait in waits.items() if job in before and before[job].point == wait.point
        }
        # Only start monitoring a wait if it's still in progress at the second call of `look`. Most
        # waits are shorter than the time between two calls, so monitoring all of them would be
        # mostly wasted effort.
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
    """Returns the monitor for a wait for all ranks at the end of a run.

    A rank that's in a local wait isn't reported as missing.
    """
    others = [rank for rank in range(world.size) if rank != world.rank]
    waiting_for = partial(missing_ranks, job, what, others, excuse_local=True)
    return world.monitor(job=job, step=step, segment=-1, what=what, waiting_for=waiting_for)


def absent(job: str, what: str, answers: Mapping[int, RankStatus | None]) -> dict[int, str]:
    """Returns the other ranks that a job is waiting for, each with the reason.

    Args:
        job: The job's name.
        what: What the job is waiting for.
        answers: The status of every other rank, or None for ranks that didn't answer.
    """
    found = {}
    for other, status in answers.items():
        if status is not None and not status.may_be_late(job):
            waits = [wait for wait in status.waits if wait.job == job]
            if not waits:
                found[other] = f"its job {job!r} has not reached that point"
            elif all(wait.what != what for wait in waits):
                found[other] = f"it waits for its {waits[-1].what}"
    return found
