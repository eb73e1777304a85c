"""Decides which records a cache level keeps, and predicts hit rates by simulation. Pure functions.

**Problem.** When a new record arrives at a full level, should it replace any of the records there,
and if so, which? Most caches have to guess from past accesses: LRU, for example, assumes that
recently used records will be needed again soonest. We don't have to guess. The seed determines a
stream's shuffled order, so we know exactly when each stream will need each record next.

**Belady's rule.** As long as all records have the same size, evicting the record whose next use is
furthest away gives the fewest possible misses (L. A. Belady, 1966,
https://doi.org/10.1147/sj.52.0078). A record's distance is the number of positions until its next
use. When several streams share a level, the stream that needs the record soonest determines its
distance. When a record arrives at a full level, `Room.victims` sorts the level's records by
distance. If the new record is needed sooner than the most distant ones, it replaces them; otherwise
the level refuses it.

**Cost.** To find the most distant records, we have to sort everything in the level. With a million
records that takes 0.1 s, far too slow to do for each new record. So `Room` relaxes Belady's rule in
two ways:

- After sorting, we evict not just one record but enough to free 1/64 of the level. That leaves
  room for many more records before we have to sort again.
- We also remember the smallest distance among the records we evicted (or would have evicted) as a
  bound. From then on, any new record at or beyond this distance is refused without sorting. The
  bound gets stale as the streams advance, so we sort again after a number of offers equal to 1/64
  of the number of records in the level.

**A single stream** uses every record once per pass, so evicting a record that it still needs in
favour of another record gains nothing. That's why, if a slower level of the cache also has the new
record, we don't evict anything that's still needed for it; see `Room.offer_copy`.

**Simulation.** `simulate` predicts how many records a cache with given budgets would serve from
each level. It makes the same decisions as the real cache without reading any data. For comparison,
it can also simulate LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

PAGE_BYTES = 4096
NEVER = 2**62
"""Placeholder for the next use of a record that, as far as we know, won't be used again."""
UNNEEDED = NEVER // 2
"""From this distance on, we consider a record unneeded.

Distances are differences between positions, so even for records that won't be used again, they come
out slightly below `NEVER`.
"""
BATCH_SHARE = 64
"""We evict 1/64 of a level's pages at a time, because sorting a million records takes 0.1 s."""

Order = Callable[[int], np.ndarray]
"""Maps the number of a pass to the record numbers in that pass, in order."""


def pages_of(nbytes: int) -> int:
    """Returns the number of pages taken up by a blob of `nbytes`."""
    return -(-nbytes // PAGE_BYTES)


@final
class Room:
    """Decides which records a full level evicts to make room for a new record.

    Args:
        capacity: The level's size in pages.
    """

    def __init__(self, capacity: int) -> None:
        self._batch = capacity // BATCH_SHARE
        self._bound = 0  # refuse new records from this distance on without sorting
        self._offers = 0  # number of records offered since the last sort
        self._patience = 0  # sort again after this many offers, no matter what
        self._refusals = 0  # how many more copies `offer_copy` refuses before trying again

    def offer_copy(self, put: Callable[[bool], bool], *, several_streams: bool) -> bool:
        """Offers a full level a copy of a slower level's record. Returns whether the level has it
        now.

        Suppose there's a single stream. It uses each record once per pass, so once a record has
        been used, we'd have to keep it for about a whole pass before it's needed again. A level
        with room for a quarter of the records therefore serves a quarter of the reads, no matter
        which records it holds, and replacing any of them is a waste of time. When we still did it,
        it took 0.2 ms per 100 kB record and raised the CPU time per image from 0.89 to 1.19 times
        that of reading a local folder (benchmarks/results/benchmarks.md). So with a single stream,
        a copy may only replace records that aren't known to be needed again.

        With several streams, it does pay off, because another stream may need the record soon.

        Args:
            put: Function that offers the record to the level and returns whether the level has it
                afterwards. Its argument says whether the level may evict records that are still
                needed.
            several_streams: Whether more than one stream uses the level.
        """
        if several_streams:
            return put(True)
        if self._refusals > 0:
            self._refusals -= 1
            return False
        # Each attempt means sorting, so after a failure we refuse a number of copies outright.
        taken = put(False)
        self._refusals = 0 if taken else self._batch
        return taken

    def victims(
        self,
        needed: int,
        distance: int,
        residents: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> np.ndarray | None:
        """Chooses the records to evict for a new record, starting with the most distant.

        Args:
            needed: Number of pages that the new record needs in addition to the free ones.
            distance: Number of positions until the new record is needed.
            residents: Returns the numbers, distances and page counts of all records in the level.
                This is expensive, so we only call it if we can't refuse the new record straight
                away.

        Returns:
            Numbers of the records to evict, or None if some of them are needed no later than the
            new record.
        """
        self._offers += 1
        if distance >= self._bound and self._offers <= self._patience:
            return None  # it can't beat anything the last sort would evict
        numbers, distances, pages = residents()
        self._offers = 0
        self._patience = len(numbers) // BATCH_SHARE
        # Sort by distance, most distant first. Break ties by number, so that the simulation makes
        # the same choice as a real level. Evicting the first n + 1 records frees `freed[n]` pages.
        order = np.argsort(-distances, kind="stable")
        freed = np.cumsum(pages[order])
        if not len(freed) or freed[-1] < needed:
            return None
        # Evict a whole batch at once, or more if the new record needs more pages. But only do so if
        # the new record is needed sooner than everything in the batch; otherwise we'd evict a
        # record that's needed before the new one.
        last = min(int(np.searchsorted(freed, max(needed, self._batch))), len(order) - 1)
        self._bound = int(distances[order[last]])
        return numbers[order[: last + 1]] if distance < self._bound else None


@final
class NextUse:
    """Tracks when a stream will use each record next, as the stream advances.

    Args:
        table: int64 `[records]`, receives the positions. May be in shared memory.
        order: Returns the order of the records in each pass.
        length: Number of records per pass.
        start: The stream's first position.
        stop: The position after the stream's last one.
    """

    def __init__(self, table: np.ndarray, order: Order, length: int, start: int, stop: int) -> None:
        self.table = table
        self._order = order
        self._length = length
        self._start = start
        self._stop = stop
        self._epoch = start // length
        self._records = order(self._epoch)
        # No record occurs twice in a pass. Until it's taken in the current pass, its next use is in
        # this pass, and from then on it's in the next pass. A pass may also leave out some records.
        # If both the current and the next pass skip a record, we treat its next use as unknown
        # (`NEVER`).
        self._later = self._positions(self._epoch + 1)
        np.minimum(self._positions(self._epoch), self._later, out=self.table)

    def take(self, position: int) -> int:
        """Returns the record at `position` and updates its next use.

        Must be called for every position, in order.
        """
        epoch, index = divmod(position, self._length)
        if epoch != self._epoch:
            self._epoch = epoch
            self._records = self._order(epoch)
            # What was the next pass is now the current one.
            current = self._later
            self._later = self._positions(epoch + 1)
            np.minimum(current, self._later, out=self.table)
        record = int(self._records[index])
        self.table[record] = self._later[record]
        return record

    def _positions(self, epoch: int) -> np.ndarray:
        """Returns each record's position in a pass, or `NEVER` if it doesn't occur there."""
        positions = np.full(len(self.table), NEVER, np.int64)
        first = epoch * self._length
        if first >= self._stop:
            return positions
        positions[self._order(epoch)] = np.arange(first, first + self._length)
        # The stream may start or stop in the middle of this pass.
        positions[(positions < self._start) | (positions >= self._stop)] = NEVER
        return positions


def groups(start: int, stop: int, length: int, size: int) -> Iterator[range]:
    """Yields consecutive ranges of up to `size` positions.

    Ranges never span two passes, so a record can't occur twice in a range.
    """
    while start < stop:
        end = min(start + size, stop, (start // length + 1) * length)
        yield range(start, end)
        start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many records were read from each level in one pass, summed over all streams.

    Attributes:
        hits: Number of records found in each level, in the order of the levels.
        origin: Number of records not found in any level.
        origin_bytes: Number of bytes that the origin sent for these records.
    """

    hits: tuple[int, ...]
    origin: int
    origin_bytes: int

    @property
    def hit_share(self) -> float:
        """Fraction of the records found in any of the levels."""
        return sum(self.hits) / max(1, sum(self.hits) + self.origin)


@final
class _Level:
    """A simulated level. The methods mirror those of `PageStore`."""

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
        evict_needed: bool = True,
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

            # Without `evict_needed`, pretend that the record isn't needed itself, so that it can't
            # replace records that are.
            own = max(int(distance(np.array([record]))[0]), 0 if evict_needed else UNNEEDED)
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
            lambda evict_needed: self.put(record, pages, distance, evict_needed=evict_needed),
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
    """Predicts how many records each pass reads from each level, without reading any data.

    The simulated levels make the same decisions as real levels, but the prediction isn't exact: the
    simulation advances all streams in lockstep, whereas in a real run, one job can be a few records
    ahead of another. In our benchmark, the number of bytes actually read from the origin was within
    3% of the prediction (benchmarks/results/benchmarks.md).

    Args:
        orders: The record order of each stream on the node, i.e. of each job and rank.
        sizes: Size of each record in bytes.
        budgets: Size of each level in bytes, fastest level first. Levels are made up of 4096-byte
            pages.
        length: Number of records per pass of a stream.
        epochs: Number of passes.
        group: Number of records to look up before fetching those that are missing. A real cache
            uses half of `ahead_records`.
        read_bytes: Bytes that the origin sends for each record, if that differs from `sizes`.
        policy: `next_use`, or `lru` to see how a cache that keeps the most recently used records
            would do.

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

    # LRU evicts the least recently used record. So the time since the last use takes the place of
    # the distance.
    def by_last_use(numbers: np.ndarray) -> np.ndarray:
        return clock - last_use[numbers]

    distance = by_next_use if policy == "next_use" else by_last_use
    for positions_of_group in groups(0, stop, length, group):
        for index, stream in enumerate(streams):
            missing: list[int] = []
            for position in positions_of_group:
                record = stream.take(position)
                positions[index] = position + 1
                clock += 1
                last_use[record] = clock
                # The fastest level that has the record serves it, and any faster levels are offered
                # a copy.
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
            # Same order as in the real cache: fetch what's missing only after looking up the whole
            # group, and offer it to the slowest level first.
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
