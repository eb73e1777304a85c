"""What the tables of docs/ are made of: a module a page, a function a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Read = Callable[[str], dict[str, Any]]
"""The kept result of that name. Raises FileNotFoundError: It is not kept yet."""

Table = Callable[[Read, str], Iterator[tuple[str, ...]]]
"""A table's rows, the first of which is its head, from kept results and the mark's argument."""


def with_spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median, and the smallest and largest of values that differ; empty without
    values.
    """
    if not values:
        return ""
    middle, low, high = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
    return middle if low == high else f"{middle} ({low} to {high})"
