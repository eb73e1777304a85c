"""Takes one batch from each of several jobs at a time, until one of them has no more.

A fused step needs a batch of every member. Which members have ended is only found out when a batch
is missing, and by then the thread of the loop has read ahead in the others. So sources accept
batches back, and the next loop over the remaining members starts with those.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from jaxcross.jobs.prefetch import close_unread, to_device
from jaxcross.runtime.failure_text import describe

_END = object()


@final
class Source:
    """One job's batches, on the device.

    Only one thread at a time takes batches, but any thread may close the source.

    Args:
        data: The batches.
        steps: The number of batches after which to end, if given.

    Attributes:
        error: What `data` raised, if anything. There are no more batches then.
    """

    def __init__(self, data: Iterable[Any], steps: int | None) -> None:
        self._data: Iterable[Any] | None = data
        self._iterator: Iterator[Any] | None = None
        self._left = steps
        self._given_back: deque[Any] = deque()
        self._taking = threading.Lock()
        self._closing = False
        self.error: BaseException | None = None

    def take(self) -> Any:
        """Returns the next batch, or `_END` if there is none. Waits for the user's iterator."""
        with self._taking:
            batch = self._take()
        if self._closing:
            self._close_unless_taking()
        return batch

    def _take(self) -> Any:
        if self._given_back:
            return self._given_back.popleft()
        if self._left == 0 or self._data is None:
            return _END
        try:
            if self._iterator is None:
                self._iterator = iter(self._data)
            batch = to_device(next(self._iterator))
        except StopIteration:
            self._data = None
            return _END
        except Exception as error:  # only this job fails
            error.add_note("raised by the data of the job")
            self._data, self.error = None, error
            return _END
        if self._left is not None:
            self._left -= 1
        return batch

    def give_back(self, batch: Any) -> None:
        """Makes `batch` the next one that's taken. A no-op for `_END`."""
        if batch is not _END:
            self._given_back.appendleft(batch)

    @property
    def ended(self) -> bool:
        """Whether there's no further batch. Waits for the user's iterator."""
        self.give_back(batch := self.take())
        return batch is _END

    def close(self) -> None:
        """Closes the user's iterator, unless it came to its end. Doesn't wait.

        If a step fails while the next batch is being read, another thread is inside the iterator. A
        running generator can't be closed, so that thread closes it afterwards.
        """
        self._closing = True
        self._close_unless_taking()

    def _close_unless_taking(self) -> None:
        if not self._taking.acquire(blocking=False):
            return
        try:
            self._given_back.clear()
            data, self._data = self._data, None
            if data is not None and self._iterator is not None:
                close_unread(self._iterator)
        finally:
            self._taking.release()


@final
class SideBySide(Iterator[tuple[Any, ...]]):
    """Takes one batch from each source at a time, until one of them has none.

    It's meant for `JobContext.batches`, whose thread reads ahead.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self._undelivered: deque[tuple[Any, ...]] = deque()
        self._left = threading.Event()  # set once the thread that reads ahead has ended

    def __next__(self) -> tuple[Any, ...]:
        # We take from all sources even if one has ended, to find all that end together.
        batches = tuple(source.take() for source in self._sources)
        if any(batch is _END for batch in batches):
            self._give_back(batches)
            raise StopIteration
        self._undelivered.append(batches)
        return batches

    def delivered(self) -> None:
        """Records that the loop has received the earliest undelivered batches."""
        self._undelivered.popleft()

    def close(self) -> None:
        """Records that the thread has taken its last batch. The thread calls this when it ends."""
        self._left.set()

    def ends(self) -> list[str | None]:
        """Returns how each source ended: None if it has more batches, otherwise its error's text.

        The text is "" if the source just has no more batches. Call this once, after the loop. It
        waits for the loop's thread, and gives back the batches that the thread took but the loop
        didn't receive.
        """
        self._left.wait()
        while self._undelivered:
            self._give_back(self._undelivered.pop())
        return [self._end_of(source) for source in self._sources]

    def _give_back(self, batches: tuple[Any, ...]) -> None:
        for source, batch in zip(self._sources, batches, strict=True):
            source.give_back(batch)

    def _end_of(self, source: Source) -> str | None:
        if not source.ended:
            return None
        return "" if source.error is None else describe(source.error)
