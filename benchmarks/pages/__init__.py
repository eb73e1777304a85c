"""What the tables of docs/ are made of: a module a page, a function a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Read = Callable[[str], dict[str, Any]]
"""The kept result of that name. Raises FileNotFoundError: It is not kept yet."""

Table = Callable[[Read, str], Iterator[tuple[str, ...]]]
"""A table's rows, the first of which is its head, from kept results and the mark's argument."""
