"""One decode for several jobs that read the same batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxcross.data.batches import Batch, Batches


class SharedDecode:
    """Decodes each batch of a stream once and hands it to several readers, on any threads.

    The last `window` batches are kept until every reader has taken them. Nobody ever waits for
    another reader, so a job that runs ahead, pauses or ends cannot hang the rest: a reader that
    falls more than `window` batches behind the first one decodes for itself, and gets the same
    bits, since a batch depends on its number alone. The price is seen in `redecoded`. Two jobs in
    crossover stay within a few batches of each other and share everything; two jobs one after the
    other share nothing.

    Jobs may share if their images are the same: same folder, split, seed, batch size and image
    size. Jobs with another seed need a stream of their own. The arrays handed out are read-only:
    all readers hold the same ones.

    Args:
        batches: The stream, in the state from which the first reader starts; it is not advanced.
        window: How many batches are kept at most; memory is `window` times a batch.

    Attributes:
        decoded: Batches decoded for all.
        redecoded: Batches that a late reader decoded again for itself.
        served: Batches handed out.

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
        self._first = (
            batches.step
        )  # number of the oldest batch kept; the next to decode is `_first + len(_kept)`
        self._untouched = (
            True  # nothing was decoded there: who comes to an earlier place may still move it back
        )
        self._readers: list[SharedReader] = []
        self._lock = threading.Lock()  # guards the state; held for moments
        self._decoding = (
            threading.Lock()
        )  # held by the one reader that decodes; taken before `_lock`
        self.decoded = 0
        self.redecoded = 0
        self.served = 0

    @property
    def steps(self) -> int | None:
        return self._batches.steps

    def waited_s(self) -> dict[str, float]:
        """As `Batches.waited_s`."""
        return self._batches.waited_s()

    def reader(self, *, start_step: int | None = None) -> SharedReader:
        """Adds a reader, standing at `start_step` or where the stream started. Reads nothing
        yet.
        """
        reader = SharedReader(
            self, self._batches.at(self._start if start_step is None else start_step)
        )
        with self._lock:
            self._readers.append(reader)
        return reader

    def _moved(self) -> None:
        """Follows readers that have moved. Where all of them are ahead of the kept batches,
        decoding for all goes on there: otherwise jobs that resume from a checkpoint would each
        decode on their own, to the end.
        """
        with self._decoding, self._lock:
            # A reader that never asked for a batch, as of a job that an earlier run ended, does not
            # hold up the others.
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
        """Drops what all readers have taken, and what is beyond the window. Called with `_lock`
        held.
        """
        needed = min(
            (reader.step for reader in self._readers), default=self._first + len(self._kept)
        )
        while self._kept and (self._first < needed or len(self._kept) > self._window):
            self._kept.popleft()
            self._first += 1

    def _take(self, reader: SharedReader) -> tuple[Batch | None, bool]:
        """The batch at the reader's step if it is kept, and whether that step is the next one to
        decode for all.
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
                batch, is_next = self._take(reader)  # another reader may have decoded it since
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
    """One job's view of a `SharedDecode`: an iterator like `Batches`. One thread may use it at a
    time.

    Attributes:
        step: Batches taken so far, counted from step 0.
        own: The private stream it falls back to when it is too far from the other readers.
        asked: Whether anybody has asked it for a batch, or sent it elsewhere.
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
        """As `Batches.waited_s`, for the stream that all readers share."""
        return self._shared.waited_s()

    def close(self) -> None:
        """Leaves: batches are no longer kept for this reader, and its private stream's threads
        end.
        """
        self._shared._leave(self)
        self.own.close()

    def get_state(self) -> dict[str, Any]:
        """As `Batches.get_state`."""
        return self.own.get_state() | {"step": self.step}

    def set_state(self, state: dict[str, Any]) -> None:
        """As `Batches.set_state`."""
        self.own.set_state(state)
        self.step = self.own.step
        self.asked = True
        self._shared._moved()


def _frozen(batch: Batch) -> Batch:
    for array in batch.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return batch
