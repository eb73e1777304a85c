"""Measures work by counting calls, because times vary from run to run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_calls(work: Callable[[], Any]) -> int:
    """Counts the calls of Python and built-in functions in `work()`, and generators' iterations."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted
