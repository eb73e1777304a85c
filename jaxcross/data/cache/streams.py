"""Keeps track of when each record is needed next by any stream on the node.

The levels are shared by all processes on a node, so before a process evicts a record, it has to
find out whether another process needs it soon. For this, each stream has a file in a shared folder,
with a table of the position where it uses each record next. Every process maps these files into
memory. The stream's owner updates its table as the stream advances; everyone else just reads it.

If a process gets killed, the levels must not go on keeping records for its streams forever. So each
process holds a lock on its files, which the kernel releases when the process dies. Whoever finds a
file without a lock removes it.
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

# Each stream's file starts with four 8-byte integers: the number of the split's first record, the
# number of records, the stream's position, and whether the table that follows is complete.
HEADER = 4
COMPLETE = 1
START_S = 1.0
"""How long to wait for the order to be computed when a stream starts.

That's enough for a small data set. With a large data set, the stream starts without its order.
"""
COUNT_S = 1.0
"""How long to reuse the number of open streams before counting them again.

Counting means listing the folder, which is as expensive as reading a record.
"""
SUFFIX = ".stream"


class _StreamFile(NamedTuple):
    """A memory-mapped stream file: its header, and the position of each record's next use."""

    header: np.ndarray
    table: np.ndarray


@final
class OwnStream:
    """One of this process's streams, publishing when it needs each record. Not thread-safe.

    Working out the order of a million records takes 100 s, so we leave that to another thread and
    start the stream right away. Until the order is known, other processes can't tell which records
    this stream needs, so levels that are full won't accept any records on its behalf.
    """

    def __init__(
        self,
        table: _StreamFile,
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
        """Advances past `position` and returns the number of the record there."""
        if self._next_use is None:
            patience_s = START_S if position == self._start else 0
            with suppress(TimeoutError):
                self._next_use = self._pending.result(patience_s)
                # The order has only just become known, so update the table with everything that has
                # been taken in the meantime.
                for earlier in range(self._start, position):
                    self._next_use.take(earlier)
                self._header[3] = COMPLETE
        self._header[2] = position + 1
        return (
            self._record_at(position) if self._next_use is None else self._next_use.take(position)
        )

    def lacks(self, records: Sequence[int]) -> None:
        """Marks records as needed right now, even though they've been taken.

        When another stream on the node is already fetching a record we need, we wait for it instead
        of fetching the record a second time. Calling this makes the levels hold on to such records
        until we've read them.
        """
        if self._next_use is not None:
            table = self._next_use.table
            self._later.update({record: int(table[record]) for record in records})
            table[list(records)] = self._header[2]

    def has(self, record: int) -> None:
        """Undoes `lacks` for a record that has been read, restoring its regular next use."""
        if self._next_use is not None and record in self._later:
            self._next_use.table[record] = self._later.pop(record)

    def close(self) -> None:
        """Removes the stream's file; from then on, the levels don't keep records for it."""
        self._withdraw()


@final
class Streams:
    """All open streams of the processes sharing a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tables: dict[str, _StreamFile] = {}
        self._private: dict[str, _StreamFile] = {}  # own streams whose file couldn't be written
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
        """Announces a stream to all processes sharing the folder.

        Args:
            base: Number of the split's first record within the cache.
            records: Number of records in the split.
            order: Returns the order of the records in each pass.
            record_at: Maps a position to a record number.
            length: Number of positions per pass.
            start: The stream's first position.
            stop: The position after the stream's last one.
        """
        name = f"{uuid.uuid4().hex}{SUFFIX}"
        try:
            table, withdraw = self._shared(name, records)
        except OSError as error:
            _log.warning(
                f"The data cache cannot announce a stream in `{self._folder}`: {error}. So "
                "other processes don't know which records this one needs next, and may drop them. "
                "Training continues, but may read more from slower levels. Make sure that the "
                "folder can be written and has enough space, and start again."
            )
            table = _StreamFile(np.zeros(HEADER, np.int64), np.empty(records, np.int64))
            self._private[name] = table
            withdraw = partial(self._private.pop, name, None)
        table.header[:3] = base, records, start
        pool = ThreadPoolExecutor(1, thread_name_prefix="jaxcross-next-use")
        next_use = pool.submit(NextUse, table.table, order, length, start, stop)
        pool.shutdown(wait=False)
        return OwnStream(table, next_use, record_at, start, withdraw)

    def _shared(self, name: str, records: int) -> tuple[_StreamFile, Callable[[], object]]:
        path = self._folder / name
        # Anyone who finds a stream file without a lock assumes that its owner is dead and removes
        # it. So we create the file under a different name, lock it, and only then rename it.
        hidden = path.with_suffix(".new")
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
        """Returns the number of positions until any stream next uses each record."""
        nearest = np.full(len(numbers), NEVER, np.int64)
        for header, table in self._refreshed():
            # A stream's table only covers its own split; it never uses any other records.
            index = numbers - header[0]
            inside = (index >= 0) & (index < len(table))
            own = np.where(inside, table[np.where(inside, index, 0)], NEVER) - header[2]
            np.minimum(nearest, own, out=nearest)
        return np.maximum(nearest, 0)

    def are_several(self) -> bool:
        """Whether more than one stream is open on the node. May be up to a second out of date."""
        if time.monotonic() - self._counted_s > COUNT_S:
            self._are_several = len(self._refreshed()) > 1
            self._counted_s = time.monotonic()
        return self._are_several

    def _refreshed(self) -> list[_StreamFile]:
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

    def _opened(self, path: Path) -> _StreamFile | None:
        """Maps a stream's file. If its owner is dead, removes the file and returns None."""
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # If we can get the lock, the owner isn't holding it any more, so it must have died.
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    return None
                return self._tables.get(path.name) or _map(fd)
            finally:
                os.close(fd)
        return None


def _map(fd: int) -> _StreamFile:
    words = np.frombuffer(mmap.mmap(fd, 0), np.int64)
    return _StreamFile(words[:HEADER], words[HEADER:])
