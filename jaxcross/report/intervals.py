"""Set operations on time.

A set is a sorted list of disjoint half-open intervals `(start, end)` in nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import final

Interval = tuple[int, int]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Builds a set from any intervals. Joins those that touch or overlap, and drops empty ones."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def measure(intervals: Iterable[Interval]) -> int:
    """Returns the total length of a set."""
    return sum(end - start for start, end in intervals)


def intersect(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Returns the intersection of two sets."""
    shared: list[Interval] = []
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        a, b = left[i]
        c, d = right[j]
        # A run has hundreds of thousands of intervals, and comparing directly is much faster than
        # calling `max` and `min`.
        start = a if a > c else c
        end = b if b < d else d
        if start < end:
            shared.append((start, end))
        if b < d:
            i += 1
        else:
            j += 1
    return shared


def subtract(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Returns the part of the first set that isn't in the second."""
    if not left:
        return []
    outside: list[Interval] = []
    cursor = left[0][0]
    for start, end in right:
        if start > cursor:
            outside.append((cursor, start))
        cursor = max(cursor, end)
    if cursor < left[-1][1]:
        outside.append((cursor, left[-1][1]))
    return intersect(left, outside)


@final
class Cumulated:
    """Finds by bisection how much of a time window a set of intervals covers.

    We need this for every span of a run, of which there may be hundreds of thousands. Intersecting
    each of them with the whole set would be too slow, so we compute the cumulative length of the
    intervals once, after which a span only takes two lookups.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._starts = [start for start, _ in intervals]
        self._intervals = intervals
        self._before = [0, *accumulate(end - start for start, end in intervals)]

    def within(self, start: int, end: int) -> int:
        """Returns how much of the time from `start` to `end` the intervals cover."""
        return self._until(end) - self._until(start)

    def _until(self, moment: int) -> int:
        index = bisect_right(self._starts, moment)
        if not index:
            return 0
        start, end = self._intervals[index - 1]
        return self._before[index - 1] + min(moment, end) - start
