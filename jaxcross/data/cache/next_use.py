"""Choice of the records that a level keeps: those that are needed soonest; and the simulation that
predicts hits. Pure.

The order of a stream is known from its seed, so the next use of each record is, too. Dropping what
is needed last is optimal where all records have one size (L. A. Belady, 1966,
https://doi.org/10.1147/sj.52.0078). Two departures keep a decision cheap for a million records: a
level drops a batch at a time, and refuses without looking for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

PAGE_BYTES = 4096
NEVER = 2**62
"""Position of a use that is not known to come."""
UNNEEDED = NEVER // 2
"""Least distance of a record whose next use is not known to come."""
BATCH_SHARE = 64
"""One part in 64 of a level is dropped at a time: sorting a million records takes 0.1 s."""

Order = Callable[[int], np.ndarray]
"""Record numbers of one pass over a stream, by the pass's number."""


def pages_of(nbytes: int) -> int:
    """Counts the pages that a blob of `nbytes` occupies."""
    return -(-nbytes // PAGE_BYTES)


@final
class Room:
    """Decides what one full level drops for a newcomer.

    Args:
        capacity: Pages of the level.
    """

    def __init__(self, capacity: int) -> None:
        self._batch = capacity // BATCH_SHARE
        self._bound = 0  # a newcomer that is needed later than this was refused at the last look
        self._offers = 0
        self._patience = 0
        self._refusals = 0  # copies that are refused without a look

    def offer_copy(self, put: Callable[[bool], bool], *, several_streams: bool) -> bool:
        """Offers a full level a record that a slower level has, too, and returns whether it has it
        now.

        One stream uses each record once a pass. So each record that a level keeps spans the end of
        the pass, and a level that holds a quarter of the records gives a quarter, whichever they
        are: exchanging those that the stream needs gains nothing, and took 0.2 ms for each record
        of 100 kB. Several streams gain by exchanging.

        Args:
            put: Offers the record; its argument is whether it may replace records that are needed
                later.
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
        """Chooses residents to drop for a newcomer, those needed last first.

        Args:
            needed: Pages that the newcomer lacks.
            distance: Uses of other records until the newcomer is needed.
            residents: Returns numbers, distances and pages of all residents; called only where it
                matters.

        Returns:
            Numbers to drop, or None where the newcomer is needed later than they are.
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
    """The next position of each record in one stream, which the stream keeps up to date as it
    advances.

    Args:
        table: int64 `[records]`, filled here; may lie in shared memory.
        order: The stream's passes.
        length: Records in a pass.
        start: First position of the stream.
        stop: Position after its last.
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
        """Returns the record at `position` and notes when it is used again. Positions must come in
        order.
        """
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
    """Splits positions into groups of `size`, none of which spans two passes, so that no record is
    in one twice.
    """
    while start < stop:
        end = min(start + size, stop, (start // length + 1) * length)
        yield range(start, end)
        start = end


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Records and bytes that one pass of all streams reads, by level.

    Attributes:
        hits: Records by level, in the order of the levels.
        origin: Records that no level had.
        origin_bytes: Bytes of them.
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
    """One level of a simulation: the pages of each resident."""

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
    """Predicts what each pass reads from where, by the same decisions that the levels take. Reads
    nothing.

    Args:
        orders: The passes of each stream on the node: one for each job and rank. They advance in
            turn.
        sizes: Bytes of each record.
        budgets: Bytes of each level, the fastest first. A level takes whole pages of 4096 bytes.
        length: Records of a stream's pass.
        epochs: Passes.
        group: Records that are looked up before those that are missing are fetched: half of
            `ahead_records`.
        read_bytes: Bytes that the origin sends for each record, if not `sizes`.
        policy: `next_use`, or `lru` for what keeping the most recently used would give.

    Raises:
        ValueError: There is no such policy.
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
