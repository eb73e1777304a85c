"""Other threads at every point of a function, one point at a time, so that what a race breaks is broken every time."""

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
    """Calls a function, and `meanwhile` before its bytecode number `at`, as if another thread ran there.

    A caller counts `at` up from 1 until the function has no such bytecode. Both run in the calling thread, and hence
    `meanwhile` may try to acquire a lock that the function holds, but would wait for it forever.

    Args:
        function: What is interrupted, called without arguments.
        at: The number of the bytecode, from 1 on. Only those of functions that are defined in `module` count.
        meanwhile: What the other thread does. It is not interrupted itself.
        module: The module that is tested.

    Returns:
        The function's result, and whether it has that many bytecodes.
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
    """Calls a function, and `look` before each of its bytecodes, as another thread that looks all the time.

    Args:
        function: What is watched, called without arguments.
        look: What the other thread does. It must change nothing.
        module: The module that is tested; only bytecodes of functions that are defined there count.

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

    # Python 3.12 traces bytecodes only if some frame has asked for them before the trace function is set.
    sys._getframe().f_trace_opcodes = True
    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(earlier)


class WatchedLock:
    """A lock that says when a thread waits for it.

    Attributes:
        awaited: Set once a thread begins to wait for the lock, which may be free.
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
