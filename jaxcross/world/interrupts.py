"""Ctrl-C and SIGTERM while a run is in progress: they wait until the main thread asks, and never come in the middle."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final


@final
class Held:
    """In place of a handler: keeps the `KeyboardInterrupt` that the handler raises.

    Attributes:
        handler: What it stands for.
    """

    def __init__(self, handler: Any, kept: deque[KeyboardInterrupt]) -> None:
        self.handler, self._kept, self._pid = handler, kept, os.getpid()

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.handler(number, frame)
        except KeyboardInterrupt as error:
            if os.getpid() != self._pid:  # a child that was forked meanwhile: nobody asks there
                raise
            self._kept.append(error)


@contextmanager
def held_back() -> Iterator[deque[KeyboardInterrupt]]:
    """A context in which interrupts are not raised but kept, in order. Outside of the main thread none come."""
    kept: deque[KeyboardInterrupt] = deque()
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, Held(handler, kept))
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
