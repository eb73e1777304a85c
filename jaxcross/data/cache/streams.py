"""When each record is needed next by any stream on the node.

The levels are shared by all processes of a node, so a process that wants to drop a record must find
out whether another process needs it soon. For this, each stream has a file in a shared folder. The
file contains a table with the position at which the stream uses each record next. All processes map
it into their memory. The process that owns the stream updates the table as the stream advances, and
the other processes read it.

If a process is killed, the levels must not keep records for its streams forever. So a process holds
a lock on each of its files, which the kernel releases when the process dies. If a process finds a
file without a lock, it removes the file.
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

# A stream's file starts with four 8-byte numbers: the number of the split's first record, the
# number of records, the stream's position, and whether the table behind these numbers is complete.
HEADER = 4
COMPLETE = 1
START_S = 1.0
"""How long a stream waits for its order to be computed when it starts.

That's long enough for a small data set. For a large one, the stream starts without its order.
"""
COUNT_S = 1.0
"""How long we reuse the number of open streams before we count them again.

Counting means listing the folder, which takes as long as reading a record.
"""
SUFFIX = ".stream"


class _StreamFile(NamedTuple):
    """A stream's mapped file: its header, and the position at which each record is used next."""

    header: np.ndarray
    table: np.ndarray


@final
class OwnStream:
    """A stream of this process, which publishes when it needs each record. Not thread-safe.

    Computing the order in which a stream uses a million records takes 100 s. So another thread does
    it, and the stream starts without waiting for it. Until the order is known, the other processes
    can't tell which records this stream needs, so levels that are full don't accept any records for
    it.
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
        """Advances past `position`, and returns the number of the record there."""
        if self._next_use is None:
            patience_s = START_S if position == self._start else 0
            with suppress(TimeoutError):
                self._next_use = self._pending.result(patience_s)
                # If the order wasn't known until now, bring the table up to date with what has been
                # taken meanwhile.
                for earlier in range(self._start, position):
                    self._next_use.take(earlier)
                self._header[3] = COMPLETE
        self._header[2] = position + 1
        return (
            self._record_at(position) if self._next_use is None else self._next_use.take(position)
        )

    def lacks(self, records: Sequence[int]) -> None:
        """Marks records as needed right now, although they've been taken.

        If another stream on the node is already fetching a record that this stream needs, we wait
        for that stream instead of fetching the record again. Call this for such records, so that
        the levels keep them until this stream has read them.
        """
        if self._next_use is not None:
            table = self._next_use.table
            self._later.update({record: int(table[record]) for record in records})
            table[list(records)] = self._header[2]

    def has(self, record: int) -> None:
        """Undoes `lacks` for a record that has been read: it's needed at its next use again."""
        if self._next_use is not None and record in self._later:
            self._next_use.table[record] = self._later.pop(record)

    def close(self) -> None:
        """Removes the stream's file, so that the levels no longer keep records for it."""
        self._withdraw()


@final
class Streams:
    """The open streams of all processes that share a folder. Thread-safe."""

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
        """Announces a stream to all processes that share the folder.

        Args:
            base: Number of the split's first record among all records of the cache.
            records: Number of records in the split.
            order: Returns the order of the records in each pass.
            record_at: Returns the number of the record at a position.
            length: Number of positions per pass.
            start: The stream's first position.
            stop: The position after its last one.
        """
        name = f"{uuid.uuid4().hex}{SUFFIX}"
        try:
            table, withdraw = self._shared(name, records)
        except OSError as error:
            _log.warning(
                f"The data cache cannot announce a stream in `{self._folder}`: {error}. Other "
                "processes will not know what this one needs next, and may drop it."
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
        # A process that finds a stream's file without a lock assumes that its owner has died, and
        # removes it. So we create the file under a different name, lock it, and only then give it
        # its final name.
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
        """Returns, for each record, the number of positions until any stream uses it next."""
        nearest = np.full(len(numbers), NEVER, np.int64)
        for header, table in self._refreshed():
            # A stream's table covers only the records of its own split. It never uses the others.
            index = numbers - header[0]
            inside = (index >= 0) & (index < len(table))
            own = np.where(inside, table[np.where(inside, index, 0)], NEVER) - header[2]
            np.minimum(nearest, own, out=nearest)
        return np.maximum(nearest, 0)

    def are_several(self) -> bool:
        """Whether more than one stream is open on the node. The answer may be a second old."""
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
        """Returns a stream's mapped file. If its owner is dead, removes it and returns None."""
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # If we get the lock, the owner no longer holds it, so it must have died.
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
