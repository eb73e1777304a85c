"""The Python stacks of all threads of this process, as text."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from types import FrameType


def stacks() -> str:
    """Returns the stack of every thread, the main thread first. Does not stop the threads."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(_frames().items(), key=lambda item: item[0] != main)
    parts = [
        f"thread {names.get(i, '?')!r}:\n{''.join(traceback.format_stack(frame))}"
        for i, frame in frames
    ]
    return "\n".join(parts)


def _frames() -> dict[int, FrameType]:
    """Returns the frame of every thread.

    While Python before 3.11.9 lists the frames, it holds a lock that threads need to start or exit.
    If garbage is collected during that time, such a thread may run, and the process deadlocks
    (python/cpython#106883). So we disable garbage collection.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
