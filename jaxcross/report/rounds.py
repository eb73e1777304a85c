"""Finds the part of a run to measure: a stretch of one rank's time that holds whole rounds of all
its jobs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from jaxcross.report.intervals import Interval
from jaxcross.report.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time on one rank, from the end of one step to the end of another.

    Attributes:
        window: Its begin and end.
        steps: Steps of each job that ended in it, all above 0.
    """

    window: Interval
    steps: Mapping[str, int]

    @property
    def rounds(self) -> float:
        """A round is as many steps as there are jobs: one of each, where all made equally many."""
        return sum(self.steps.values()) / len(self.steps)

    @classmethod
    def own(cls, timeline: Timeline, job: str) -> Self | None:
        """A job's steady state: from the end of its first step to the end of its last; None below
        two steps.
        """
        ends = _ends(timeline, job)
        return (
            cls((ends[0], ends[-1]), {job: len(ends) - 1}) if ends and ends[0] < ends[-1] else None
        )

    @classmethod
    def shared(cls, timeline: Timeline, jobs: Sequence[str]) -> Self | None:
        """The longest whole rounds that jobs made next to each other, all past their first step and
        none at its end.

        Between two ends of one job's steps at which every other job is equally far ahead of it, all
        made equally many steps. Where jobs go at unequal rates there is hardly such a stretch, or a
        short one: then it is all whole steps of the slowest. None if the jobs were never in steady
        state together for so long.
        """
        every = {job: _ends(timeline, job) for job in jobs}
        low = max(ends[0] for ends in every.values())
        high = min(ends[-1] for ends in every.values())
        inside = {job: [end for end in ends if low <= end <= high] for job, ends in every.items()}
        slowest = min(jobs, key=lambda job: len(inside[job]))
        begin = 0
        end = 0
        rounds = 0
        for edges in inside.values():
            first: dict[tuple[int, ...], int] = {}
            for index, edge in enumerate(edges):
                ahead = tuple(bisect_right(ends, edge) - index for ends in inside.values())
                start = first.setdefault(ahead, index)
                if index - start > rounds:
                    begin = edges[start]
                    end = edge
                    rounds = index - start
        whole = inside[slowest]
        most = len(whole) - 1
        # A stretch that is far shorter than the steps that end in it has their ends by chance.
        longest = max(_steps_ended(ends, begin, end) for ends in every.values()) if rounds else 0
        if 2 * rounds >= max(most, 1) and end > begin and 2 * (end - begin) >= longest:
            return cls((begin, end), dict.fromkeys(jobs, rounds))
        if most < 1:
            return None
        begin = whole[0]
        end = whole[-1]
        steps = {
            job: bisect_right(ends, end) - bisect_right(ends, begin) for job, ends in inside.items()
        }
        return cls((begin, end), steps) if end > begin and all(steps.values()) else None


def sets_together(timeline: Timeline, jobs: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets of at least two jobs that were in steady state at one moment, largest first, then the
    longest together. Of each also those without its slowest jobs: next to one that makes no whole
    step the others may make many.
    """
    reach = {job: own.window for job in jobs if (own := Stretch.own(timeline, job)) is not None}
    moments = sorted({at for window in reach.values() for at in window})
    lengths: Counter[tuple[str, ...]] = Counter()
    for low, high in pairwise(moments):
        lengths[
            tuple(job for job, (begin, end) in reach.items() if begin <= low and high <= end)
        ] += high - low
    for members, length in tuple(lengths.items()):
        low = max((reach[job][0] for job in members), default=0)
        high = min((reach[job][1] for job in members), default=0)
        made = {job: sum(low <= end <= high for end in _ends(timeline, job)) for job in members}
        rest = list(members)
        while len(rest) > 2:
            rest.remove(min(rest, key=lambda job: made[job]))
            lengths[tuple(rest)] = max(lengths[tuple(rest)], length)
    return sorted((s for s in lengths if len(s) > 1), key=lambda s: (-len(s), -lengths[s]))


def at_work_together(timeline_spans: Sequence[Interval]) -> int:
    """Nanoseconds in which at least two of these intervals overlap."""
    moments = sorted(
        (at, change) for start, end in timeline_spans for at, change in ((start, 1), (end, -1))
    )
    together = 0
    there = 0
    before = 0
    for at, change in moments:
        together += at - before if there > 1 else 0
        there += change
        before = at
    return together


def _steps_ended(ends: list[int], begin: int, end: int) -> int:
    """Nanoseconds of the steps that end after `begin` and until `end`; the first one may begin
    before.
    """
    return ends[bisect_right(ends, end) - 1] - ends[bisect_right(ends, begin) - 1]


def _ends(timeline: Timeline, job: str) -> list[int]:
    return sorted(end for _, end in timeline.step_ends.get(job, ()))
