"""Reads a stream's records ahead of time, on a separate thread.

The thread works through the stream in groups of records. It looks up the whole group in the cache's
levels first, and then fetches everything that's missing from the origin in one go, because
high-latency storage is much faster at many concurrent requests than at sequential ones. In the
meantime, the decoding threads pick up records by their position in the stream (`Feed.take`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from jaxcross.data.cache.next_use import groups

if TYPE_CHECKING:
    from jaxcross.data.cache.split import CachedSplit
    from jaxcross.data.cache.streams import OwnStream


class Arrival(NamedTuple):
    """A record that was read ahead.

    Attributes:
        record: The record's number.
        raw: The record's bytes, or None if its decoded image is in memory.
        level: The level the record was found in.
    """

    record: int
    raw: bytes | None
    level: str


@final
class Passes:
    """The order of a stream's records, pass by pass. A thread computes the next pass in advance.

    Args:
        record_at: Maps a position to a record number.
        length: Number of positions per pass.
    """

    def __init__(self, record_at: Callable[[int], int], length: int) -> None:
        self.record_at = record_at
        self._length = length
        self._closed = False
        self._passes: dict[int, Future[np.ndarray]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxcross-order")

    def __call__(self, epoch: int) -> np.ndarray:
        for old in [each for each in self._passes if each < epoch - 1]:
            del self._passes[old]
        for wanted in (epoch, epoch + 1):
            if wanted not in self._passes:
                self._passes[wanted] = self._pool.submit(self._compute, wanted)
        return self._passes[epoch].result()

    def _compute(self, epoch: int) -> np.ndarray:
        return np.fromiter(self._records(epoch), np.int64, self._length)

    def _records(self, epoch: int) -> Iterator[int]:
        for position in range(epoch * self._length, (epoch + 1) * self._length):
            if self._closed:
                raise RuntimeError(
                    "The stream of batches was closed while its order was computed. Close it only "
                    "when no more batches are needed."
                )
            yield self.record_at(position)

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


@final
class Feed:
    """The records of one stream, by position, read ahead in the order they're needed.

    Args:
        split: The split to read from.
        passes: The order of the stream's records.
        length: Number of positions per pass.
        start: The first position.
        stop: The position after the last one.
        ahead_records: Maximum number of records to buffer. They're read in groups of half that
            size.
    """

    def __init__(
        self,
        split: CachedSplit,
        passes: Passes,
        *,
        length: int,
        start: int,
        stop: int,
        ahead_records: int,
    ) -> None:
        self._split = split
        self._passes = passes
        self._length = length
        self._start = start
        self._stop = stop
        self._ahead = ahead_records
        self._arrivals: dict[int, Arrival] = {}
        # The stream has been read up to this position. An earlier position that isn't in
        # `_arrivals` any more has already been taken.
        self._read_up_to = start
        self._wanted = start  # the furthest position requested so far
        # True while the read-ahead thread is fetching from the origin, i.e. from the data set's own
        # storage. Until that's done, it can't move on to the next group, even if the cache already
        # has all of it. So if a decoding thread has to wait for a record during that time, we count
        # it as waiting for the origin, regardless of where the record turns up.
        self._fetching = False
        self._waited_s: dict[str, float] = {}
        self._error: BaseException | None = None
        self._awaited = 0  # size of the next group while the thread waits for room, otherwise 0
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # notifies threads waiting for a record
        self._room = threading.Condition(lock)  # notifies the read-ahead thread
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcross-data", daemon=True)
        self._thread.start()

    def take(self, position: int) -> Arrival:
        """Returns the record at a position, waiting for it to be read if necessary.

        Each record is only buffered until it's taken. Taking the same position twice reads it
        again.

        Raises:
            OSError: The origin can't be read.
            RuntimeError: The feed was closed.
        """
        began = time.perf_counter()
        with self._changed:
            fetching = self._fetching
            self._wanted = max(self._wanted, position)
            self._wake_thread()
            self._changed.wait_for(
                lambda: position in self._arrivals or position < self._read_up_to or self._ended
            )
            arrival = self._arrivals.pop(position, None)
            was_read = position < self._read_up_to
            self._wake_thread()
            if arrival is not None:
                level = "origin" if fetching else arrival.level
                seconds = time.perf_counter() - began
                self._waited_s[level] = self._waited_s.get(level, 0.0) + seconds
                self._split.statistics.add(level, waited_s=seconds)
                return arrival
        if self._error is not None:
            raise self._error
        if not was_read:
            raise RuntimeError(
                "The stream of batches was closed while a record was read. Close it only when no "
                "more batches are needed."
            )
        # Someone has taken this record already, so read it again in this thread.
        record = self._passes.record_at(position)
        return Arrival(record, *self._split.read(record))

    def waited_s(self) -> dict[str, float]:
        """Returns the seconds `take` has spent waiting for each level, summed over all threads."""
        with self._changed:
            return dict(self._waited_s)

    def close(self) -> None:
        """Stops reading ahead after the current read. Threads waiting in `take` raise."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            self._room.notify_all()
        self._passes.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def _ended(self) -> bool:
        return self._error is not None or self._closed.is_set()

    def _run(self) -> None:
        try:
            stream = self._split.announce(
                self._passes, length=self._length, start=self._start, stop=self._stop
            )
            try:
                for group in groups(
                    self._start, self._stop, self._length, max(1, self._ahead // 2)
                ):
                    if not self._has_room(len(group)):
                        return
                    self._read_group(stream, group)
            finally:
                stream.close()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        """Waits until we can read the next group. Returns False if the feed has ended.

        Normally, we can read the next group of records once it fits into `ahead_records` along with
        the records that haven't been taken yet. But if a thread is already waiting for a record
        beyond what we've read, we go ahead regardless, because that thread would otherwise wait
        forever.
        """
        with self._changed:
            self._awaited = count
            self._room.wait_for(lambda: self._may_read)
            self._awaited = 0
            return not self._ended

    @property
    def _may_read(self) -> bool:
        return (
            len(self._arrivals) + self._awaited <= self._ahead
            or self._wanted >= self._read_up_to
            or self._ended
        )

    def _wake_thread(self) -> None:
        """Wakes up the read-ahead thread if it's waiting for room and now has it.

        Waking up a thread is about as expensive as reading a record, so we can't afford it on every
        `take`. When we tried, the CPU time per image went from 0.89 to 1.02 times that of reading a
        local folder without a cache (benchmarks/results/benchmarks.md).
        """
        if self._awaited and self._may_read:
            self._room.notify_all()

    def _read_group(self, stream: OwnStream, group: range) -> None:
        missing: dict[int, int] = {}  # maps records that aren't in any level to their positions
        # Look up the whole group in the cache first, delivering what's there. After that, we know
        # everything that's missing and can fetch it from the origin in one go.
        for position in group:
            record = stream.take(position)
            if self._split.has_image(record):
                self._deliver(position, Arrival(record, None, "images"))
                continue
            found = self._split.find(record)
            if found:
                self._deliver(position, Arrival(record, *found))
            else:
                missing[record] = position
        with self._changed:
            self._fetching = bool(missing)
        for record, raw, level in self._split.fetch(list(missing), stream, self._closed):
            self._deliver(missing[record], Arrival(record, raw, level))
        with self._changed:
            self._fetching = False
            self._read_up_to = group.stop
            self._changed.notify_all()

    def _deliver(self, position: int, arrival: Arrival) -> None:
        with self._changed:
            self._arrivals[position] = arrival
            self._changed.notify_all()


@final
class Feeds:
    """Keeps track of a cache's feeds and ends them when the cache is closed.

    A feed reads from the cache's files on its own thread. If a feed could start while another
    thread is closing the cache, it might read from file descriptors that are already closed, or
    that the kernel has reused for other files. That's why we hold a lock to start a feed; once
    `close` has taken that lock, no new feed can start.

    Args:
        stop: Set when the cache is closed.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._lock = threading.Lock()
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self._stop = stop

    def add(self, start: Callable[[], Feed]) -> Feed:
        """Starts a feed.

        Raises:
            RuntimeError: The cache was closed.
        """
        with self._lock:
            if self._stop.is_set():
                raise RuntimeError(
                    "The data cache was closed, so no further stream of batches can begin in it. "
                    "Open a `Cache` again, or close it after the last stream."
                )
            feed = start()
            self._feeds.add(feed)
        return feed

    def close(self) -> bool:
        """Ends all feeds after their current reads. Returns False if it was called before."""
        with self._lock:
            if self._stop.is_set():
                return False
            self._stop.set()
            feeds = list(self._feeds)
        for feed in feeds:
            feed.close()
        return True
