"""When each record is needed next by any stream on the node.

Each stream has one file in a shared folder: a memory-mapped table with the position at which the
stream uses each record next. The stream's owner updates the table as it advances, and all processes
read it. The owner also holds a lock on the file for as long as it lives, so the other processes
notice its death, and remove the table.
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

# 8-byte words: number of the first record, records, position, and whether the table is complete
HEADER = 4
COMPLETE = 1
START_S = 1.0
"""How long a stream waits at its start until its order is known. Enough for a small data set."""
COUNT_S = 1.0
"""How long we reuse the count of open streams: listing the folder takes as long as reading a
record.
"""
SUFFIX = ".stream"


class _StreamFile(NamedTuple):
    """A mapped file: its header, and the next position of each record."""

    header: np.ndarray
    table: np.ndarray


@final
class OwnStream:
    """A stream of this process. All processes of the node can read its next uses. Not thread-safe.

    Computing the order of a million records takes 100 s, so it's done on another thread. Until it
    has finished, the stream continues without it, and full levels accept no new records for it.
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
        """Advances past `position`, and returns the record there by its number in the split."""
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
        """Marks taken records as needed at once, because another stream is still fetching them.

        The levels then keep them until this stream has read them.
        """
        if self._next_use is not None:
            table = self._next_use.table
            self._later.update({record: int(table[record]) for record in records})
            table[list(records)] = self._header[2]

    def has(self, record: int) -> None:
        """Marks a record that this stream lacked as needed at its regular next use again."""
        if self._next_use is not None and record in self._later:
            self._next_use.table[record] = self._later.pop(record)

    def close(self) -> None:
        """Withdraws the stream, so its next uses no longer count."""
        self._withdraw()


@final
class Streams:
    """The open streams of all processes that share a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tables: dict[str, _StreamFile] = {}
        self._private: dict[str, _StreamFile] = {}  # streams for which we couldn't write a file
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
        """Announces a stream over records from `base` on, in passes of `length` positions."""
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
        # The file gets its final name only once it's locked. Other processes would take an unlocked
        # one for a dead process's stream, and remove it.
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
        """Returns how many positions away each record's next use by any stream is."""
        nearest = np.full(len(numbers), NEVER, np.int64)
        for header, table in self._refreshed():
            index = numbers - header[0]
            inside = (index >= 0) & (index < len(table))
            own = np.where(inside, table[np.where(inside, index, 0)], NEVER) - header[2]
            np.minimum(nearest, own, out=nearest)
        return np.maximum(nearest, 0)

    def are_several(self) -> bool:
        """Returns whether more than one stream is open. The answer may be a second old."""
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
        """Maps a file, or removes it if its owner is dead."""
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


def _map(fd: int) -> _StreamFile:
    words = np.frombuffer(mmap.mmap(fd, 0), np.int64)
    return _StreamFile(words[:HEADER], words[HEADER:])
