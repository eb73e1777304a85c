"""Handles signals whose exception would be lost in a garbage-collector callback or an import.

Python drops exceptions that are raised in a callback of the garbage collector. JAX installs such a
callback, and importing and tracing collect garbage all the time, so half of all Ctrl-Cs would print
"Exception ignored in _xla_gc_callback" and do nothing else. While an extension module is being
loaded, its initialization may import other modules. It then takes the exception for a failed
import, or crashes. In both places, our handler doesn't raise, but has the signal sent again a
moment later.

By then, the script may have ended. The exception could then only interrupt a callback of `atexit`:
Python prints it, the process ends anyway, and whatever the callback was closing stays open. So a
signal that was sent again is dropped if the interpreter is exiting. A new signal still raises at
that point, because the user who presses Ctrl-C may want to get past a callback that hangs.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import final

_AGAIN_S = 0.05


@final
class Postponement:
    """Decides whether a signal's handler raises now, or the signal is sent again a moment later."""

    def __init__(self) -> None:
        self._sent_again = False

    def lets_through(self, number: int, frame: FrameType | None) -> bool:
        """Whether the handler should raise here; if not, the signal is re-sent or dropped."""
        sent_again = self._sent_again
        self._sent_again = False
        # Handlers run in the main thread, which counts as ended as soon as it starts to exit. We
        # can't decide this in the timer's thread, because the exit could begin right after the
        # decision.
        if sent_again and not threading.main_thread().is_alive():
            return False
        if not _would_be_lost(frame):
            return True
        again = threading.Timer(_AGAIN_S, self._send_again, (number,))
        again.daemon = True
        again.start()
        return False

    def _send_again(self, number: int) -> None:
        self._sent_again = True
        os.kill(os.getpid(), number)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Whether Python would drop an exception that is raised in this frame."""
    lost = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    lost |= {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}
    while frame is not None and frame.f_code not in lost and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@final
class InterruptHandler:
    """Raises `KeyboardInterrupt` like Python's own handler, except where it would be lost."""

    def __init__(self) -> None:
        self._postponement = Postponement()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._postponement.lets_through(number, frame):
            raise KeyboardInterrupt


def install_interrupt() -> bool:
    """Installs `InterruptHandler` for Ctrl-C, and returns whether it did.

    A handler that the script has installed stays in place, and so does an `InterruptHandler`.
    """
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, InterruptHandler())
            return True
    return False
