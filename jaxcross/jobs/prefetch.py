"""Prepares a job's batches ahead of time, in a separate thread.

The difficulty is that all ranks must end a loop at the same step: if one rank made another step, it
would wait forever in an exchange that the other ranks never enter. But a rank only knows its own
data. The data of another rank may be shorter, or may raise an error. So whenever a batch is ready,
or the data has ended, the prefetcher reports this to the driver, and the ranks share these reports
in their votes. A call of `next` waits until the ranks have agreed either that every rank has
another batch, or that the loop ends.

The prefetcher also records the position in the data after each batch. Checkpoints contain this
position, so that after a restart, a new iterator can continue with the batch that comes next.
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
    """An iterator that can save and restore its position, e.g. one of Grain."""

    def get_state(self) -> object: ...
    def set_state(self, state: object) -> None: ...


@dataclass(frozen=True, slots=True)
class DataPosition:
    """A position in a rank's data.

    Attributes:
        n_batches: The number of batches before this position, the same on every rank.
        state: The iterator's own state as text. None if it has no state, or one that JSON can't
            represent.
    """

    n_batches: int = 0
    state: str | None = None


START = DataPosition()


def iterator_state(source: Iterator[object]) -> str | None:
    """Returns the iterator's state as text, or None if it can't be converted to JSON and back."""
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
    """Brings a new iterator to `position`.

    If the iterator has a `set_state` method, this is fast. Otherwise, all batches before the
    position are read and dropped.

    Args:
        position: The target position.
        source: A new iterator.
        on_drop: Called after each batch that was dropped.

    Raises:
        ValueError: `position.state` wasn't written by `iterator_state`.
        Exception: Any error that the iterator raises.
    """
    if position.state is None or not isinstance(source, Positioned):
        for _ in range(position.n_batches):
            if next(source, _END) is _END:
                return
            on_drop()
        return
    state = json.loads(position.state)
    if not isinstance(state, dict) or set(state) not in ({"bytes"}, {"value"}):
        raise ValueError("the position in the data that a checkpoint holds cannot be understood")
    source.set_state(base64.b64decode(state["bytes"]) if "bytes" in state else state["value"])


@runtime_checkable
class Closable(Protocol):
    """An iterator that can be closed before it's exhausted, e.g. a generator."""

    def close(self) -> None: ...


@runtime_checkable
class Waiting(Protocol):
    """An iterator that measures how long it waits for storage, e.g. that of `jaxcross.data`.

    The method `waited_s` returns the total seconds so far for each level of storage, summed over
    the iterator's threads.
    """

    def waited_s(self) -> Mapping[str, float]: ...


@final
class _Storage:
    """Finds out, for each batch, for which level of storage its iterator had to wait."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source if isinstance(source, Waiting) else None
        self._before: Mapping[str, float] = {}
        self._before_s = time.monotonic()

    def slowest(self) -> str:
        """Returns the level with the longest wait since the last call.

        Returns "" if that wait took less than half of the time since then.
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

    A call of `next` returns a batch only once every rank has its next batch, or ends the loop on
    all ranks if one rank has none. To find out, the ranks exchange messages. They do this while
    earlier steps are still running, so `next` rarely blocks for long.

    Args:
        driver: Takes part in the votes with the other ranks.
        job: The job's record.
        stream: This iterator's number within the job. All ranks must open a job's iterators in the
            same order, so that the numbers match up.
        open_streams: The numbers of the job's earlier iterators that are still open.
        data: This rank's batches.
        steps: The number of batches after which to end; None if there's no such limit.
        prepare: Called on each batch in the prefetcher's thread, e.g. to put it on the device.
        buffer_size: The maximum number of batches that are read ahead.
        start: The position at which to begin. `steps` includes the batches before it.
        resumable: Whether to record the iterator's own state after each batch, for checkpoints.

    Attributes:
        stream: As above.
        position: The position after the last batch that was returned. Batches that have been read
            ahead don't count.
        storage: The level of storage for which the last batch had to wait; "" if it didn't wait, or
            if that's unknown.
        closed: Whether the iterator was closed, so that no more batches will be requested.
        first_batch: The buffers of the first batch; empty until that batch has been read.
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
        # If the user abandons a loop, Python's garbage collector finishes the loop's generator,
        # which calls `close`. That can happen at any allocation in any thread, even while that
        # thread holds our lock. So the lock must be reentrant, and instead of a semaphore, whose
        # own lock isn't reentrant, we use a `SimpleQueue` with one token per free slot. Its `put`
        # is safe to call from the garbage collector.
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(buffer_size):
            self._free.put(None)
        self._batches: deque[tuple[Any, str | None, str]] = deque()
        self.storage = ""
        self._taken = 0  # batches handed out since `start`
        self.left_over = False
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._waiting = False  # whether `next` waits for a batch, or is about to
        self.closed = False
        self._x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # may be set only in the job's thread
        self._thread = threading.Thread(
            target=self._run, name=f"jaxcross-feed-{job.number}.{stream}", daemon=True
        )
        driver.stream_begun(job, open_streams)
        self._thread.start()

    @property
    def batches_left(self) -> int | None:
        """How many batches remain until `steps`, including the latest one; None without `steps`."""
        return None if self._steps is None else self._steps - self._taken + (self._taken > 0)

    @property
    def ahead_bytes(self) -> int:
        """The bytes of the batches that are read ahead, judging by the first one."""
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
        """Ends the thread. Doesn't wait for it, because it may be stuck in the user's iterator."""
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
            # How the error is reported depends on whether the job is waiting for this batch at the
            # moment. If it is, it waits inside of `next` for a vote, so only a vote can end the
            # wait: we report the failure to the driver. Otherwise, the job still has earlier
            # batches to train on, and `next` raises the error after those.
            if waiting:
                self._driver.job_raised(self._job, error, f"after batch {count}")


def close_unread(source: Iterator[Any]) -> None:
    """Closes an iterator that isn't exhausted, so that it releases its files and threads."""
    if isinstance(source, Closable):
        try:
            source.close()
        except Exception:  # the job no longer needs the iterator
            _log.exception("`close()` of the data given to job.batches raised")


def number_of_batches(data: Iterable[Any], steps: int | None) -> int | None:
    """Returns the maximum number of batches in a loop, or None if it's unknown.

    If another rank has less data, the loop ends earlier.
    """
    length = None
    if isinstance(data, Sized):
        with suppress(Exception):  # some classes define `__len__` but raise
            length = len(data)
    return min((n for n in (length, steps) if n is not None), default=None)


def to_device(batch: PyTree) -> PyTree:
    """Puts a batch's NumPy arrays on the device. Later changes to the arrays don't affect them."""
    return jax.tree.map(
        lambda x: jax.device_put(_own(x)) if isinstance(x, np.ndarray | np.generic) else x, batch
    )


def _own(array: np.ndarray | np.generic) -> np.ndarray | np.generic:
    """Returns a copy of `array`, or the array itself if it's read-only.

    We need a copy because `device_put` may return before it has read the array. On CPUs, JAX may
    even use the array's memory directly. If the user's iterator reuses its array for the next
    batch, it would therefore overwrite a batch that's still in use.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject or read_only(array):
        return array
    # Align the copy. The CPU backend then uses its memory directly; it would copy unaligned memory
    # a second time.
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    own = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


def read_only(array: np.ndarray) -> bool:
    """Whether neither `array` nor the memory that it views can be written to."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return owner is None or isinstance(owner, bytes)
