"""Signals while a run is in progress: what their handlers raise waits until the main thread asks, and never comes in
the middle. Ctrl-C and SIGTERM, and what the user has set up, as for a warning of a batch system.

Where it does not ask any more, because the run has ended and its last states are being saved, the second one comes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

_AT_ONCE_S = 0.5  # a person who means it twice is slower


@final
class DeferredHandler:
    """In place of a handler: keeps the exception that the handler raises.

    Attributes:
        handler: What it stands for.
    """

    def __init__(self, handler: Any, kept: deque[BaseException], times_s: deque[float]) -> None:
        self.handler, self._kept, self._times_s, self._pid = handler, kept, times_s, os.getpid()

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            if os.getpid() != self._pid:
                raise  # in a child that was forked meanwhile nobody asks
            now_s = time.monotonic()
            if self._times_s and now_s - self._times_s[-1] < _AT_ONCE_S:
                return  # one signal comes several times: by way of the launcher, and to each process
            if self._kept:
                raise
            self._times_s.append(now_s)
            self._kept.append(error)


@contextmanager
def held_back() -> Iterator[deque[BaseException]]:
    """A context in which what signals raise is kept, in order. Outside of the main thread none come."""
    kept: deque[BaseException] = deque()
    times_s: deque[float] = deque(maxlen=1)
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, DeferredHandler(handler, kept, times_s))
        yield kept
    finally:
        for number, handler in before.items():
            if isinstance(signal.getsignal(number), DeferredHandler):
                signal.signal(number, handler)
