"""Batches for one job, prepared ahead of it by a thread of their own, off both lanes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxcross.jobs.data_position import START, Place, go_to, state_of
from jaxcross.runtime.job_record import JobRecord

_ALIGNMENT = 64
_log = logging.getLogger("jaxcross")


class PrefetchDriver(Protocol):
    """The part of `jaxcross.runtime.driver.Driver` that a prefetcher uses."""

    def stream_begun(self, job: JobRecord, still_open: Sequence[int]) -> None: ...
    def batch_dropped(self, job: JobRecord) -> None: ...
    def batches_ready(self, job: JobRecord, stream: int, count: int) -> None: ...
    def stream_ended(self, job: JobRecord, stream: int, count: int) -> None: ...
    def want_batch(self, job: JobRecord, stream: int, index: int) -> bool: ...
    def job_raised(self, job: JobRecord, error: BaseException, where: str) -> None: ...


@runtime_checkable
class Closable(Protocol):
    """What can be told that nobody will read it further, as generators can."""

    def close(self) -> None: ...


class Prefetcher(Iterator[Any]):
    """An iterator over `data` whose end, like each of its batches, is agreed by all ranks.

    `next` waits until every rank has its batch; as that is voted on while earlier steps run, it seldom does.

    Args:
        driver: Who votes.
        job: The job's record.
        stream: Which of the job's feeds this is; the job must open them in one order on all ranks.
        beside: Those of the job's earlier ones that it may still read.
        data: This rank's batches.
        steps: Ends after so many, if given.
        prepare: Called on each batch in the feed's thread, for example to put it on the device.
        ahead: How many batches may be ready before they are wanted.
        start: Begins there; `steps` counts the batches before it, too.
        resumable: Keeps note of the iterator's own state, for checkpoints.

    Attributes:
        stream: As above.
        place: Behind the last batch that was handed out, whatever was prepared beyond it.
        closed: Nobody will ask for more.
    """

    def __init__(
        self,
        *,
        driver: PrefetchDriver,
        job: JobRecord,
        stream: int,
        beside: Sequence[int] = (),
        data: Iterable[Any],
        steps: int | None = None,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        ahead: int = 2,
        start: Place = START,
        resumable: bool = False,
    ) -> None:
        self._driver, self._job, self.stream = driver, job, stream
        self._data: Iterable[Any] | None = data
        self._steps, self._prepare = None if steps is None else max(0, steps - start.taken), prepare
        self.place, self._resumable = start, resumable
        self._free = threading.Semaphore(ahead)
        self._batches: deque[tuple[Any, str | None]] = deque()
        self._taken = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._wanted = False
        self.closed = False
        self._x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]  # perhaps by a context of the job's thread
        self._thread = threading.Thread(target=self._run, name=f"jaxcross-feed-{job.number}.{stream}", daemon=True)
        driver.stream_begun(job, beside)
        self._thread.start()

    @property
    def batches_left(self) -> int | None:
        """How many batches `steps` still allows, the one that was handed out last included; None without `steps`."""
        return None if self._steps is None else self._steps - self._taken + (self._taken > 0)

    def __next__(self) -> Any:
        with self._lock:
            if self._error is not None and not self._batches:
                raise self._error
            self._wanted = True
        more = self._driver.want_batch(self._job, self.stream, self._taken)
        with self._lock:
            self._wanted = False
        if not more:
            self.close()
            raise StopIteration
        self._taken += 1
        batch, state = self._batches.popleft()
        self.place = Place(self.place.taken + 1, state)
        self._free.release()
        return batch

    def close(self) -> None:
        """Lets the thread end. Does not wait for it: the user's iterator may be stuck."""
        with self._lock:
            self.closed, batches = True, self._batches
            self._batches = deque()
        batches.clear()  # not under the lock: who knows what ends with them
        self._free.release()

    def _run(self) -> None:
        with jax.enable_x64(self._x64):
            self._fill()

    def _fill(self) -> None:
        data, self._data = self._data, None  # nothing here keeps it alive any longer than the loop
        assert data is not None
        count = 0
        try:
            source = iter(data)
            if self._steps != 0:
                go_to(self.place, source, lambda: self._driver.batch_dropped(self._job))
            while self._steps is None or count < self._steps:
                self._free.acquire()
                if self.closed:
                    break
                try:
                    batch = next(source)
                except StopIteration:
                    break
                ready = self._prepare(batch), state_of(source) if self._resumable else None
                with self._lock:
                    if not self.closed:
                        self._batches.append(ready)
                del batch, ready
                count += 1
                self._driver.batches_ready(self._job, self.stream, count)
            if not self.closed:
                self._driver.stream_ended(self._job, self.stream, count)
            while not self.closed:
                self._free.acquire()
            if self._steps is None or self._taken < self._steps:
                self._abandon(source)
        except BaseException as error:
            error.add_note("raised by the data given to job.batches")
            with self._lock:
                self._error = error
                waiting = self._wanted and not self._batches
            # Otherwise the job meets it when it has used the batches that came before.
            if waiting:
                self._driver.job_raised(self._job, error, f"after batch {count}")

    def _abandon(self, source: Iterator[Any]) -> None:
        """The loop ended before its data: what is left open there would stay so, even if the caller kept `source`."""
        if isinstance(source, Closable):
            try:
                source.close()
            except Exception:  # the job is past it, and perhaps over
                _log.exception("`close()` of the data given to job.batches raised")


def to_device(batch: Any) -> Any:
    """`batch` with its NumPy arrays on the device. What is done to them afterwards, in place, does not reach it."""
    return jax.tree.map(lambda x: jax.device_put(_own(x)) if isinstance(x, np.ndarray | np.generic) else x, batch)


def _own(array: Any) -> Any:
    """A copy, unless nobody can write to `array`: the device may read it late, or in place for as long as it lives."""
    if not isinstance(array, np.ndarray) or array.dtype.hasobject or read_only(array):
        return array
    # Aligned, the CPU backend takes it as it is instead of copying once more.
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    own = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


def read_only(array: np.ndarray) -> bool:
    """Whether nobody can write to `array`, nor to what it is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return owner is None or isinstance(owner, bytes)
