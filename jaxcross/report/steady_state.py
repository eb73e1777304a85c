"""Finds the part of a run to measure: a stretch of time that consists of whole rounds.

Measuring between two arbitrary moments would cut some steps into pieces, and the measured rates
would depend on how much of those steps happens to be inside. So we measure from the end of one step
to the end of another, if possible with every job making the same number of steps in between.
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
        window: Begin and end, in nanoseconds.
        steps: For each job, how many of its steps ended within the window. Always positive.
    """

    window: Interval
    steps: Mapping[str, int]

    @property
    def rounds(self) -> float:
        """The number of rounds, where a round consists of as many steps as there are jobs.

        If all jobs made the same number of steps, that's one step of every job.
        """
        return sum(self.steps.values()) / len(self.steps)

    @classmethod
    def own(cls, timeline: Timeline, job: str) -> Self | None:
        """Returns a job's steady state, from the end of its first step to the end of its last.

        Returns None if the job made fewer than two steps.
        """
        ends = _ends(timeline, job)
        return (
            cls((ends[0], ends[-1]), {job: len(ends) - 1}) if ends and ends[0] < ends[-1] else None
        )

    @classmethod
    def shared(cls, timeline: Timeline, jobs: Sequence[str]) -> Self | None:
        """Returns the longest stretch of whole rounds in which all jobs were running.

        We only look at the time after every job has completed its first step and before any job
        completes its last. Within it, we search for two step ends of the same job between which all
        jobs made the same number of steps.

        Instead of comparing all pairs, we note at each step end how many steps ahead every other
        job is. If these numbers are the same at two step ends, all jobs made equally many steps in
        between.

        If some jobs run faster than others, there may be no two such step ends, or only two that
        are close together. In that case, we measure over all whole steps of the slowest job, and
        count how many steps the other jobs make in the meantime.

        Returns None if the slowest job didn't make a single whole step in this time.
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
        # Every job ending a step in this stretch may be a coincidence, e.g. if two slow jobs happen
        # to do so during a single step of a fast job. We'd then count a step of each, even though
        # the stretch is far shorter than their steps. So only accept a stretch at least half as
        # long as the steps that each job has ended in it.
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
    """Returns the sets of two or more jobs that were in steady state at the same time.

    Larger sets come first; ties go to the set that was together for longer.

    For each set, we also return what's left after removing the slowest job, the two slowest jobs,
    and so on. If a slow job doesn't complete a single step, the whole set can't be measured, even
    though the other jobs may have made plenty of steps in the meantime.
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
    """Returns for how many nanoseconds at least two of these intervals overlap."""
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
    """Returns the total length of the steps that end after `begin` and no later than `end`.

    The first of these counts in full, even if it started before `begin`.
    """
    return ends[bisect_right(ends, end) - 1] - ends[bisect_right(ends, begin) - 1]


def _ends(timeline: Timeline, job: str) -> list[int]:
    return sorted(end for _, end in timeline.step_ends.get(job, ()))
