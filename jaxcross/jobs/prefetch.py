"""Prepares a job's batches ahead of time, in a separate thread.

The tricky part is that all ranks have to end a loop at the same step. A rank that made an extra
step would wait forever in an exchange that the others never enter. But a rank only knows about its
own data, while another rank's data may be shorter or raise an error. The prefetcher therefore tells
the driver about each batch that's ready and about the end of the data, and the ranks share this
information in their votes. A call to `next` waits for the ranks to agree that either all of them
have another batch, or the loop is over.

The prefetcher also keeps track of the position in the data after each batch. It's saved in
checkpoints, so that a new iterator can pick up from there after a restart.
"""

from __future__ import annotations

import base64
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax
import numpy as np

from jaxcross._pytree import PyTree, arrays_by_buffer
from jaxcross.runtime import Driver, JobRecord

_ALIGNMENT = 64
_END = object()
_log = logging.getLogger("jaxcross")


@runtime_checkable
class Positioned(Protocol):
    """An iterator that can save and restore its position, such as Grain's."""

    def get_state(self) -> object: ...
    def set_state(self, state: object) -> None: ...


@dataclass(frozen=True, slots=True)
class DataPosition:
    """A position in a rank's data.

    Attributes:
        n_batches: The number of batches before this position, the same on every rank.
        state: The iterator's own state as text. None if it doesn't have any, or if it can't be
            represented in JSON.
    """

    n_batches: int = 0
    state: str | None = None


START = DataPosition()


def iterator_state(source: Iterator[object]) -> str | None:
    """Returns the iterator's state as text, or None if it doesn't survive a JSON round trip."""
    if not isinstance(source, Positioned):
        return None
    state = source.get_state()
    if isinstance(state, bytes):
        return json.dumps({"bytes": base64.b64encode(state).decode()})
    try:
        text = json.dumps({"value": state})
        return text if json.loads(text)["value"] == state else None
    except (TypeError, ValueError):
        return None


def seek(
    position: DataPosition, source: Iterator[object], on_drop: Callable[[], None] = lambda: None
) -> None:
    """Advances a new iterator to `position`.

    This is fast if the iterator has a `set_state` method. Otherwise, it reads all batches before
    the position and drops them.

    Args:
        position: The target position.
        source: A new iterator.
        on_drop: Called after each dropped batch.

    Raises:
        ValueError: `position.state` wasn't written by `iterator_state`.
        Exception: Any error raised by the iterator.
    """
    if position.state is None or not isinstance(source, Positioned):
        for _ in range(position.n_batches):
            if next(source, _END) is _END:
                return
            on_drop()
        return
    state = json.loads(position.state)
    if not isinstance(state, dict) or set(state) not in ({"bytes"}, {"value"}):
        raise ValueError(
            "the position in the data that a checkpoint holds must be a dict with the key `bytes` "
            "or `value`, got something else. Restore an older checkpoint, or name another directory"
        )
    source.set_state(base64.b64decode(state["bytes"]) if "bytes" in state else state["value"])


@runtime_checkable
class Closable(Protocol):
    """An iterator that can be closed before it's exhausted, e.g. a generator."""

    def close(self) -> None: ...


@runtime_checkable
class Waiting(Protocol):
    """An iterator that measures how long it waits for storage, such as that of `jaxcross.data`.

    `waited_s` returns the total seconds so far for each level of storage, summed over the
    iterator's threads.
    """

    def waited_s(self) -> Mapping[str, float]: ...


@final
class _Storage:
    """Determines, for each batch, which level of storage its iterator had to wait for."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source if isinstance(source, Waiting) else None
        self._before: Mapping[str, float] = {}
        self._before_s = time.monotonic()

    def slowest(self) -> str:
        """Returns the level of storage with the longest wait since the last call.

        Returns "" if that wait accounts for less than half of the time since then.
        """
        if self._source is None:
            return ""
        now = self._source.waited_s()
        now_s = time.monotonic()
        waits = {level: seconds - self._before.get(level, 0.0) for level, seconds in now.items()}
        passed_s = now_s - self._before_s
        self._before = now
        self._before_s = now_s
        level = max(waits, key=lambda each: waits[each], default="")
        return level if level and waits[level] >= passed_s / 2 else ""


class Prefetcher(Iterator[Any]):
    """An iterator over `data` that ends after the same number of batches on all ranks.

    `next` only returns a batch if every rank has one; as soon as one rank has none, the loop ends
    on all ranks. This requires the ranks to exchange messages, but they do so while earlier steps
    are still running, so `next` rarely blocks for long.

    Args:
        driver: Takes part in votes with the other ranks.
        job: The job's record.
        stream: This iterator's number within the job. All ranks must open a job's iterators in the
            same order for the numbers to match up.
        open_streams: The numbers of the job's earlier iterators that are still open.
        data: This rank's batches.
        steps: How many batches to return at most; None for no limit.
        prepare: Called on each batch in the prefetcher's thread, e.g. to transfer it to the device.
        buffer_size: The maximum number of batches to read ahead.
        start: The position to start from. The batches before it count towards `steps`.
        resumable: Whether to record the iterator's own state after each batch, for checkpoints.

    Attributes:
        stream: As above.
        position: The position after the last batch that was returned, not counting batches that
            have been read ahead.
        storage: The level of storage that the last batch had to wait for; "" if it didn't wait, or
            if that's unknown.
        closed: Whether the iterator was closed, i.e. no more batches will be requested.
        first_batch: The buffers of the first batch; empty until that's been read.
        left_over: Whether this rank still had a batch when the loop ended because another rank had
            none.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        job: JobRecord,
        stream: int,
        open_streams: Sequence[int] = (),
        data: Iterable[Any],
        steps: int | None = None,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        buffer_size: int = 2,
        start: DataPosition = START,
        resumable: bool = False,
    ) -> None:
        self._driver = driver
        self._job = job
        self.stream = stream
        self._data: Iterable[Any] | None = data
        self._steps = None if steps is None else max(0, steps - start.n_batches)
        self._prepare = prepare
        self.position = start
        self._resumable = resumable
        self._buffer_size = buffer_size
        self._batch_bytes = 0
        self.first_batch: frozenset[Hashable] = frozenset()
        # If the user abandons a loop, Python's garbage collector finalizes the loop's generator,
        # which calls `close`. That can happen at any allocation in any thread, even while the
        # thread is holding our lock, so the lock must be reentrant. For the same reason, we can't
        # use a semaphore, since its internal lock isn't reentrant. Use a `SimpleQueue` with one
        # token per free slot instead, because its `put` is safe to call from the garbage collector.
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(buffer_size):
            self._free.put(None)
        self._batches: deque[tuple[Any, str | None, str]] = deque()
        self.storage = ""
        self._taken = 0  # batches handed out since `start`
        self.left_over = False
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._waiting = False  # whether `next` is waiting for a batch, or about to
        self.closed = False
        self._x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # may be set only in the job's thread
        self._thread = threading.Thread(
            target=self._run, name=f"jaxcross-feed-{job.number}.{stream}", daemon=True
        )
        driver.stream_begun(job, open_streams)
        self._thread.start()

    @property
    def batches_left(self) -> int | None:
        """How many batches remain until `steps`, including the latest; None if there's no limit."""
        return None if self._steps is None else self._steps - self._taken + (self._taken > 0)

    @property
    def ahead_bytes(self) -> int:
        """The total bytes of the batches that are read ahead, estimated from the first batch."""
        return 0 if self.closed else self._buffer_size * self._batch_bytes

    def __next__(self) -> Any:
        with self._lock:
            if self._error is not None and not self._batches:
                raise self._error
            self._waiting = True
        more = self._driver.want_batch(self._job, self.stream, self._taken)
        with self._lock:
            self._waiting = False
        if not more:
            self.left_over = bool(self._batches)
            self.close()
            raise StopIteration
        self._taken += 1
        batch, state, self.storage = self._batches.popleft()
        self.position = DataPosition(self.position.n_batches + 1, state)
        self._free.put(None)
        return batch

    def close(self) -> None:
        """Ends the thread, without waiting for it: it may be stuck in the user's iterator."""
        with self._lock:
            self.closed = True
            batches = self._batches
            self._batches = deque()
        batches.clear()  # without the lock, as this may run the user's destructors
        self._free.put(None)

    def _run(self) -> None:
        with jax.enable_x64(self._x64):
            self._fill()

    def _fill(self) -> None:
        data, self._data = self._data, None  # so that the data is freed once the loop is closed
        assert data is not None
        count = 0
        try:
            source = iter(data)
            storage = _Storage(source)
            if self._steps != 0:
                seek(self.position, source, lambda: self._driver.batch_dropped(self._job))
            while self._steps is None or count < self._steps:
                self._free.get()
                if self.closed:
                    break
                try:
                    batch = next(source)
                except StopIteration:
                    break
                level = storage.slowest()
                prepared = self._prepare(batch)
                if count == 0:
                    arrays = arrays_by_buffer(prepared)
                    self.first_batch = frozenset(arrays)
                    self._batch_bytes = sum(array.nbytes for array in arrays.values())
                    del arrays
                ready = prepared, iterator_state(source) if self._resumable else None, level
                with self._lock:
                    if not self.closed:
                        self._batches.append(ready)
                del batch, prepared, ready
                count += 1
                self._driver.batches_ready(self._job, self.stream, count)
            if not self.closed:
                self._driver.stream_ended(self._job, self.stream, count)
            while not self.closed:
                self._free.get()
            if self._steps is None or self._taken < self._steps:
                close_unread(source)
        except BaseException as error:
            error.add_note("raised by the data given to job.batches")
            with self._lock:
                self._error = error
                waiting = self._waiting and not self._batches
            # If the job is waiting for this very batch inside `next`, report the failure to the
            # driver, because it takes a vote to end that wait. Otherwise, the job still has earlier
            # batches to train on, and `next` raises the error after those.
            if waiting:
                self._driver.job_raised(self._job, error, f"after batch {count}")


def close_unread(source: Iterator[Any]) -> None:
    """Closes an iterator that isn't exhausted, to release its files and threads."""
    if isinstance(source, Closable):
        try:
            source.close()
        except Exception:  # the job no longer needs the iterator
            _log.exception(
                "`close()` of the data given to job.batches raised an exception, which is ignored "
                "because the job needs no more batches"
            )


def number_of_batches(data: Iterable[Any], steps: int | None) -> int | None:
    """Returns the maximum number of batches in a loop, or None if it's unknown.

    The loop ends earlier if another rank has less data.
    """
    length = None
    if isinstance(data, Sized):
        with suppress(Exception):  # some classes define `__len__` but raise
            length = len(data)
    return min((n for n in (length, steps) if n is not None), default=None)


def to_device(batch: PyTree) -> PyTree:
    """Transfers a batch's NumPy arrays to the device. It's safe to modify them afterwards."""
    return jax.tree.map(
        lambda x: jax.device_put(_own(x)) if isinstance(x, np.ndarray | np.generic) else x, batch
    )


def _own(array: np.ndarray | np.generic) -> np.ndarray | np.generic:
    """Returns a copy of `array`, or the array itself if it's read-only.

    `device_put` may return before it has read the array, and on CPUs, JAX may even use the array's
    memory directly. Without a copy, an iterator that reuses its array for the next batch would
    overwrite a batch that's still in use.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject or read_only(array):
        return array
    # Align the copy, which allows the CPU backend to use its memory directly instead of copying it
    # once more.
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    own = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


def read_only(array: np.ndarray) -> bool:
    """Whether both `array` and the memory that it views are read-only."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return owner is None or isinstance(owner, bytes)
