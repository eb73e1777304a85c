"""Describes the machine that a result comes from. Measures nothing itself."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def machine() -> str:
    """Returns the architecture, usable cores and, if known, the CPU and its widest vectors."""
    parts = [platform.machine(), f"{len(os.sched_getaffinity(0))} cores"]
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    if model := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        parts.append(model[1])
    if widest := next(
        (flag for flag in ("avx512f", "avx2") if re.search(rf"\b{flag}\b", text)), None
    ):
        parts.append(widest)
    return ", ".join(parts)
