"""Signals whose exception would be lost: in a callback of the garbage collector, and while an extension is loaded.

Python drops what is raised in such a callback. JAX installs one, and importing and tracing collect garbage all the
time: one Ctrl-C of two would print "Exception ignored in _xla_gc_callback" and do nothing else. An extension module
whose initialization imports others takes the exception for a failed import, or crashes.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType

_AGAIN_S = 0.05


def postpone(number: int, frame: FrameType | None) -> bool:
    """Whether an exception raised in this frame would be lost. If so, sends the signal again a moment later."""
    lost = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    lost |= {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}
    while frame is not None and frame.f_code not in lost and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is None:
        return False
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    return True


def install_interrupt() -> bool:
    """Makes Ctrl-C reach the main thread where Python would lose it, and returns whether it did.

    A handler of the script stays, and so does one that is installed already.
    """
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
            return True
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not postpone(number, frame):
        raise KeyboardInterrupt
