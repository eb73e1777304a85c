"""One cache level: records by number, in the pages of a file that all processes of the node share.

**Problem.** Several processes read and write the same cache level at once, and any of them may be
killed at any moment. Even then, the level must not exceed its budget or return wrong bytes, and the
other processes must still be able to use it. Records have different sizes, and are dropped in any
order.

**Files.** A level is a folder with three files. The file `data` contains the records' bytes, in
pages of 4096 bytes. The file `pages` contains a header, then the number of the next page of the
same record for each page, and then a stack of free pages. The file `rows` contains a row of 16
bytes for each record: its first page, its size and its checksum, and a checksum of the row itself.

**Space.** The number of pages is fixed, so the level can't exceed its budget. A record's pages form
a linked list, so a record fits as soon as enough pages are free, wherever they are, and we never
have to move records. As long as the level hasn't dropped anything, a record's pages are adjacent,
and we can read it with a single `pread`.

**Concurrency.** Writers take the level's file lock. Readers take no lock. Instead, a reader checks
the row's checksum, reads the bytes, and compares them with the record's checksum. If one of the
checksums is wrong, another process may have replaced the record while we were reading it, so the
reader tries again while holding the lock. If the record is still wrong then, it's damaged, and we
drop it.

**Crashes.** To insert a record, we first write its bytes, to pages that are still free. If we're
killed at that point, nothing has changed. Then we change the stack of free pages, the linked list
and, last of all, the row. Meanwhile a dirty flag is set in the header. The next process that takes
the lock finds this flag, keeps all rows that are intact, and rebuilds the stack of free pages from
them. The first user of a level always does so.

**Full disks.** We access the files `pages` and `rows` through memory mappings. If the disk were
full, writing to a mapping would kill the process with SIGBUS, so we allocate the space of these
files in advance (`_resize`). The records' bytes are written with `pwrite`, which raises an ordinary
error on a full disk. The level then turns itself off.
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

# The columns of a row, 4 bytes each. Pages are counted from 1 here, and 0 means that there's none.
FIRST, NBYTES, CRC, CHECK = range(4)
ROW_BYTES = 16
HEADER = 8  # number of 8-byte words in the header, two of which are in use
DIRTY = 0  # the word that says whether a change has begun but hasn't been completed
FREE = 1  # the word that contains the number of free pages
# Odd 64-bit numbers, with which the row's checksum multiplies the parts of a row.
FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
WORD = 2**64 - 1
SMALLEST_BYTES = 16 * PAGE_BYTES


@final
class PageStore:
    """A level with a hard budget, shared by all processes that name the same folder. Thread-safe.

    Create and close it while holding a lock that all users of the level take.

    Args:
        folder: A folder for this level alone, which is created if it's missing.
        name: The level's name, for messages.
        budget_bytes: Size of the files `data` and `pages` together. The file `rows` takes another
            16 bytes per record.
        distances: Takes record numbers, and returns the number of positions until each record's
            next use.
        several_streams: Returns whether more than one stream uses the level.

    Raises:
        OSError: The folder can't be written, or its disk is full.
        ValueError: The budget is below 64 KiB, or the level is in use with a different budget.

    Attributes:
        damaged: Number of records that were dropped because their bytes didn't match their
            checksum.
        is_off: Whether writing has been turned off because a write failed. Records can still be
            read.
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
        # The file starts with a header of 8-byte words. After that, it has two arrays with one
        # 4-byte number per page. The first array says, for each page, which page of the same record
        # comes next. The second array is the stack of free pages, and is that long because all
        # pages may be free.
        words = np.frombuffer(_map(self._folder / "pages"), np.int64)
        self._header = words[:HEADER]
        tables = words[HEADER:].view(np.uint32)
        self._next = tables[: self.n_pages]
        self._free = tables[self.n_pages :]
        self._rows = np.empty((0, 4), np.uint32)
        self._map_rows()
        # The first process that uses the level can't trust its files, which may be new, or left
        # over from a machine that crashed. It sets the dirty flag, as if a process had died while
        # changing the level. `_locked` then checks the rows, and rebuilds the stack of free pages.
        if self._users.is_first:
            self._header[DIRTY] = 1
        with self._locked():
            pass

    def grow(self, records: int) -> None:
        """Extends the file `rows` so that it has a row for each record number below `records`."""
        with self._lock:
            if self._is_closed:
                return
            if _size(self._folder / "rows") < records * ROW_BYTES:
                _resize(self._folder / "rows", records * ROW_BYTES)
            self._map_rows()

    def close(self) -> None:
        """Closes the level's files. Records can't be found any more. Waits for other threads."""
        with self._lock:
            # Once the file is closed, the kernel may reuse its descriptor's number for another
            # file, and a thread that's still looking for a record would read from that file. So we
            # first remove the rows, and no thread finds a record to read any more.
            self._is_closed = True
            self._rows = np.empty((0, 4), np.uint32)
            os.close(self._data)
        self._lock.close()
        self._users.leave()

    def __contains__(self, number: int) -> bool:
        rows = self._rows  # read the attribute just once, because another thread may change it
        return number < len(rows) and bool(rows[number, FIRST])

    def get(self, number: int, salt: int = 0) -> bytes | None:
        """Returns a record's bytes, or None if the level doesn't have the record.

        If the record's checksum is wrong, drops the record. `salt` must be the same as in `put`.
        """
        if number not in self:
            return None
        try:
            blob = self._read(number, salt)
        except (OSError, IndexError):
            if not self._is_closed:
                raise
            return None
        # The checksum is wrong. Either another process has replaced the record while we were
        # reading it, or the record is damaged. To find out, we read it again while holding the
        # lock. No other process can change anything then, so if the checksum is still wrong, the
        # record is damaged.
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

        If there isn't enough space, the level drops the records whose next use is furthest away. If
        the new record's own next use is even further away, the level refuses the new record
        instead.

        If a write fails, e.g. because the disk is full, the level turns off for this process with
        one warning.

        Args:
            number: The record's number.
            blob: The record's bytes.
            salt: The seed of the record's checksum. Each data set has a different salt. So if the
                same number later belongs to a record of another data set, `get` finds that the
                checksum is wrong, and doesn't return the old record.
            exchange: Whether the record may replace records that are needed later. Otherwise it
                only replaces records that no stream is known to need.
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
                    # Without `exchange`, treat the record as if no stream needed it. It then only
                    # replaces others that no stream needs.
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
                f"since a write failed: {error}. Training continues, and reads more from slower "
                f"levels. Free some space, or pass a smaller `{self._name}_bytes`."
            )
            return False
        return True

    def put_copy(self, number: int, blob: bytes, salt: int = 0) -> bool:
        """Offers a record that a slower level also has; see `Room.offer_copy`."""
        # We don't hold the lock while we read the number of free pages, so another process may
        # change it before we write. That doesn't matter, because `put` checks it again while
        # holding the lock.
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
        """Holds the level's lock. If a process died while changing the level, repairs it first."""
        with self._lock:
            if self._header[DIRTY] and not self._is_closed:
                self._recount()
            yield

    def _residents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the numbers, distances and numbers of pages of all records in the level."""
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
        # Take the pages from the top of the stack. When the stack has been rebuilt, the lowest page
        # is at the top, so records get adjacent pages, which can be read with a single system call.
        pages = self._free[free - needed : free][::-1].astype(np.int64)
        # First write only the record's bytes. If this fails, or if the process is killed meanwhile,
        # the pages still count as free, and there's nothing to repair.
        view = memoryview(blob)
        done = 0
        for first, count in _runs(pages):
            _write(self._data, view[done : done + count * PAGE_BYTES], first * PAGE_BYTES)
            done += count * PAGE_BYTES
        # If the process is killed after this point, the dirty flag stays set, and the next process
        # repairs the level. The row is written last, because readers find the record through its
        # row, and everything else must be in place by then.
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
            # The record's pages have to be returned to the stack of free pages. If its list of
            # pages is damaged, we don't know which pages these are. In that case, we rebuild the
            # whole stack from the other records' rows.
            if pages is None:
                self._recount()
                self._header[DIRTY] = 1
                free = int(self._header[FREE])
                continue
            # In reverse order, so that the next record to take these pages gets them in order.
            self._free[free : free + len(pages)] = pages[::-1]
            free += len(pages)
            self._header[FREE] = free
        self._header[DIRTY] = 0

    def _chain(self, number: int) -> np.ndarray | None:
        """Returns a record's pages in order, or None if the row or the linked list is damaged.

        Readers don't hold the lock, so another process may be changing the list while we follow it.
        That's why every page number and every size is checked before we use it.
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
        # The fast path: if the record's pages are adjacent, a single system call reads it without
        # copying. When we gathered every record page by page instead, the CPU time per image rose
        # from 0.89 to 1.08 times that of reading a local folder (benchmarks/results/benchmarks.md).
        first, nbytes, crc, check = self._rows[number].tolist()
        if check == _check(number, first, nbytes, crc) and self._is_one_run(first, nbytes):
            found = os.pread(self._data, nbytes, (first - 1) * PAGE_BYTES)
            if len(found) == nbytes and zlib.crc32(found, salt) == crc:
                return found
        # We get here if the record's pages are scattered, or if another process has just changed
        # the record. In the second case, `_chain` and the next line may read different versions of
        # the record's row, so we check that their sizes fit together.
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
        """Whether a record's pages are adjacent, as they are until the level drops something."""
        count = pages_of(nbytes)
        if not 1 <= first <= first + count - 1 <= self.n_pages:
            return False
        successors = self._next[first - 1 : first + count - 1].tolist()
        return successors == [*range(first + 1, first + count), 0]

    def _recount(self) -> None:
        """Clears rows that are damaged or share a page, and rebuilds the stack of free pages.

        Follows the linked lists of all records at once, by one page per iteration. If two records
        claim the same page, we keep only one of them. When we reject a record, the pages that it
        claimed earlier in the walk are marked as taken, although they're free. So we start over
        without the rejected records, until a walk rejects none.
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
                # `at` is the page that each record has reached. It's 0 for a record whose list
                # leads outside of the level.
                at = page[walk]
                inside = (at >= 1) & (at <= self.n_pages)
                at = np.where(inside, at, 0)
                # A page can only belong to one record. If several records reach the same page in
                # this iteration, we give it to the first of them and reject the others. If a record
                # reached the page in an earlier iteration, we reject all of them.
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
        # Put the lowest page at the top of the stack, so that new records get adjacent pages.
        free = np.flatnonzero(~taken[1:])
        self._free[: len(free)] = free[::-1]
        self._header[FREE] = len(free)
        self._header[DIRTY] = 0

    def _map_rows(self) -> None:
        """Maps `rows` again if the file has grown, because a process has opened more data sets."""
        if _size(self._folder / "rows") > self._rows.nbytes:
            self._rows = np.frombuffer(_map(self._folder / "rows"), np.uint32).reshape(-1, 4)


def _check(number: int, first: int, nbytes: int, crc: int) -> int:
    """Returns the checksum of a row, which depends on the row's number as well."""
    total = (
        sum(
            part * factor
            for part, factor in zip((number, first, nbytes, crc), FACTORS, strict=True)
        )
        & WORD
    )
    return total >> 32


def _checks(numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the checksums of many rows at once."""
    # Unsigned integers wrap around in NumPy, so the result is the same as that of `_check`.
    parts = (numbers, rows[:, FIRST], rows[:, NBYTES], rows[:, CRC])
    total = np.zeros(len(numbers), np.uint64)
    for part, factor in zip(parts, FACTORS, strict=True):
        total += part.astype(np.uint64) * np.uint64(factor)
    return (total >> np.uint64(32)).astype(np.uint32)


def _runs(pages: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the first page and the length of each run of adjacent pages."""
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
    """Changes a file's size, and allocates all of it on the disk.

    We'll map the file into memory. If one of its pages couldn't be allocated later because the disk
    is full, writing to this page would kill the process with SIGBUS. If the disk is already full
    now, we restore the file's old size before we raise. Otherwise the next process would find a
    file of the right size, and wouldn't notice that parts of it aren't allocated.
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
