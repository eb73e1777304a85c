"""Prepares a job's batches ahead of time, in a thread alongside both lanes.

All ranks must end a loop at the same step, or some ranks would wait forever for an exchange that
the others never enter. But each rank only knows its own data, which may be shorter, and may raise.
So a prefetcher reports each batch that's ready and the end of its data to the driver, and `next`
requests the next batch from the driver, which returns once the ranks have agreed that there's one
everywhere, or that the loop ends.

Each batch comes with the position in the data after it, so that a restart can bring a new iterator
to that position.
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
    """An iterator that can save and restore its position, e.g. Grain's or `jaxcross.data`'s."""

    def get_state(self) -> object: ...
    def set_state(self, state: object) -> None: ...


@dataclass(frozen=True, slots=True)
class DataPosition:
    """A position in a rank's data.

    Attributes:
        n_batches: The number of batches before it, the same on every rank.
        state: The iterator's own state as text, or None if it doesn't have one that JSON can
            represent.
    """

    n_batches: int = 0
    state: str | None = None


START = DataPosition()


def iterator_state(source: Iterator[object]) -> str | None:
    """Returns the state of `source` as text, or None without one that survives JSON unchanged."""
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

    If possible, this uses the iterator's own `set_state`. Otherwise, it reads and drops the batches
    before the position.

    Args:
        position: The target.
        source: The iterator.
        on_drop: Called after each dropped batch.

    Raises:
        ValueError: `position.state` wasn't written by `iterator_state`.
        Exception: Whatever the iterator raises.
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
    """An iterator that can be closed before its end, as generators can."""

    def close(self) -> None: ...


@runtime_checkable
class Waiting(Protocol):
    """An iterator that counts how long it waits for storage, e.g. `jaxcross.data`'s.

    `waited_s` returns the seconds so far, summed over all of its threads, by level of storage.
    """

    def waited_s(self) -> Mapping[str, float]: ...


@final
class _Storage:
    """Finds out which level of storage holds up an iterator, batch by batch."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source if isinstance(source, Waiting) else None
        self._before: Mapping[str, float] = {}
        self._before_s = time.monotonic()

    def slowest(self) -> str:
        """Returns the level that was waited for during half of the time since the last call.

        "" if there's no such level.
        """
        if self._source is None:
            return ""
        now, now_s = self._source.waited_s(), time.monotonic()
        waits = {level: seconds - self._before.get(level, 0.0) for level, seconds in now.items()}
        passed_s, self._before, self._before_s = now_s - self._before_s, now, now_s
        level = max(waits, key=lambda each: waits[each], default="")
        return level if level and waits[level] >= passed_s / 2 else ""


class Prefetcher(Iterator[Any]):
    """An iterator over `data`. All ranks agree on each of its batches, and on its end.

    `next` waits until every rank has its batch. The ranks vote on that while earlier steps run, so
    it rarely blocks.

    Args:
        driver: Votes with the other ranks.
        job: The job's record.
        stream: The number of this iterator in the job. The job must open its iterators in the same
            order on all ranks.
        open_streams: The job's earlier iterators that it may still read.
        data: This rank's batches.
        steps: The number of batches after which to end, if given.
        prepare: Called on each batch in the prefetcher's thread, e.g. to put it on the device.
        buffer_size: How many batches may be ready before they're requested.
        start: The position to begin at. `steps` includes the batches before it.
        resumable: Whether to record the iterator's own state with each batch, for checkpoints.

    Attributes:
        stream: As above.
        position: The position after the last batch that was handed out, even if later batches are
            prepared already.
        storage: The level of storage that reading the last batch waited for; "" if there was none
            or it's unknown.
        closed: Whether no further batch will be requested.
        first_batch: The buffers of the first batch; empty until that has been read.
        left_over: Whether this rank had a batch ready when another rank's data ended the loop.
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
        self._driver, self._job, self.stream = driver, job, stream
        self._data: Iterable[Any] | None = data
        self._steps, self._prepare = (
            None if steps is None else max(0, steps - start.n_batches),
            prepare,
        )
        self.position, self._resumable = start, resumable
        self._buffer_size, self._batch_bytes = buffer_size, 0
        self.first_batch: frozenset[Hashable] = frozenset()
        # We use a queue of tokens rather than a semaphore, and a reentrant lock, because Python may
        # collect an abandoned loop at any allocation, in any thread, even in one that holds the
        # lock. The loop's generator then calls `close`.
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(buffer_size):
            self._free.put(None)
        self._batches: deque[tuple[Any, str | None, str]] = deque()
        self.storage = ""
        self._taken = 0  # batches handed out since `start`
        self.left_over = False
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._waiting = False  # `next` is about to request a batch, or waits for one
        self.closed = False
        self._x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # may be set only in the job's thread
        self._thread = threading.Thread(
            target=self._run, name=f"jaxcross-feed-{job.number}.{stream}", daemon=True
        )
        driver.stream_begun(job, open_streams)
        self._thread.start()

    @property
    def batches_left(self) -> int | None:
        """How many batches `steps` still allows, including the latest one; None without `steps`."""
        return None if self._steps is None else self._steps - self._taken + (self._taken > 0)

    @property
    def ahead_bytes(self) -> int:
        """The bytes of arrays in batches that may be ready before they're requested.

        Assumes that all batches are as large as the first one.
        """
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
        """Makes the thread end. Doesn't wait for it, because the user's iterator may be stuck."""
        with self._lock:
            self.closed, batches = True, self._batches
            self._batches = deque()
        batches.clear()  # outside of the lock, because destructors of the user's objects may run
        self._free.put(None)

    def _run(self) -> None:
        with jax.enable_x64(self._x64):
            self._fill()

    def _fill(self) -> None:
        data, self._data = self._data, None  # so that closing the loop releases it
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
            # If the job already waits for this batch on other ranks, it must be informed of the
            # failure by the vote. Otherwise, `next` raises the error after the batches before it.
            if waiting:
                self._driver.job_raised(self._job, error, f"after batch {count}")


def close_unread(source: Iterator[Any]) -> None:
    """Closes an iterator that its loop left early, along with the iterator's files and threads."""
    if isinstance(source, Closable):
        try:
            source.close()
        except Exception:  # the job no longer needs it, and may have ended
            _log.exception("`close()` of the data given to job.batches raised")


def number_of_batches(data: Iterable[Any], steps: int | None) -> int | None:
    """Returns how many batches a loop has at most, or None if that's unknown.

    It has fewer if another rank's data end sooner.
    """
    length = None
    if isinstance(data, Sized):
        with suppress(Exception):  # its class may not be able to tell its length
            length = len(data)
    return min((n for n in (length, steps) if n is not None), default=None)


def to_device(batch: PyTree) -> PyTree:
    """Returns `batch` with its NumPy arrays on the device, unaffected by later in-place changes."""
    return jax.tree.map(
        lambda x: jax.device_put(_own(x)) if isinstance(x, np.ndarray | np.generic) else x, batch
    )


def _own(array: np.ndarray | np.generic) -> np.ndarray | np.generic:
    """Returns a copy, unless `array` is read-only.

    A copy is needed because the device may read the array later or use it in place.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject or read_only(array):
        return array
    # The CPU backend uses aligned memory as it is, but would copy other memory a second time.
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
