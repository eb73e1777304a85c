"""Decides which records a cache level keeps, and predicts hits with a simulation. Pure.

**Problem.** When a new record arrives at a full level, should the level drop other records for it,
and which ones? Most caches have to guess from the past. LRU, for example, assumes that the records
used last will be needed again soonest. We don't have to guess. A stream's shuffled order follows
from its seed, so we know the position at which each stream will use each record next.

**Belady's rule.** If all records have the same size, there are the fewest misses if we always drop
the record whose next use is furthest away (L. A. Belady, 1966,
https://doi.org/10.1147/sj.52.0078). We call the number of positions until a record's next use its
distance. If several streams use the level, the stream that needs the record soonest determines the
distance. So when a record arrives at a full level, `Room.victims` sorts the records in the level by
distance. If the new record is needed sooner than the most distant ones, it replaces these.
Otherwise the level refuses the new record.

**Cost.** To find the records whose next use is furthest away, we have to sort all records in the
level. For a million records, that takes 0.1 s, which is too slow to do for each new record. So we
deviate from Belady's rule in two ways, which `Room` implements:

- Once we've sorted, we drop not just one record but as many as fill 1/64 of the level. The free
  space then lasts for many new records.
- After each sort, we remember a bound: the smallest distance among the records that we dropped, or
  would have dropped. A new record whose distance is at or beyond the bound is refused without
  sorting. The bound becomes stale as the streams advance, so we sort again after a number of offers
  that's 1/64 of the number of records in the level.

**A single stream** uses every record once per pass over the data set, so evicting a record that it
still needs in favour of another one gains nothing. If the new record is also in a slower level of
the cache, we therefore don't evict any record for it that's still needed; see `Room.offer_copy`.

**Simulation.** `simulate` predicts how many records a cache with given budgets would find in each
level. It makes the same decisions as the real cache, but reads no data. For comparison, it can also
predict how many records a cache with LRU would find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

PAGE_BYTES = 4096
NEVER = 2**62
"""Stands for the position of a record's next use if we know of no further use."""
UNNEEDED = NEVER // 2
"""A record with at least this distance isn't known to be used again.

Distances are differences of positions, so they're a bit smaller than `NEVER` even for such records.
"""
BATCH_SHARE = 64
"""A level drops 1/64 of its pages at a time, because sorting a million records takes 0.1 s."""

Order = Callable[[int], np.ndarray]
"""Returns the record numbers of one pass over a stream, given the pass's number."""


def pages_of(nbytes: int) -> int:
    """Returns the number of pages that a blob of `nbytes` occupies."""
    return -(-nbytes // PAGE_BYTES)


@final
class Room:
    """Decides which records a full level drops to make room for a new one.

    Args:
        capacity: The level's size in pages.
    """

    def __init__(self, capacity: int) -> None:
        self._batch = capacity // BATCH_SHARE
        self._bound = 0  # a new record at this distance or beyond is refused without sorting
        self._offers = 0  # number of records offered since the latest sort
        self._patience = 0  # after this many offers, we sort again in any case
        self._refusals = 0  # how many more copies `offer_copy` refuses before it tries again

    def offer_copy(self, put: Callable[[bool], bool], *, several_streams: bool) -> bool:
        """Offers a full level a copy of a slower level's record. Returns whether it's there now.

        Suppose there's a single stream. It uses each record once per pass, so after a record was
        used, it has to be kept for about a whole pass until it's used again. A level that holds a
        quarter of the records therefore serves a quarter of the reads, no matter which records it
        holds. Replacing them would gain nothing. When we still did it, it took 0.2 ms per record of
        100 kB, which raised the CPU time per image from 0.89 to 1.19 times that of reading a local
        folder (benchmarks/results/benchmarks.md). So for a single stream, a copy may only replace
        records of which we don't know that they're needed again.

        With several streams, replacing does pay, because another stream may need the record soon.

        Args:
            put: Function that offers the record to the level, and returns whether the level has it
                then. Its argument says whether the record may replace records that are needed
                later.
            several_streams: Whether more than one stream uses the level.
        """
        if several_streams:
            return put(True)
        if self._refusals > 0:
            self._refusals -= 1
            return False
        # Each try means sorting the records, so after a failure we refuse some copies untried.
        taken = put(False)
        self._refusals = 0 if taken else self._batch
        return taken

    def victims(
        self,
        needed: int,
        distance: int,
        residents: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> np.ndarray | None:
        """Chooses the records to drop for a new one, starting with the furthest next use.

        Args:
            needed: Number of pages that are missing for the new record.
            distance: Number of positions until the new record is used.
            residents: Returns numbers, distances and pages of all records in the level. Calling it
                is expensive, so we do that only if we don't refuse the new record straight away.

        Returns:
            Numbers of the records to drop, or None if the new record is needed at the same time as
            one of them, or later.
        """
        self._offers += 1
        if distance >= self._bound and self._offers <= self._patience:
            return None  # it would lose against what the latest sort found
        numbers, distances, pages = residents()
        self._offers = 0
        self._patience = len(numbers) // BATCH_SHARE
        # Sort the records by distance, i.e. by how far away their next use is, the furthest first.
        # If distances are equal, sort by number, so that the simulation makes the same choice as a
        # real level. `freed[n]` is the number of pages that become free if we drop the first n + 1
        # records.
        order = np.argsort(-distances, kind="stable")
        freed = np.cumsum(pages[order])
        if not len(freed) or freed[-1] < needed:
            return None
        # Drop a whole batch of records at once, or more if the new record needs more pages. But do
        # so only if the new record is needed sooner than every record in the batch, because
        # otherwise we'd drop a record that's needed before the new one.
        last = min(int(np.searchsorted(freed, max(needed, self._batch))), len(order) - 1)
        self._bound = int(distances[order[last]])
        return numbers[order[: last + 1]] if distance < self._bound else None


@final
class NextUse:
    """The position at which one stream uses each record next, updated as the stream advances.

    Args:
        table: int64 `[records]`. We write the positions to this array, which may be in shared
            memory.
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
        # A pass uses no record twice. Until a record is taken in the current pass, its next use is
        # in this pass. After that, its next use is in the next pass. A pass may also leave out some
        # records. If both passes leave out a record, its next use counts as unknown (`NEVER`).
        self._later = self._positions(self._epoch + 1)
        np.minimum(self._positions(self._epoch), self._later, out=self.table)

    def take(self, position: int) -> int:
        """Returns the record at `position`, and updates the position of its next use.

        You must call this for all positions in order.
        """
        epoch, index = divmod(position, self._length)
        if epoch != self._epoch:
            self._epoch = epoch
            self._records = self._order(epoch)
            # The pass that was the next one has become the current one.
            current = self._later
            self._later = self._positions(epoch + 1)
            np.minimum(current, self._later, out=self.table)
        record = int(self._records[index])
        self.table[record] = self._later[record]
        return record

    def _positions(self, epoch: int) -> np.ndarray:
        """Returns each record's position in a pass, or `NEVER` if the pass leaves it out."""
        positions = np.full(len(self.table), NEVER, np.int64)
        first = epoch * self._length
        if first >= self._stop:
            return positions
        positions[self._order(epoch)] = np.arange(first, first + self._length)
        # The stream may begin or end in the middle of this pass.
        positions[(positions < self._start) | (positions >= self._stop)] = NEVER
        return positions


def groups(start: int, stop: int, length: int, size: int) -> Iterator[range]:
    """Yields consecutive ranges of up to `size` positions.

    No range spans two passes, so no record occurs in it twice.
    """
    while start < stop:
        end = min(start + size, stop, (start // length + 1) * length)
        yield range(start, end)
        start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many records all streams together read from each level in one pass.

    Attributes:
        hits: Number of records that were found in each level, in the order of the levels.
        origin: Number of records that were found in no level.
        origin_bytes: Number of bytes that the origin sent for these records.
    """

    hits: tuple[int, ...]
    origin: int
    origin_bytes: int

    @property
    def hit_share(self) -> float:
        """Fraction of the records that were found in some level."""
        return sum(self.hits) / max(1, sum(self.hits) + self.origin)


@final
class _Level:
    """One simulated level. Its methods correspond to those of `PageStore`."""

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

            # If the record mustn't replace others that are needed, treat it as if it weren't needed
            # itself.
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

    The simulated levels make the same decisions as real ones, but the prediction isn't exact. The
    simulation advances all streams in turn, whereas in a real run one job may be some records ahead
    of another one. In our benchmark, the number of bytes that were actually read from the origin
    was within 3% of the prediction (benchmarks/results/benchmarks.md).

    Args:
        orders: The order of the records in each pass, for each stream on the node, i.e. for each
            job and rank.
        sizes: Size of each record in bytes.
        budgets: Size of each level in bytes, the fastest level first. A level uses whole pages of
            4096 bytes.
        length: Number of records per pass of a stream.
        epochs: Number of passes.
        group: Number of records that are looked up before the missing ones are fetched. In a real
            cache that's half of `ahead_records`.
        read_bytes: Bytes that the origin sends for each record, if that differs from `sizes`.
        policy: `next_use`, or `lru` to see how a cache would do that keeps the most recently used
            records.

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

    # With LRU, a full level drops the record that was used longest ago. So instead of the distance
    # to a record's next use, we use the time since its latest use.
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
                # The fastest level that has the record delivers it, and the levels that are even
                # faster are offered a copy.
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
            # We do this in the same order as the real cache: it fetches the missing records after
            # it has looked up the whole group, and offers them to the slowest level first.
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
