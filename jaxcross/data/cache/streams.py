"""When each record is needed next by any stream of the node: one mapped table for each stream, in a
shared folder.

A stream's owner writes its table while it advances, and all processes read it. The owner holds a
lock of the file, so that the others notice its death and take the table away.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from jaxcross.data.cache.next_use import NEVER, NextUse, Order

_log = logging.getLogger("jaxcross")

# words of 8 bytes: number of the first record, records, position, and whether the rest is complete
HEADER = 4
COMPLETE = 1
START_S = 1.0
"""How long a stream waits at its start until its order is known: long enough for a small data
set.
"""
COUNT_S = 1.0
"""How old the number of open streams may be: to look into the folder takes as long as to read a
record.
"""
SUFFIX = ".stream"


class _Table(NamedTuple):
    """A mapped file: its header and the next position of each record."""

    header: np.ndarray
    table: np.ndarray


@final
class OwnStream:
    """A stream of this process, whose next uses all processes of the node see. One thread may use
    it at a time.

    The order of a million records takes 100 s to compute. Until that is done, on a thread, the
    stream goes on, and full levels take nothing new for it.
    """

    def __init__(
        self,
        table: _Table,
        next_use: Future[NextUse],
        record_at: Callable[[int], int],
        start: int,
        withdraw: Callable[[], object],
    ) -> None:
        self._header = table.header
        self._pending = next_use
        self._next_use: NextUse | None = None
        self._record_at = record_at
        self._start = start
        self._withdraw = withdraw
        self._later: dict[int, int] = {}

    def take(self, position: int) -> int:
        """Advances to the position after this one, and returns the record at this one, counted in
        its split.
        """
        if self._next_use is None:
            patience_s = START_S if position == self._start else 0
            with suppress(TimeoutError):
                self._next_use = self._pending.result(patience_s)
                for earlier in range(self._start, position):
                    self._next_use.take(earlier)
                self._header[3] = COMPLETE
        self._header[2] = position + 1
        return (
            self._record_at(position) if self._next_use is None else self._next_use.take(position)
        )

    def lacks(self, records: Sequence[int]) -> None:
        """Marks records that were taken as needed at once, since another stream is still fetching
        them.
        """
        if self._next_use is not None:
            table = self._next_use.table
            self._later.update({record: int(table[record]) for record in records})
            table[list(records)] = self._header[2]

    def has(self, record: int) -> None:
        """Marks a record that the stream lacked as needed at its next use."""
        if self._next_use is not None and record in self._later:
            self._next_use.table[record] = self._later.pop(record)

    def close(self) -> None:
        """Withdraws the stream. Its next uses no longer count."""
        self._withdraw()


@final
class Streams:
    """The open streams of all processes that share a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tables: dict[str, _Table] = {}
        self._private: dict[str, _Table] = {}  # where no file could be written
        self._lock = threading.Lock()
        self._are_several = False
        self._counted_s = -math.inf

    def add(
        self,
        *,
        base: int,
        records: int,
        order: Order,
        record_at: Callable[[int], int],
        length: int,
        start: int = 0,
        stop: int = NEVER,
    ) -> OwnStream:
        """Announces a stream over records `base` to `base + records - 1`, with passes of `length`
        positions.
        """
        name = f"{uuid.uuid4().hex}{SUFFIX}"
        try:
            table, withdraw = self._shared(name, records)
        except OSError as error:
            _log.warning(
                f"The data cache cannot announce a stream in `{self._folder}`: {error}. Other "
                "processes will not know what this one needs next, and may drop it."
            )
            table = _Table(np.zeros(HEADER, np.int64), np.empty(records, np.int64))
            self._private[name] = table
            withdraw = partial(self._private.pop, name, None)
        table.header[:3] = base, records, start
        pool = ThreadPoolExecutor(1, thread_name_prefix="jaxcross-next-use")
        next_use = pool.submit(NextUse, table.table, order, length, start, stop)
        pool.shutdown(wait=False)
        return OwnStream(table, next_use, record_at, start, withdraw)

    def _shared(self, name: str, records: int) -> tuple[_Table, Callable[[], object]]:
        path = self._folder / name
        hidden = path.with_suffix(
            ".new"
        )  # the others would take a file that is not locked yet for a dead process's
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

        def withdraw() -> None:
            path.unlink(missing_ok=True)
            hidden.unlink(missing_ok=True)
            os.close(fd)

        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, 8 * (HEADER + records))
            table = _map(fd)
            hidden.rename(path)
            return table, withdraw
        except BaseException:
            withdraw()
            raise

    def distances(self, numbers: np.ndarray) -> np.ndarray:
        """Counts, for each record, the records that a stream takes before it comes to that one: the
        least of all.
        """
        nearest = np.full(len(numbers), NEVER, np.int64)
        for header, table in self._refreshed():
            index = numbers - header[0]
            inside = (index >= 0) & (index < len(table))
            own = np.where(inside, table[np.where(inside, index, 0)], NEVER) - header[2]
            np.minimum(nearest, own, out=nearest)
        return np.maximum(nearest, 0)

    def are_several(self) -> bool:
        """Whether more than one stream is open, or was a second ago."""
        if time.monotonic() - self._counted_s > COUNT_S:
            self._are_several = len(self._refreshed()) > 1
            self._counted_s = time.monotonic()
        return self._are_several

    def _refreshed(self) -> list[_Table]:
        with self._lock:
            names = {path.name for path in self._folder.glob(f"*{SUFFIX}")}
            for name in self._tables.keys() - names:
                del self._tables[name]
            for name in names:
                table = self._opened(self._folder / name)
                if table is not None:
                    self._tables[name] = table
                else:
                    self._tables.pop(name, None)
            every = [*self._tables.values(), *self._private.values()]
        return [each for each in every if len(each.header) == HEADER and each.header[3] == COMPLETE]

    def _opened(self, path: Path) -> _Table | None:
        """Maps a file, or removes it where its owner is dead."""
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    return None
                return self._tables.get(path.name) or _map(fd)
            finally:
                os.close(fd)
        return None


def _map(fd: int) -> _Table:
    words = np.frombuffer(mmap.mmap(fd, 0), np.int64)
    return _Table(words[:HEADER], words[HEADER:])
