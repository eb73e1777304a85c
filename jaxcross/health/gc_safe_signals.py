"""Signals whose exception would be lost: in a callback of the garbage collector, and while an
extension is loaded.

Python drops what is raised in such a callback. JAX installs one, and importing and tracing collect
garbage all the time: one Ctrl-C of two would print "Exception ignored in _xla_gc_callback" and do
nothing else. An extension module whose initialization imports others takes the exception for a
failed import, or crashes. So the handler doesn't raise there, but has the signal sent again a
moment later.

By then the script may have ended. The exception could only interrupt a callback of `atexit`: Python
prints it, the process ends anyway, and whatever the callback was closing stays open. So a signal
that was sent again is dropped once the interpreter is exiting. A new one still raises there,
because somebody who presses Ctrl-C at that point may want to get past a callback that hangs.
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
    """Decides for the handler of one signal whether to raise now, or to have the signal sent again
    a moment later.
    """

    def __init__(self) -> None:
        self._sent_again = False

    def lets_through(self, number: int, frame: FrameType | None) -> bool:
        """Whether the handler should raise in this frame. If the exception would be lost, sends the
        signal again.
        """
        sent_again = self._sent_again
        self._sent_again = False
        # Handlers run in the main thread, which counts as ended from the moment it starts to exit.
        # The timer's thread can't make this decision, because the exit could begin right after it.
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
    """Raises `KeyboardInterrupt`, as Python's own handler does, but not where the exception would
    be lost.
    """

    def __init__(self) -> None:
        self._postponement = Postponement()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._postponement.lets_through(number, frame):
            raise KeyboardInterrupt


def install_interrupt() -> bool:
    """Makes Ctrl-C reach the main thread where Python would lose it, and returns whether it did.

    A handler of the script stays, and so does one that is installed already.
    """
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, InterruptHandler())
            return True
    return False
