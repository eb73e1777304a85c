"""Runs another thread's work at every point of a function, one point at a time.

If a race can break something, one of these points breaks it, in every run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def interrupted(
    function: Callable[[], T], at: int, meanwhile: Callable[[], object], *, module: ModuleType
) -> tuple[T, bool]:
    """Calls a function, and `meanwhile` before bytecode `at`, as if another thread ran there.

    A test counts `at` up from 1 until the function has no such bytecode. Both calls run in this
    thread. So `meanwhile` may try to acquire a lock that the function holds, but it would
    deadlock if it waited for the lock.

    Args:
        function: The function to interrupt, called without arguments.
        at: Number of the bytecode, from 1. Counts only bytecodes of functions that `module`
            defines.
        meanwhile: The other thread's work. It isn't interrupted itself.
        module: The module under test.

    Returns:
        The function's result, and whether it has at least `at` bytecodes.
    """
    passed = 0

    def count() -> None:
        nonlocal passed
        passed += 1
        if passed == at:
            meanwhile()

    result = _traced(function, count, module)
    return result, passed >= at


def watched(function: Callable[[], T], look: Callable[[], object], *, module: ModuleType) -> T:
    """Calls a function, and `look` before each of its bytecodes, like a constantly reading thread.

    Args:
        function: The function to watch, called without arguments.
        look: The other thread's work. It must change nothing.
        module: The module under test. Only bytecodes of functions that it defines count.

    Returns:
        The function's result.
    """
    return _traced(function, look, module)


def _traced(function: Callable[[], T], before: Callable[[], object], module: ModuleType) -> T:
    def trace(frame: FrameType, event: str, arg: object) -> Any:
        del arg
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before()
        return trace

    # Python 3.12 traces bytecodes only if some frame has requested it before the trace function is
    # set.
    sys._getframe().f_trace_opcodes = True
    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(earlier)


class WatchedLock:
    """A lock that reports when a thread starts to wait for it.

    Attributes:
        awaited: Set when a thread calls a blocking `acquire`, even if the lock is free.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.awaited = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if blocking:
            self.awaited.set()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()
