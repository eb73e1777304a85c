"""Reads and writes records as plain data. A record's annotations are its schema.

Plain data is what JSON and TOML can express. It comes from files that people may have edited, so
every type is checked, by msgspec. A record may have further checks in its `__post_init__`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from jaxcross.errors import clause

T = TypeVar("T")

MOST = 2**63 - 1
"""Largest whole number of a record. Larger ones overflow where they are converted to floats."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
"""A whole number from 0 to `MOST`."""


def record(data: Any, kind: type[T]) -> T:
    """Returns plain data as an instance of a dataclass or of another type that msgspec supports.

    Whole numbers count as floats, but booleans don't count as numbers. Fields that have a default
    may be missing. Ignores keys that aren't fields.

    Raises:
        ValueError: `data` doesn't match the annotations, or `kind` raised TypeError or ValueError.
            The text says where in `data`, e.g. at `groups[0].ranks`.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, at, place = str(error).rpartition(" - at `$")
        if not at:  # the error is about `data` as a whole
            text, place = place, ""
        where = f" at `{place.lstrip('.')}" if place else ""
        raise ValueError(f"{text[:1].lower()}{text[1:]}{where}") from None


def check_format(data: Any, number: int, what: str) -> None:
    """Checks that data is of the format that this version reads.

    Args:
        data: The plain data, with the number of its format as `format`.
        number: The format that this version reads.
        what: What has this format, in the plural.

    Raises:
        ValueError: It's of another format.
    """
    if not isinstance(data, Mapping) or data.get("format") != number:
        raise ValueError(f"this version reads {what} of format {number}")


def load(
    path: Path,
    what: str,
    read: Callable[[Any], T],
    *,
    most: int,
    parse: Callable[[str], Any] = json.loads,
) -> T:
    """Returns what `read` makes of a file's data.

    Args:
        path: The file.
        what: What the file should be, for the error.
        read: Makes a record of the data, or raises ValueError.
        most: Largest size that a valid file can have, in bytes.
        parse: Parses the text.

    Raises:
        ValueError: The file isn't `what`, or has more than `most` bytes.
        OSError: The file can't be read.
    """
    try:
        return read(parse(read_text(path, most)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` is not {what}: {clause(str(error))}.") from error


def read_text(path: Path, most: int) -> str:
    """Returns the text of a file of at most `most` bytes.

    Raises:
        ValueError: The file is larger.
        OSError: The file can't be read.
    """
    if path.stat().st_size > most:
        raise ValueError(f"it has more than {most} bytes")
    return path.read_text()


def save(path: str | Path, data: Any) -> Path:
    """Writes plain data as JSON, and returns the path.

    Raises:
        ValueError: A number is NaN or infinite, for which JSON has no word.
    """
    path = Path(path)
    path.write_text(json.dumps(data, allow_nan=False, indent=1))
    return path


def spelt(value: Any) -> Any:
    """Returns plain data with `"nan"`, `"inf"` and `"-inf"` in place of numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: spelt(each) for key, each in value.items()}
    if isinstance(value, list):
        return [spelt(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def unspelt(value: Any) -> Any:
    """Inverts `spelt` for a value or a list of values. Leaves all other texts as they are."""
    if isinstance(value, list):
        return [unspelt(each) for each in value]
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
