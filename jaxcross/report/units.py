"""Formats numbers for readers, with about three digits and a suitable unit."""

from __future__ import annotations

import math

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def number(value: float | None) -> str:
    """Formats a number with about three significant digits. Avoids exponents if it can."""
    if value is None:
        return "-"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        digits = 0
        if abs(value) < 1:
            digits = 3
        elif abs(value) < 100:
            digits = 2
        return f"{value:.{digits}f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2g}"
    return f"{as_float(value):.2e}"


def as_float(value: float) -> float:
    """Converts a number to a float. Ints that are too large for a float become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def seconds(value: float | None) -> str:
    """Formats a duration in s, ms, us or ns."""
    if value is None:
        return "-"
    if value == 0:
        return "0 s"
    scale, unit = next(((s, u) for s, u in _SECONDS if abs(value) >= 0.9995 * s), _SECONDS[-1])
    value /= scale
    digits = 0
    if abs(value) < 9.995 or unit == "s":
        digits = 2
    elif abs(value) < 99.95:
        digits = 1
    return f"{value:.{digits}f} {unit}"


def plural(count: int, noun: str) -> str:
    """Returns a number and its noun, such as `1 step` or `2 steps`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def share(value: float | None) -> str:
    """Formats a share as a percentage."""
    return "-" if value is None else f"{value:.0%}"
