"""Decodes each batch only once for several jobs that read the same batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxcross.data.batches import Batch, Batches


class SharedDecode:
    """Decodes each batch of a stream once, and hands it to several readers, on any threads.

    A decoded batch is kept until every reader has taken it, but at most `window` batches are kept.
    No reader waits for another one to catch up, so a job that runs ahead, pauses or ends can't hang
    the others. If a reader falls more than `window` batches behind the fastest reader, it decodes
    its batches again for itself, which `redecoded` counts. It still gets bit for bit the same
    batches, because a batch depends only on its number.

    How much this saves depends on when the jobs need a batch. Jobs that run interleaved stay within
    a few batches of each other, so each batch is decoded just once. Jobs that run one after the
    other share nothing, because at most `window` batches are kept.

    Jobs can share a stream if they need the same images, i.e. if they read the same split of the
    same folder with the same seed, batch size and image size. A job with a different seed needs
    another stream. All readers get the same arrays, so these are read-only.

    Args:
        batches: The stream, positioned where the first reader starts. It isn't advanced.
        window: Maximum number of batches kept. They take `window` times the memory of one batch.

    Attributes:
        decoded: Number of batches decoded for all readers.
        redecoded: Number of batches that a late reader decoded again for itself.
        served: Number of batches handed out, to all readers together.

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
        # The number of the oldest kept batch. The next batch to decode has the number
        # `_first + len(_kept)`.
        self._first = batches.step
        # True as long as the shared stream hasn't decoded a batch at its current position. Until
        # then, a reader that resumes at an earlier step may move the stream back, because no reader
        # has taken a batch from it.
        self._untouched = True
        self._readers: list[SharedReader] = []
        self._lock = threading.Lock()  # protects the attributes; never held for long
        # Held by a reader while it decodes the next batch for all readers, so that no other reader
        # decodes the same batch. A thread that needs both locks must take this one first.
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
        """Adds a reader that starts at `start_step`, or where the stream started.

        It reads nothing until it's asked for a batch.
        """
        reader = SharedReader(
            self, self._batches.at(self._start if start_step is None else start_step)
        )
        with self._lock:
            self._readers.append(reader)
        return reader

    def _moved(self) -> None:
        """Moves the shared stream if necessary, after a reader has been repositioned.

        The shared stream decodes batches in order. Suppose that all jobs resume from a checkpoint
        at step 1,000. If the shared stream stayed at step 0, each job would decode its batches
        separately for the rest of the run. So if all readers are ahead of the shared stream, we
        move it to the slowest of them.
        """
        with self._decoding, self._lock:
            # Ignore readers that were never asked for a batch, e.g. because their job had already
            # finished in an earlier run. They'd stay at their first step, and the shared stream
            # could never move past it.
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
        """Drops batches that all readers have taken, and the oldest ones beyond the window.

        The caller must hold `_lock`.
        """
        needed = min(
            (reader.step for reader in self._readers), default=self._first + len(self._kept)
        )
        while self._kept and (self._first < needed or len(self._kept) > self._window):
            self._kept.popleft()
            self._first += 1

    def _take(self, reader: SharedReader) -> tuple[Batch | None, bool]:
        """Returns the reader's next batch, or None if that batch isn't kept.

        Also returns whether it's the next batch to decode for all readers.
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
                # While we waited for the lock, another reader may have decoded the batch.
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
        own: A private stream, used if this reader is too far from the shared one.
        asked: Whether the reader has been asked for a batch, or repositioned.
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
        """See `Batches.waited_s`. Covers the stream that all readers share."""
        return self._shared.waited_s()

    def close(self) -> None:
        """Removes this reader, and closes its private stream. No more batches are kept for it."""
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
