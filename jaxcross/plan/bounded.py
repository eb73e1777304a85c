"""Reads text files that users provide, up to the largest size that valid content can have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxcross.errors import clause

T = TypeVar("T")


def read_text(path: Path, most: int) -> str:
    """Returns the text of a file of at most `most` bytes.

    Raises:
        ValueError: The file is larger.
        OSError: The file can't be read.
    """
    if path.stat().st_size > most:
        raise ValueError(f"it has more than {most} bytes")
    return path.read_text()


def load(path: Path, what: str, parse: Callable[[str], T], *, most: int) -> T:
    """Returns what `parse` makes of a file's text.

    Raises:
        ValueError: The file isn't `what`: `parse` raised, or the file has more than `most` bytes.
        OSError: The file can't be read.
    """
    try:
        return parse(read_text(path, most))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` is not {what}: {clause(str(error))}.") from error
