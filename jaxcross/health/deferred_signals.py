"""Defers signals during a run: a handler's exception is kept until the main thread asks for it.

This way, the exception never interrupts the main thread in the middle of something. It works for
Ctrl-C and SIGTERM, and also for the user's own handlers, such as one for a batch system's warning.

If the main thread has stopped asking, e.g. because the run has ended and its last states are being
saved, the first exception stays where it is. So the exception of a second signal is raised at once.
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
    """A signal handler that calls another handler and keeps any exception that the latter raises.

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
                raise  # in a forked child, no thread asks for it
            now_s = time.monotonic()
            if self._times_s and now_s - self._times_s[-1] < _AT_ONCE_S:
                # The same signal arrives several times: through the launcher, and sent to each
                # process.
                return
            if self._kept:
                raise
            self._times_s.append(now_s)
            self._kept.append(error)


@contextmanager
def defer_signals() -> Iterator[deque[BaseException]]:
    """A context in which exceptions of signal handlers are kept, in order, in the yielded deque.

    Outside the main thread, it has no effect.
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
            # If the script has installed another handler in the meantime, that one stays.
            if isinstance(signal.getsignal(number), DeferredHandler):
                signal.signal(number, handler)
