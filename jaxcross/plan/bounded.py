"""Text from files that users give: no larger than what they are to hold can be."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path, most: int) -> str:
    """Returns the text of a file of at most `most` bytes.

    Raises:
        ValueError: It is larger.
        OSError: It cannot be read.
    """
    if path.stat().st_size > most:
        raise ValueError(f"it has more than {most} bytes")
    return path.read_text()
