"""Signals during a run: an exception that a handler raises is kept until the main thread asks for
it.

So it never comes in the middle of something. This holds for Ctrl-C and SIGTERM, and for handlers of
the user, as for a warning of a batch system. Where the main thread does not ask any more, because
the run has ended and its last states are being saved, the second exception is raised at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

_AT_ONCE_S = 0.5  # a person who presses Ctrl-C twice is slower

Handler = Callable[[int, FrameType | None], object]


@final
class DeferredHandler:
    """A signal handler that calls another one and keeps the exception that it raises.

    Attributes:
        handler: The handler that it replaces.
    """

    def __init__(self, handler: Handler, kept: deque[BaseException], times_s: deque[float]) -> None:
        self.handler = handler
        self._kept = kept
        self._times_s = times_s
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            if os.getpid() != self._pid:
                raise  # in a forked child no thread asks for it
            now_s = time.monotonic()
            if self._times_s and now_s - self._times_s[-1] < _AT_ONCE_S:
                return  # one signal comes several times: through the launcher, and to each process
            if self._kept:
                raise
            self._times_s.append(now_s)
            self._kept.append(error)


@contextmanager
def defer_signals() -> Iterator[deque[BaseException]]:
    """A context in which exceptions of signal handlers are kept, in order. Outside of the main
    thread none come.
    """
    kept: deque[BaseException] = deque()
    times_s: deque[float] = deque(maxlen=1)
    before: dict[int, Handler] = {}
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
            if isinstance(
                signal.getsignal(number), DeferredHandler
            ):  # else the script has set another one: it stays
                signal.signal(number, handler)
