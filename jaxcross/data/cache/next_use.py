"""Decides which records a cache level keeps, and predicts hits with a simulation. Pure.

A stream's shuffled order follows from its seed, so we don't have to guess which records will be
needed soon, as LRU does: we know the position at which each stream uses each record next. If all
records have the same size, the best choice is to drop the record whose next use is furthest away
(L. A. Belady, 1966, https://doi.org/10.1147/sj.52.0078). If several streams use a level, the stream
that needs a record soonest counts.

**Distance.** A record's distance is the number of positions until its next use. When a record
arrives at a full level, `Room.victims` sorts the residents by distance, and drops the most distant
ones if the newcomer is needed sooner. Otherwise it refuses the newcomer.

**Cost.** Finding the most distant residents means sorting them, which takes 0.1 s for a million
records. Doing that for every record would be too slow, so `Room` departs from Belady's rule in two
ways:

- It drops a batch at a time (1/64 of the level), so the room lasts for many newcomers.
- After each sort it remembers the distance of the nearest record in the batch, which is its bound.
  For the next 1/64 of the residents' number of offers, it refuses any newcomer at or beyond that
  bound without sorting again.

**A single stream** uses every record once per pass, so exchanging records gains nothing; see
`Room.offer_copy`.

**Simulation.** `simulate` makes the same decisions as the real levels but reads no data, so it can
predict hits for a given set of budgets, and compare them with LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

PAGE_BYTES = 4096
NEVER = 2**62
"""Position of a use that isn't known to come."""
UNNEEDED = NEVER // 2
"""Least distance of a record that isn't known to be used again."""
BATCH_SHARE = 64
"""A level drops 1/64 of its pages at a time, because sorting a million records takes 0.1 s."""

Order = Callable[[int], np.ndarray]
"""Returns the record numbers of one pass over a stream, given the pass's number."""


def pages_of(nbytes: int) -> int:
    """Returns the number of pages that a blob of `nbytes` occupies."""
    return -(-nbytes // PAGE_BYTES)


@final
class Room:
    """Decides what one full level drops to make room for a new record.

    Args:
        capacity: The level's size in pages.
    """

    def __init__(self, capacity: int) -> None:
        self._batch = capacity // BATCH_SHARE
        self._bound = 0  # distance at or beyond which we refuse without looking; set by each look
        self._offers = 0
        self._patience = 0
        self._refusals = 0  # number of copies still to refuse without looking

    def offer_copy(self, put: Callable[[bool], bool], *, several_streams: bool) -> bool:
        """Offers a full level a copy of a slower level's record. Returns whether it's there now.

        A single stream uses each record once per pass, so a record has to be kept for about a whole
        pass until it is used again. A level that holds a quarter of the records therefore serves a
        quarter of the reads, whichever records these are. Replacing records that the stream still
        needs would gain nothing, and took 0.2 ms per 100 kB record. With several streams it does
        pay, because another one may need the record soon.

        Args:
            put: Offers the record. Its argument says whether the record may replace others that are
                needed later.
            several_streams: Whether more than one stream uses the level.
        """
        if several_streams:
            return put(True)
        if self._refusals > 0:
            self._refusals -= 1
            return False
        taken = put(False)
        self._refusals = 0 if taken else self._batch
        return taken

    def victims(
        self,
        needed: int,
        distance: int,
        residents: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> np.ndarray | None:
        """Chooses the residents to drop for a new record, the furthest next use first.

        Args:
            needed: Number of pages that are missing for the new record.
            distance: Number of positions until the new record is used.
            residents: Returns numbers, distances and pages of all residents. It's expensive, so we
                call it only if the result can matter.

        Returns:
            Numbers of the records to drop, or None if the new record is needed later than they are.
        """
        self._offers += 1
        if distance >= self._bound and self._offers <= self._patience:
            return None
        numbers, distances, pages = residents()
        self._offers = 0
        self._patience = len(numbers) // BATCH_SHARE
        order = np.argsort(-distances, kind="stable")
        freed = np.cumsum(pages[order])
        if not len(freed) or freed[-1] < needed:
            return None
        last = min(int(np.searchsorted(freed, max(needed, self._batch))), len(order) - 1)
        self._bound = int(distances[order[last]])
        return numbers[order[: last + 1]] if distance < self._bound else None


@final
class NextUse:
    """The position at which one stream uses each record next, updated as the stream advances.

    Args:
        table: int64 `[records]`, filled here. It may be in shared memory.
        order: The stream's passes.
        length: Number of records per pass.
        start: The stream's first position.
        stop: The position after its last.
    """

    def __init__(self, table: np.ndarray, order: Order, length: int, start: int, stop: int) -> None:
        self.table = table
        self._order = order
        self._length = length
        self._start = start
        self._stop = stop
        self._epoch = start // length
        self._records = order(self._epoch)
        self._later = self._positions(self._epoch + 1)
        np.minimum(self._positions(self._epoch), self._later, out=self.table)

    def take(self, position: int) -> int:
        """Returns the record at `position`, and notes its next use. Positions must be in order."""
        epoch, index = divmod(position, self._length)
        if epoch != self._epoch:
            self._epoch = epoch
            self._records = self._order(epoch)
            current = self._later
            self._later = self._positions(epoch + 1)
            np.minimum(current, self._later, out=self.table)
        record = int(self._records[index])
        self.table[record] = self._later[record]
        return record

    def _positions(self, epoch: int) -> np.ndarray:
        positions = np.full(len(self.table), NEVER, np.int64)
        first = epoch * self._length
        if first >= self._stop:
            return positions
        positions[self._order(epoch)] = np.arange(first, first + self._length)
        positions[(positions < self._start) | (positions >= self._stop)] = NEVER
        return positions


def groups(start: int, stop: int, length: int, size: int) -> Iterator[range]:
    """Yields ranges of up to `size` positions. None spans two passes, so it has no record twice."""
    while start < stop:
        end = min(start + size, stop, (start // length + 1) * length)
        yield range(start, end)
        start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What all streams read in one pass, by level.

    Attributes:
        hits: Number of records that each level had, in the order of the levels.
        origin: Number of records that no level had.
        origin_bytes: Number of bytes that the origin sent for them.
    """

    hits: tuple[int, ...]
    origin: int
    origin_bytes: int

    @property
    def hit_share(self) -> float:
        """Share of the records that some level had."""
        return sum(self.hits) / max(1, sum(self.hits) + self.origin)


@final
class _Level:
    """One simulated level."""

    def __init__(self, budget_bytes: int) -> None:
        self.free = budget_bytes // PAGE_BYTES
        self._capacity = self.free
        self._room = Room(self.free)
        self.pages: dict[int, int] = {}

    def put(
        self,
        record: int,
        pages: int,
        distance: Callable[[np.ndarray], np.ndarray],
        *,
        exchange: bool = True,
    ) -> bool:
        if record in self.pages or pages > self._capacity:
            return record in self.pages
        if pages > self.free:

            def residents() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
                numbers = np.array(sorted(self.pages), np.int64)
                return (
                    numbers,
                    distance(numbers),
                    np.array([self.pages[number] for number in numbers], np.int64),
                )

            own = max(int(distance(np.array([record]))[0]), 0 if exchange else UNNEEDED)
            victims = self._room.victims(pages - self.free, own, residents)
            if victims is None:
                return False
            self.free += sum(self.pages.pop(int(victim)) for victim in victims)
        self.pages[record] = pages
        self.free -= pages
        return True

    def put_copy(
        self,
        record: int,
        pages: int,
        distance: Callable[[np.ndarray], np.ndarray],
        *,
        several_streams: bool,
    ) -> None:
        if pages <= self.free:
            self.put(record, pages, distance)
            return
        self._room.offer_copy(
            lambda exchange: self.put(record, pages, distance, exchange=exchange),
            several_streams=several_streams,
        )


def simulate(
    orders: Sequence[Order],
    sizes: np.ndarray,
    budgets: Sequence[int],
    *,
    length: int,
    epochs: int,
    group: int = 1,
    read_bytes: np.ndarray | None = None,
    policy: str = "next_use",
) -> list[Tally]:
    """Predicts how many records each pass reads from each level. Reads no data.

    It makes the same decisions as the real levels.

    Args:
        orders: The passes of each stream on the node, i.e. one entry per job and rank. The streams
            advance in turn.
        sizes: Size of each record in bytes.
        budgets: Size of each level in bytes, the fastest level first. A level uses whole pages of
            4096 bytes.
        length: Number of records per pass of a stream.
        epochs: Number of passes.
        group: Number of records that are looked up before the missing ones are fetched. In a real
            cache that's half of `ahead_records`.
        read_bytes: Bytes that the origin sends for each record, if that differs from `sizes`.
        policy: `next_use`, or `lru` to see what keeping the most recently used records would give.

    Raises:
        ValueError: `policy` is neither `next_use` nor `lru`.
    """
    if policy not in ("next_use", "lru"):
        raise ValueError(f"`policy` must be `next_use` or `lru`, got `{policy}`.")
    stop = epochs * length
    streams = [NextUse(np.empty(len(sizes), np.int64), order, length, 0, stop) for order in orders]
    positions = [0] * len(streams)
    last_use = np.zeros(len(sizes), np.int64)
    levels = [_Level(budget) for budget in budgets]
    pages = -(-sizes // PAGE_BYTES)
    sent = sizes if read_bytes is None else read_bytes
    hits = np.zeros((epochs, len(levels)), np.int64)
    missed: list[list[int]] = [[] for _ in range(epochs)]
    clock = 0

    def by_next_use(numbers: np.ndarray) -> np.ndarray:
        each = [
            stream.table[numbers] - position
            for stream, position in zip(streams, positions, strict=True)
        ]
        return np.maximum(np.min(each, axis=0), 0)

    def by_last_use(numbers: np.ndarray) -> np.ndarray:
        return clock - last_use[numbers]

    distance = by_next_use if policy == "next_use" else by_last_use
    for turn in groups(0, stop, length, group):
        for index, stream in enumerate(streams):
            missing: list[int] = []
            for position in turn:
                record = stream.take(position)
                positions[index] = position + 1
                clock += 1
                last_use[record] = clock
                found = next((n for n, level in enumerate(levels) if record in level.pages), None)
                if found is None:
                    missing.append(record)
                    missed[position // length].append(record)
                    continue
                hits[position // length, found] += 1
                for level in levels[:found]:
                    level.put_copy(
                        record, int(pages[record]), distance, several_streams=len(streams) > 1
                    )
            for record in missing:
                for level in reversed(levels):
                    level.put(record, int(pages[record]), distance)
    return [
        Tally(
            hits=tuple(map(int, hits[epoch])),
            origin=len(records),
            origin_bytes=int(sent[records].sum()),
        )
        for epoch, records in enumerate(missed)
    ]
