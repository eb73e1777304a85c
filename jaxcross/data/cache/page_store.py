"""One cache level: records by number, stored in pages of a file shared by the node's processes.

**Problem.** Several processes read and write the same cache level concurrently, and any of them may
be killed at any moment. Even then, the level must not exceed its budget or return corrupt data, and
it has to remain usable for everyone else. On top of that, records vary in size and are evicted in
arbitrary order.

**Files.** A level is a folder with three data files. `data` holds the records' bytes, in 4096-byte
pages. `pages` starts with a header, followed by an array that maps each page to the next page of
the same record, and a stack of free pages. `rows` has a 16-byte row per record: its first page,
size and checksum, and a checksum of the row itself. There are also two empty files, `lock` and
`users`, which only serve as file locks.

**Space.** The number of pages is fixed, so the level can't exceed its budget. A record's pages form
a linked list, which means that a record fits as soon as enough pages are free, wherever they are,
and nothing ever has to be moved. Until the level evicts something for the first time, every
record's pages are adjacent and can be read with a single `pread`.

**Concurrency.** Writers take the level's file lock; readers don't. Instead, a reader verifies the
row's checksum, reads the bytes, and compares them with the record's checksum. If either is wrong,
another process may have replaced the record under its feet, so the reader tries again with the lock
held. If the checksum is still wrong then, the record is corrupt and gets dropped.

**Crashes.** To insert a record, we first write its bytes to pages that are still free. If we're
killed at this point, nothing has changed. Then we update the stack of free pages, the links between
the record's pages and, last of all, the row, with a dirty flag set in the header throughout. If a
process finds this flag set when it takes the lock, it keeps all rows that are intact and rebuilds
the stack of free pages from them. The first user of a level always does this.

**Full disks.** `pages` and `rows` are memory-mapped, and writing to a mapping on a full disk would
kill the process with SIGBUS. So we allocate these files up front (`_resize`). The records' bytes
are written with `pwrite`, which raises an ordinary error when the disk is full. If that happens,
the process stops adding records to the level, but still reads those that are there (`is_off`).
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

# The columns of a row, 4 bytes each. `FIRST` and the array of next pages number pages from 1, and 0
# means no page. Everywhere else, pages are numbered from 0.
FIRST, NBYTES, CRC, CHECK = range(4)
ROW_BYTES = 16
HEADER = 8  # number of 8-byte words in the header, two of them in use
DIRTY = 0  # header word: a change has been started but not completed
FREE = 1  # header word: number of free pages
# Odd 64-bit multipliers for the row's checksum.
FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
WORD = 2**64 - 1
SMALLEST_BYTES = 16 * PAGE_BYTES


@final
class PageStore:
    """A level with a hard budget, shared by all processes that use the same folder. Thread-safe.

    Create and close it while holding a lock that all users of the level have in common, such as the
    `open.lock` of a `Cache`. The level's own lock doesn't protect against users that come and go.

    Args:
        folder: The level's own folder, created if it doesn't exist.
        name: The level's name, for log messages.
        budget_bytes: Maximum size of `data` and `pages` together. `rows` comes on top of that, with
            16 bytes for each record of the data sets.
        distances: Maps record numbers to distances, i.e. to the number of positions until each
            record's next use.
        several_streams: Returns whether more than one stream uses the level.

    Raises:
        OSError: The folder can't be written, or its disk is full.
        ValueError: The budget is below 64 KiB, or the level is in use with a different budget.

    Attributes:
        damaged: Number of records dropped because their bytes didn't match their checksum.
        is_off: Whether this process no longer adds records because a write has failed. Reading
            still works.
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
        self.is_off = False
        self._is_closed = False
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
        # The file has a header of 8-byte words, followed by two arrays with one 4-byte integer per
        # page. The first array maps each page to the next page of the same record. The second is
        # the stack of free pages, which has to have room for all pages.
        words = np.frombuffer(_map(self._folder / "pages"), np.int64)
        self._header = words[:HEADER]
        tables = words[HEADER:].view(np.uint32)
        self._next = tables[: self.n_pages]
        self._free = tables[self.n_pages :]
        self._rows = np.empty((0, 4), np.uint32)
        self._map_rows()
        # The first process to use the level can't trust its files: they may be new, or left over
        # from a machine that crashed. It sets the dirty flag, as if a process had died in the
        # middle of a change. That makes `_locked` check the rows and rebuild the stack of free
        # pages.
        if self._users.is_first:
            self._header[DIRTY] = 1
        with self._locked():
            pass

    def grow(self, records: int) -> None:
        """Extends `rows` to cover every record number below `records`."""
        with self._lock:
            if self._is_closed:
                return
            if _size(self._folder / "rows") < records * ROW_BYTES:
                _resize(self._folder / "rows", records * ROW_BYTES)
            self._map_rows()

    def close(self) -> None:
        """Closes the level's files, after which lookups find nothing. Waits for other threads."""
        with self._lock:
            # Lookups don't take the lock, so we remove the rows before we close the file: that way,
            # new lookups don't find anything to read. But a lookup that's in progress may already
            # have its row, and try to read from the closed descriptor. That raises an error, which
            # `get` catches. If the kernel has reused the descriptor for a different file, the read
            # succeeds, but the checksum exposes the bytes as wrong.
            self._is_closed = True
            self._rows = np.empty((0, 4), np.uint32)
            os.close(self._data)
        self._lock.close()
        self._users.leave()

    def __contains__(self, number: int) -> bool:
        rows = self._rows  # read the attribute only once; another thread may replace it
        return number < len(rows) and bool(rows[number, FIRST])

    def get(self, number: int, salt: int = 0) -> bytes | None:
        """Returns a record's bytes, or None if it's not in the level.

        Drops the record if its checksum is wrong. Pass the same `salt` as to `put`.
        """
        if number not in self:
            return None
        try:
            blob = self._read(number, salt)
        except (OSError, IndexError):
            if not self._is_closed:
                raise
            return None
        # If the checksum is wrong, either another process replaced the record while we were reading
        # it, or the record is corrupt. To find out, read it again with the lock held. Nobody else
        # can change anything then, so if the checksum is still wrong, the record is corrupt.
        if blob is None and number in self:
            with self._locked():
                if self._is_closed:
                    return None
                blob = self._read(number, salt)
                if blob is None and number in self:
                    self._drop(np.array([number]))
                    self.damaged += 1
        return blob

    def put(self, number: int, blob: bytes, salt: int = 0, *, evict_needed: bool = True) -> bool:
        """Offers a record to the level. Returns whether the level has it now.

        If the level is full, it evicts the records whose next use is furthest away, unless the new
        record's own next use is even further away. In that case, it refuses the new record.

        If a write fails, e.g. because the disk is full, this process logs a single warning and
        refuses all new records from then on.

        Args:
            number: The record's number.
            blob: The record's bytes.
            salt: Seed of the record's checksum, different for each data set. If the same number is
                later given to another data set's record, `get` finds a checksum mismatch instead of
                returning the old record.
            evict_needed: Whether the level may evict records that some stream still needs. If not,
                it only evicts records that, as far as we know, no stream needs.
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
                    # Without `evict_needed`, pretend that nobody needs the new record. That way, it
                    # can only replace records that nobody needs either.
                    distance = max(
                        int(self._distances(np.array([number]))[0]), 0 if evict_needed else UNNEEDED
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
                f"since a write failed: {error}. Training continues, and reads more from slower "
                f"levels. Free some space, or pass a smaller `{self._name}_bytes`."
            )
            return False
        return True

    def put_copy(self, number: int, blob: bytes, salt: int = 0) -> bool:
        """Offers a copy of a slower level's record; see `Room.offer_copy`."""
        # We're not holding the lock here, so another process may change the number of free pages
        # right after we've read it. That's fine, because `put` checks it again under the lock.
        if pages_of(len(blob)) <= self._header[FREE]:
            return self.put(number, blob, salt)
        return self._room.offer_copy(
            lambda evict_needed: self.put(number, blob, salt, evict_needed=evict_needed),
            several_streams=self._several_streams(),
        )

    def usage(self) -> tuple[int, int]:
        """Returns the number of records in the level and the total size of their pages in bytes."""
        free = int(self._header[FREE])
        return int(np.count_nonzero(self._rows[:, FIRST])), (self.n_pages - free) * PAGE_BYTES

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Returns a context that holds the level's lock.

        Once it has the lock, it repairs the level if a process has died in the middle of a change.
        """
        with self._lock:
            if self._header[DIRTY] and not self._is_closed:
                self._recount()
            yield

    def _residents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the number, distance and page count of each record in the level."""
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
        # Take pages from the top of the stack. After a rebuild, the lowest pages are on top, which
        # gives records adjacent pages that can be read with a single system call.
        pages = self._free[free - needed : free][::-1].astype(np.int64)
        # Write just the record's bytes for now. If this fails, or if we're killed in the process,
        # the pages still count as free and there's nothing to repair.
        view = memoryview(blob)
        done = 0
        for first, count in _runs(pages):
            _write(self._data, view[done : done + count * PAGE_BYTES], first * PAGE_BYTES)
            done += count * PAGE_BYTES
        # If we're killed from here on, the dirty flag stays set and the next process repairs the
        # level. The row comes last: it's what makes the record visible to readers, so everything
        # else must be in place by then.
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
            # We need to push the record's pages back onto the stack of free pages. If its linked
            # list is damaged, we don't know which pages these are, so rebuild the whole stack from
            # the other records' rows instead.
            if pages is None:
                self._recount()
                self._header[DIRTY] = 1
                free = int(self._header[FREE])
                continue
            # In reverse, so that the next record to take these pages gets them in ascending order.
            self._free[free : free + len(pages)] = pages[::-1]
            free += len(pages)
            self._header[FREE] = free
        self._header[DIRTY] = 0

    def _chain(self, number: int) -> np.ndarray | None:
        """Returns a record's pages in order, or None if the row or the linked list is damaged.

        Readers don't hold the lock, so the list may change while we're following it. That's why we
        check every page number and size before using it.
        """
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
        # Fast path: if the record's pages are adjacent, a single system call reads all of it, and
        # the result doesn't have to be copied. When we still gathered every record page by page,
        # the CPU time per image was 1.08 times that of reading a local folder, instead of 0.89
        # times (benchmarks/results/benchmarks.md).
        first, nbytes, crc, check = self._rows[number].tolist()
        if check == _check(number, first, nbytes, crc) and self._is_one_run(first, nbytes):
            found = os.pread(self._data, nbytes, (first - 1) * PAGE_BYTES)
            if len(found) == nbytes and zlib.crc32(found, salt) == crc:
                return found
        # Slow path: the record's pages are scattered, or another process has just changed the
        # record. In the latter case, `_chain` and the next line may see different versions of the
        # row, so we check that the sizes are consistent.
        pages = self._chain(number)
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
        """Whether a record's pages are adjacent, as they are until the first eviction."""
        count = pages_of(nbytes)
        if not 1 <= first <= first + count - 1 <= self.n_pages:
            return False
        successors = self._next[first - 1 : first + count - 1].tolist()
        return successors == [*range(first + 1, first + count), 0]

    def _recount(self) -> None:
        """Clears rows that are corrupt or share a page, and rebuilds the stack of free pages.

        Walks the linked lists of all records at once, one page per iteration. If two records claim
        the same page, only one of them survives. A rejected record may already have marked some
        pages as taken earlier in the walk, although they're actually free. So we start over without
        the rejected records until a walk doesn't reject any.
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
                # `at` is the page each record has reached, or 0 if its list has led out of bounds.
                at = page[walk]
                inside = (at >= 1) & (at <= self.n_pages)
                at = np.where(inside, at, 0)
                # A page can only belong to one record. If several records reach the same page in
                # this iteration, the first of them gets it and the others are rejected. If the page
                # was taken in an earlier iteration, all of them are rejected.
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
        # Put the lowest pages on top of the stack, so that new records get adjacent pages.
        free = np.flatnonzero(~taken[1:])
        self._free[: len(free)] = free[::-1]
        self._header[FREE] = len(free)
        self._header[DIRTY] = 0

    def _map_rows(self) -> None:
        """Remaps `rows` if the file has grown, e.g. because a process opened another data set."""
        if _size(self._folder / "rows") > self._rows.nbytes:
            self._rows = np.frombuffer(_map(self._folder / "rows"), np.uint32).reshape(-1, 4)


def _check(number: int, first: int, nbytes: int, crc: int) -> int:
    """Returns a row's checksum, which also covers the row's number."""
    total = (
        sum(
            part * factor
            for part, factor in zip((number, first, nbytes, crc), FACTORS, strict=True)
        )
        & WORD
    )
    return total >> 32


def _checks(numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
    # NumPy's unsigned integers wrap around on overflow, so the result is the same as `_check`'s.
    parts = (numbers, rows[:, FIRST], rows[:, NBYTES], rows[:, CRC])
    total = np.zeros(len(numbers), np.uint64)
    for part, factor in zip(parts, FACTORS, strict=True):
        total += part.astype(np.uint64) * np.uint64(factor)
    return (total >> np.uint64(32)).astype(np.uint32)


def _runs(pages: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the first page and length of each run of adjacent pages."""
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
    """Resizes a file and allocates all of it on disk.

    The file will be memory-mapped. If the disk filled up later and a page of the file couldn't be
    allocated, writing to that page would kill the process with SIGBUS. If the disk is full now, we
    restore the file's old size before raising. Otherwise the next process would find a file of the
    right size and never notice that parts of it aren't allocated.
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
