"""The Python stacks of all threads of this process, as text."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks() -> str:
    """Returns the stack of every thread, the main thread first. Does not stop them."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [f"thread {names.get(i, '?')!r}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames]
    return "\n".join(parts)
