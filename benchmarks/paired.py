"""Ratios of the times of two rivals that took turns, with the uncertainty of their median."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def ratios(new: Sequence[float], old: Sequence[float]) -> dict[str, Any]:
    """Returns ratios of paired numbers and their median.

    The median's 95% interval follows from order statistics. It's None for fewer than six pairs.
    """
    from scipy import stats

    raw = [a / b for a, b in zip(new, old, strict=True)]
    low, high = stats.quantile_test(raw, p=0.5).confidence_interval(0.95)
    return {
        "median": statistics.median(raw),
        "interval": [float(low), float(high)] if low <= high else None,
        "raw": raw,
    }


def with_interval(found: dict[str, Any]) -> str:
    """Returns the median of ratios with its 95% interval."""
    if found["interval"] is None:
        return f"{found['median']:.2f}"
    low, high = found["interval"]
    return f"{found['median']:.2f} ({low:.2f} to {high:.2f})"
