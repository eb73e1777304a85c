"""Decodes each batch just once when several jobs read the same batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxcross.data.batches import Batch, Batches


class SharedDecode:
    """Decodes each batch of a stream once and shares it among several readers, on any threads.

    A decoded batch is kept until every reader has taken it, up to a limit of `window` batches.
    Readers never wait for one another, so a job that runs ahead, pauses or ends can't hang the
    others. A reader that falls more than `window` batches behind the fastest reader decodes its own
    batches again (`redecoded` counts these). It still gets bit for bit the same data, because a
    batch depends only on its number.

    How much work this saves depends on how closely the jobs run together. Interleaved jobs stay
    within a few batches of each other, so each batch is decoded exactly once. Jobs that run one
    after the other gain nothing, because we only keep `window` batches.

    Jobs can share a stream as long as they want the same images, i.e. they read the same split of
    the same folder with the same seed, batch size and image size. A job with a different seed needs
    its own stream. The arrays are shared between readers and therefore read-only.

    Args:
        batches: The stream, positioned where the readers start. It isn't advanced.
        window: Maximum number of batches to keep, which takes `window` times the memory of a batch.

    Attributes:
        decoded: Number of batches decoded on behalf of all readers.
        redecoded: Number of batches that stragglers decoded again for themselves.
        served: Number of batches handed out, summed over all readers.

    Example:
        >>> shared = SharedDecode(train_batches(folder, batch_size=64))  # doctest: +SKIP
        >>> runner.add("a", train, {"data": shared.reader()})  # doctest: +SKIP
        >>> runner.add("b", train, {"data": shared.reader()})  # doctest: +SKIP
    """

    def __init__(self, batches: Batches, *, window: int = 8) -> None:
        if window < 1:
            raise ValueError(f"`window` must be at least 1 batch, not {window}.")
        self._batches = batches.at(batches.step)
        self._window = window
        self._kept: deque[Batch] = deque()
        self._start = batches.step
        # Number of the oldest batch in `_kept`. The next batch to decode is `_first + len(_kept)`.
        self._first = batches.step
        # True until the shared stream decodes a batch at its current position. Up to that point
        # nobody has taken anything from it, so a reader that resumes at an earlier step may still
        # rewind it.
        self._untouched = True
        self._readers: list[SharedReader] = []
        self._lock = threading.Lock()  # protects the attributes; only held briefly
        # Held while a reader decodes the next batch on behalf of everyone, to keep another reader
        # from decoding it too. Lock order: take this before `_lock`.
        self._decoding = threading.Lock()
        self.decoded = 0
        self.redecoded = 0
        self.served = 0

    @property
    def steps(self) -> int | None:
        return self._batches.steps

    def waited_s(self) -> dict[str, float]:
        """See `Batches.waited_s`."""
        return self._batches.waited_s()

    def reader(self, *, start_step: int | None = None) -> SharedReader:
        """Adds a reader, starting at `start_step` or else at the stream's initial position.

        Nothing is read until you ask it for a batch.
        """
        reader = SharedReader(
            self, self._batches.at(self._start if start_step is None else start_step)
        )
        with self._lock:
            self._readers.append(reader)
        return reader

    def _moved(self) -> None:
        """Repositions the shared stream, if necessary, after a reader has moved.

        Suppose all jobs resume from a checkpoint at step 1,000. The shared stream decodes in order,
        so if it stayed at step 0, it would never catch up and each job would be left decoding its
        own batches for the rest of the run. So when all readers are ahead of the shared stream, we
        move it up to the slowest of them.
        """
        with self._decoding, self._lock:
            # Ignore readers that have never been asked for a batch, e.g. because their job had
            # already finished in an earlier run. They'd sit at their first step forever and keep
            # the shared stream from moving past it.
            first = min((reader.step for reader in self._readers if reader.asked), default=0)
            at = self._first + len(self._kept)
            if first > at or (first < at and self._untouched):
                self._batches.close()
                self._batches = self._batches.at(first)
                self._kept.clear()
                self._first = first
                self._untouched = True

    def _leave(self, reader: SharedReader) -> None:
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)
            self._forget()

    def _forget(self) -> None:
        """Drops batches that everyone has taken, and any that no longer fit the window.

        Call with `_lock` held.
        """
        needed = min(
            (reader.step for reader in self._readers), default=self._first + len(self._kept)
        )
        while self._kept and (self._first < needed or len(self._kept) > self._window):
            self._kept.popleft()
            self._first += 1

    def _take(self, reader: SharedReader) -> tuple[Batch | None, bool]:
        """Returns the reader's next batch, or None if we don't have it.

        The second value says whether it's the batch that the shared stream would decode next.
        """
        with self._lock:
            place = reader.step - self._first
            if not 0 <= place < len(self._kept):
                return None, place == len(self._kept)
            batch = self._kept[place]
            self._served(reader)
            return batch, False

    def _served(self, reader: SharedReader) -> None:
        reader.step += 1
        self.served += 1
        self._forget()

    def _next(self, reader: SharedReader) -> Batch:
        batch, is_next = self._take(reader)
        if is_next:
            with self._decoding:
                # Check again: another reader may have decoded the batch while we waited for the
                # lock.
                batch, is_next = self._take(reader)
                if is_next:
                    return self._decode(reader)
        return self._redecode(reader) if batch is None else batch

    def _decode(self, reader: SharedReader) -> Batch:
        batch = _frozen(next(self._batches))
        with self._lock:
            self._kept.append(batch)
            self._untouched = False
            self.decoded += 1
            self._served(reader)
        return batch

    def _redecode(self, reader: SharedReader) -> Batch:
        own = reader.own
        if own.step != reader.step:
            own.close()
            own.step = reader.step
        batch = _frozen(next(own))
        with self._lock:
            self.redecoded += 1
            self._served(reader)
        return batch


class SharedReader(Iterator[Batch]):
    """One job's view of a `SharedDecode`: an iterator like `Batches`. Not thread-safe.

    Attributes:
        step: Number of batches taken so far, counted from step 0.
        own: A private stream to fall back to when this reader is too far from the shared one.
        asked: Whether anyone has asked this reader for a batch or repositioned it.
    """

    def __init__(self, shared: SharedDecode, own: Batches) -> None:
        self._shared = shared
        self.own = own
        self.step = own.step
        self.asked = False

    @property
    def steps(self) -> int | None:
        return self._shared.steps

    @property
    def steps_per_epoch(self) -> int:
        return self.own.steps_per_epoch

    @property
    def num_classes(self) -> int:
        return self.own.num_classes

    def __iter__(self) -> SharedReader:
        return self

    def __next__(self) -> Batch:
        if self.steps is not None and self.step >= self.steps:
            self.close()
            raise StopIteration
        self.asked = True
        return self._shared._next(self)

    def waited_s(self) -> dict[str, float]:
        """See `Batches.waited_s`. Only covers the shared stream."""
        return self._shared.waited_s()

    def close(self) -> None:
        """Removes this reader, so that no more batches are kept for it, and closes its stream."""
        self._shared._leave(self)
        self.own.close()

    def get_state(self) -> dict[str, Any]:
        """See `Batches.get_state`."""
        return self.own.get_state() | {"step": self.step}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `Batches.set_state`."""
        self.own.set_state(state)
        self.step = self.own.step
        self.asked = True
        self._shared._moved()


def _frozen(batch: Batch) -> Batch:
    for array in batch.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return batch
