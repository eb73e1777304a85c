"""Generates the tables of docs/, with a module per page and a function per table, and single lines
of the README.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Read = Callable[[str], dict[str, Any]]
"""Reads the kept result of a name. Raises FileNotFoundError if there is none yet."""

Table = Callable[[Read, str], Iterator[tuple[str, ...]]]
"""Yields a table's rows, starting with its header, from kept results and the mark's argument."""

Text = Callable[[Read], str]
"""Returns the text of a line in a list, without its dash, from kept results."""


def with_spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median, with the smallest and largest if they differ, or "" without values."""
    if not values:
        return ""
    middle, low, high = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
    return middle if low == high else f"{middle} ({low} to {high})"
