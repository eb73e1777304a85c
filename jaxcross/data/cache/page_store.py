"""One cache level: records by number, in the pages of a file that all processes of the node share.

A level is a folder with three files:

    data    the pages, 4096 bytes each
    pages   header; for each page, the next page of the same record; the stack of free pages
    rows    for each record, its first page, size and checksum, and a checksum of the row itself

The number of pages is fixed, so the budget is a hard limit. A record's pages form a chain through
`pages`, so any free page can be used, wherever it is. If a record's pages are adjacent, as they are
until the level drops something, the record is read with a single `pread`.

**Concurrency.** Writers take the level's file lock. Readers don't: they check the row's own
checksum, read the bytes, and check these against the record's checksum. If either is wrong, another
process may have moved the record meanwhile, so the reader tries again under the lock. Only a record
that is still wrong then is damaged, and dropped.

**Crashes.** A process can be killed at any moment. Therefore an insertion writes the bytes first,
to pages that are still free, and the row last. While the stack of free pages, the chains and the
rows are being changed, a dirty flag is set in the header. The next process to take the lock finds
the flag, keeps the rows that are whole, and rebuilds the stack of free pages from them. The first
user of a level always does so.

**Full disks.** `pages` and `rows` are mapped, so their space is allocated in advance; otherwise a
full disk would kill the process with SIGBUS (see `_resize`). `data` is written with `pwrite`, which
raises an error that we can handle: the level then turns itself off.
"""

from __future__ import annotations

import logging
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import numpy as np

from jaxcross.data.cache.locks import FileLock, Users
from jaxcross.data.cache.next_use import PAGE_BYTES, UNNEEDED, Room, pages_of

_log = logging.getLogger("jaxcross")

# Columns of a row, 4 bytes each. Pages are counted from 1; 0 means none.
FIRST, NBYTES, CRC, CHECK = range(4)
ROW_BYTES = 16
HEADER = 8  # number of 8-byte words, two of which are in use
DIRTY = 0  # index: whether a change has begun but not finished
FREE = 1  # index: number of free pages
FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
WORD = 2**64 - 1
SMALLEST_BYTES = 16 * PAGE_BYTES


@final
class PageStore:
    """A level with a hard budget, shared by all processes that name the same folder. Thread-safe.

    Create and close it while holding a lock that all its users take.

    Args:
        folder: The level's own folder; created if it's missing.
        name: The level's name, for messages.
        budget_bytes: Size of the files `data` and `pages` together. `rows` takes another 16 bytes
            per record.
        distances: Returns, for each of the given numbers, how many positions away its next use is.
        several_streams: Returns whether more than one stream uses the level.

    Raises:
        OSError: The folder can't be written, or its disk is full.
        ValueError: The budget is below 64 KiB, or the level is in use with a different budget.

    Attributes:
        damaged: Number of records that were dropped because their bytes didn't match their
            checksum.
        is_off: Whether a failed write has turned off writing. Records can still be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        budget_bytes: int,
        distances: Callable[[np.ndarray], np.ndarray],
        several_streams: Callable[[], bool],
    ) -> None:
        if budget_bytes < SMALLEST_BYTES:
            raise ValueError(
                f"`{name}_bytes` must be 0 or at least {SMALLEST_BYTES}, got {budget_bytes}."
            )
        self.n_pages = (budget_bytes - 8 * HEADER) // (PAGE_BYTES + 8)
        self.damaged = 0
        self.is_off = self._is_closed = False
        self._folder = folder
        self._name = name
        self._distances = distances
        self._several_streams = several_streams
        self._room = Room(self.n_pages)
        folder.mkdir(parents=True, exist_ok=True)
        self._users = Users(folder / "users")
        self._lock = FileLock(folder / "lock")
        self._data = -1
        try:
            self._open(budget_bytes)
        except BaseException:
            if self._data != -1:
                os.close(self._data)
            self._users.leave()
            self._lock.close()
            raise

    def _open(self, budget_bytes: int) -> None:
        pages_bytes = 8 * HEADER + 8 * self.n_pages
        if self._users.is_first:
            _resize(self._folder / "pages", pages_bytes)
            _resize(self._folder / "rows", _size(self._folder / "rows") // ROW_BYTES * ROW_BYTES)
            if _size(self._folder / "data") > self.n_pages * PAGE_BYTES:
                os.truncate(self._folder / "data", self.n_pages * PAGE_BYTES)
        elif _size(self._folder / "pages") != pages_bytes:
            raise ValueError(
                f"The level `{self._name}` in `{self._folder}` is in use by another process with "
                f"another budget than `{self._name}_bytes={budget_bytes}`. Give all processes of a "
                "node the same one."
            )
        self._data = os.open(self._folder / "data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        words = np.frombuffer(_map(self._folder / "pages"), np.int64)
        self._header = words[:HEADER]
        tables = words[HEADER:].view(np.uint32)
        self._next = tables[: self.n_pages]
        self._free = tables[self.n_pages :]
        self._rows = np.empty((0, 4), np.uint32)
        self._map_rows()
        if self._users.is_first:
            self._header[DIRTY] = 1
        with self._locked():
            pass

    def grow(self, records: int) -> None:
        """Makes room for the rows of all records below `records`."""
        with self._lock:
            if self._is_closed:
                return
            if _size(self._folder / "rows") < records * ROW_BYTES:
                _resize(self._folder / "rows", records * ROW_BYTES)
            self._map_rows()

    def close(self) -> None:
        """Leaves the level, which then looks empty. Waits for calls in other threads."""
        with self._lock:
            self._is_closed = True
            self._rows = np.empty((0, 4), np.uint32)
            # The kernel may reuse the descriptor's number for another file. Threads that are still
            # reading are safe, because they find no rows any more.
            os.close(self._data)
        self._lock.close()
        self._users.leave()

    def __contains__(self, number: int) -> bool:
        rows = self._rows  # read only once, because another thread may close the level meanwhile
        return number < len(rows) and bool(rows[number, FIRST])

    def get(self, number: int, salt: int = 0) -> bytes | None:
        """Reads a record, or returns None. Drops it if its checksum with this salt is wrong."""
        if number not in self:
            return None
        try:
            blob = self._read(number, salt)
        except (OSError, IndexError):
            if not self._is_closed:
                raise
            return None
        # Either another process has moved the record while we read it, or the record is damaged.
        if blob is None and number in self:
            with self._locked():
                if self._is_closed:
                    return None
                blob = self._read(number, salt)
                if blob is None and number in self:
                    self._drop(np.array([number]))
                    self.damaged += 1
        return blob

    def put(self, number: int, blob: bytes, salt: int = 0, *, exchange: bool = True) -> bool:
        """Offers a record, and returns whether the level has it now.

        If space is short, the record that is needed last has to go, or isn't accepted.

        The salt differs between data sets. It seeds the checksum, so we notice if a number now
        belongs to a record of another data set.

        If a write fails, for example because the disk is full, the level turns off for this process
        with one warning.

        Args:
            number: The record's number.
            blob: Its bytes.
            salt: Seeds the checksum.
            exchange: Whether the record may replace any that are needed later. Otherwise it
                replaces only records that no stream is known to need.
        """
        needed = pages_of(len(blob))
        if self.is_off or not needed or needed > self.n_pages or number >= len(self._rows):
            return False
        try:
            with self._locked():
                if self._is_closed:
                    return False
                if number in self:
                    return True
                lacking = needed - int(self._header[FREE])
                if lacking > 0:
                    distance = max(
                        int(self._distances(np.array([number]))[0]), 0 if exchange else UNNEEDED
                    )
                    victims = self._room.victims(lacking, distance, self._residents)
                    if victims is None:
                        return False
                    self._drop(victims)
                self._insert(number, blob, salt)
        except OSError as error:
            self.is_off = True
            _log.warning(
                f"The data cache's level `{self._name}` in `{self._folder}` is off from now on, "
                f"since a write failed: {error}. Training goes on and reads more from slower "
                f"levels. Free some space, or pass a smaller `{self._name}_bytes`."
            )
            return False
        return True

    def put_copy(self, number: int, blob: bytes, salt: int = 0) -> bool:
        """Offers a record that a slower level also has; see `Room.offer_copy`."""
        # Without the lock, because `put` checks again.
        if pages_of(len(blob)) <= self._header[FREE]:
            return self.put(number, blob, salt)
        return self._room.offer_copy(
            lambda exchange: self.put(number, blob, salt, exchange=exchange),
            several_streams=self._several_streams(),
        )

    def usage(self) -> tuple[int, int]:
        """Returns the number of records in the level, and the bytes of their pages."""
        free = int(self._header[FREE])
        return int(np.count_nonzero(self._rows[:, FIRST])), (self.n_pages - free) * PAGE_BYTES

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._header[DIRTY] and not self._is_closed:
                self._recount()
            yield

    def _residents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._map_rows()
        numbers = np.flatnonzero(self._rows[:, FIRST])
        return (
            numbers,
            self._distances(numbers),
            -(-self._rows[numbers, NBYTES].astype(np.int64) // PAGE_BYTES),
        )

    def _insert(self, number: int, blob: bytes, salt: int) -> None:
        needed = pages_of(len(blob))
        free = int(self._header[FREE])
        pages = self._free[free - needed : free][::-1].astype(np.int64)
        view = memoryview(blob)
        done = 0
        for first, count in _runs(pages):
            _write(self._data, view[done : done + count * PAGE_BYTES], first * PAGE_BYTES)
            done += count * PAGE_BYTES
        self._header[DIRTY] = 1
        self._header[FREE] = free - needed
        self._next[pages[:-1]] = pages[1:] + 1
        self._next[pages[-1]] = 0
        crc = zlib.crc32(blob, salt)
        first = int(pages[0]) + 1
        self._rows[number] = (first, len(blob), crc, _check(number, first, len(blob), crc))
        self._header[DIRTY] = 0

    def _drop(self, numbers: np.ndarray) -> None:
        self._header[DIRTY] = 1
        free = int(self._header[FREE])
        for number in numbers:
            pages = self._chain(int(number))
            self._rows[number] = (0, 0, 0, 0)
            if pages is None:  # damaged: only a recount can tell which pages were its own
                self._recount()
                self._header[DIRTY] = 1
                free = int(self._header[FREE])
                continue
            self._free[free : free + len(pages)] = pages[::-1]
            free += len(pages)
            self._header[FREE] = free
        self._header[DIRTY] = 0

    def _chain(self, number: int) -> np.ndarray | None:
        """Returns a record's pages in order, or None if the row or the chain is damaged."""
        first, nbytes, crc, check = map(int, self._rows[number])
        if not first or check != _check(number, first, nbytes, crc):
            return None
        count = pages_of(nbytes)
        if count > self.n_pages:
            return None
        pages = np.empty(count, np.int64)
        page = first
        successors = self._next
        for index in range(count):
            if not 1 <= page <= self.n_pages:
                return None
            pages[index] = page - 1
            page = int(successors[page - 1])
        return None if page else pages

    def _read(self, number: int, salt: int) -> bytes | None:
        first, nbytes, crc, check = self._rows[number].tolist()
        if check == _check(number, first, nbytes, crc) and self._is_one_run(first, nbytes):
            found = os.pread(self._data, nbytes, (first - 1) * PAGE_BYTES)
            if len(found) == nbytes and zlib.crc32(found, salt) == crc:
                return found
        pages = self._chain(number)  # scattered, or changed while we read it
        _, nbytes, crc, _ = map(int, self._rows[number])
        if pages is None or pages_of(nbytes) != len(pages):
            return None
        blob = bytearray(len(pages) * PAGE_BYTES)
        view = memoryview(blob)
        done = 0
        for first, count in _runs(pages):
            os.preadv(self._data, [view[done : done + count * PAGE_BYTES]], first * PAGE_BYTES)
            done += count * PAGE_BYTES
        found = view[:nbytes]
        return bytes(found) if zlib.crc32(found, salt) == crc else None

    def _is_one_run(self, first: int, nbytes: int) -> bool:
        """Returns whether a record's pages are adjacent, as they are before any were dropped."""
        count = pages_of(nbytes)
        if not 1 <= first <= first + count - 1 <= self.n_pages:
            return False
        successors = self._next[first - 1 : first + count - 1].tolist()
        return successors == [*range(first + 1, first + count), 0]

    def _recount(self) -> None:
        """Clears rows that are damaged or share a page, and rebuilds the stack of free pages.

        Walks all chains at once, one page per iteration. If two records claim the same page, only
        one of them is kept. Pages that a rejected record had claimed before it was rejected are not
        really taken, so we start over until all remaining rows are good.
        """
        self._map_rows()
        rows = self._rows
        while True:
            numbers = np.flatnonzero(rows[:, FIRST])
            found = rows[numbers]
            good = found[:, CHECK] == _checks(numbers, found)
            left = -(-found[:, NBYTES].astype(np.int64) // PAGE_BYTES)
            good &= (left > 0) & (left <= self.n_pages)
            page = found[:, FIRST].astype(np.int64)
            taken = np.zeros(self.n_pages + 1, bool)
            while len(walk := np.flatnonzero(good & (left > 0))):
                at = page[walk]
                inside = (at >= 1) & (at <= self.n_pages)
                at = np.where(inside, at, 0)
                _, firsts = np.unique(at, return_index=True)
                fresh = np.zeros(len(walk), bool)
                fresh[firsts] = True
                good[walk] = inside & fresh & ~taken[at]
                taken[at] = True
                page[walk] = self._next[np.maximum(at, 1) - 1]
                left[walk] -= 1
            if good.all():
                break
            rows[numbers[~good]] = (0, 0, 0, 0)
        free = np.flatnonzero(~taken[1:])
        self._free[: len(free)] = free[::-1]
        self._header[FREE] = len(free)
        self._header[DIRTY] = 0

    def _map_rows(self) -> None:
        """Maps the rows again if another process has added some for its own data sets."""
        if _size(self._folder / "rows") > self._rows.nbytes:
            self._rows = np.frombuffer(_map(self._folder / "rows"), np.uint32).reshape(-1, 4)


def _check(number: int, first: int, nbytes: int, crc: int) -> int:
    total = (
        sum(
            part * factor
            for part, factor in zip((number, first, nbytes, crc), FACTORS, strict=True)
        )
        & WORD
    )
    return total >> 32


def _checks(numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
    parts = (numbers, rows[:, FIRST], rows[:, NBYTES], rows[:, CRC])
    total = np.zeros(len(numbers), np.uint64)
    for part, factor in zip(parts, FACTORS, strict=True):
        total += part.astype(np.uint64) * np.uint64(factor)
    return (total >> np.uint64(32)).astype(np.uint32)


def _runs(pages: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the first page and the length of each stretch of adjacent pages."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    for part in np.split(pages, breaks):
        yield int(part[0]), len(part)


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _resize(path: Path, nbytes: int) -> None:
    """Gives a file this size, and allocates all of it on the disk.

    If the disk had no room for a page of a mapped file, touching that page would kill the process
    with SIGBUS. If the disk is full, the file keeps its old size: otherwise the next process would
    find the right size, with a hole behind it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(fd).st_size
        os.ftruncate(fd, nbytes)
        if nbytes:
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError:
                os.ftruncate(fd, min(before, nbytes))
                raise
    finally:
        os.close(fd)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
