"""Converts records to and from plain data, using a record's type annotations as its schema.

Plain data is anything that JSON and TOML can represent, e.g. dicts, lists and strings. We don't
trust it, because most of it comes from files that people may have edited by hand. So msgspec checks
the type of every field, and a record can check the values in its `__post_init__` method, e.g. that
a number is in range.
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
"""The largest whole number in a record. Larger numbers would overflow when converted to floats."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
"""A whole number from 0 to `MOST`."""


def record(data: Any, kind: type[T]) -> T:
    """Converts plain data to an instance of a dataclass, or of any other type msgspec supports.

    A `float` field also accepts whole numbers, but booleans never count as numbers. Fields with a
    default value may be missing from `data`, and entries of `data` without a matching field are
    ignored.

    Raises:
        ValueError: `data` doesn't match the annotations, or the constructor raised a TypeError or
            ValueError. The message contains the position in `data`, e.g. `groups[0].ranks`.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, at, place = str(error).rpartition(" - at `$")
        if not at:  # the error isn't about a part of `data`
            text = place
            place = ""
        where = f" at `{place.lstrip('.')}" if place else ""
        raise ValueError(f"{text[:1].lower()}{text[1:]}{where}") from None


def check_format(data: Any, number: int, what: str) -> None:
    """Checks that data are in the format that this version of jaxcross can read.

    Args:
        data: The plain data, with the number of its format in the entry `format`.
        number: The format that this version can read.
        what: What the data are, in the plural, for the error message.

    Raises:
        ValueError: The data have another format.
    """
    found = data.get("format") if isinstance(data, Mapping) else None
    if found != number:
        raise ValueError(
            f"this version of jaxcross reads {what} of format {number}, but `format` is "
            f"{found!r:.20}. Create the file again with this version"
        )


def load(
    path: Path,
    what: str,
    read: Callable[[Any], T],
    *,
    most: int,
    parse: Callable[[str], Any] = json.loads,
) -> T:
    """Reads a file, parses it, and converts the data to a record.

    Args:
        path: The file.
        what: What the file should contain, for the error message.
        read: Converts the data to a record. May raise ValueError.
        most: The maximum size of the file in bytes.
        parse: Parses the text of the file.

    Raises:
        ValueError: The file's content isn't valid, or it's larger than `most` bytes.
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
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"it has {size} bytes, and more than {most} bytes are not supported")
    return path.read_text()


def save(path: str | Path, data: Any) -> Path:
    """Writes plain data as JSON, and returns the path.

    Raises:
        ValueError: A number is NaN or infinite, which JSON can't represent.
    """
    path = Path(path)
    path.write_text(json.dumps(data, allow_nan=False, indent=1))
    return path


def spelt(value: Any) -> Any:
    """Replaces numbers that JSON can't represent by the strings `"nan"`, `"inf"` and `"-inf"`."""
    if isinstance(value, dict):
        return {key: spelt(each) for key, each in value.items()}
    if isinstance(value, list):
        return [spelt(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def unspelt(value: Any) -> Any:
    """Reverses `spelt` for a value or a list of values. Leaves all other strings unchanged."""
    if isinstance(value, list):
        return [unspelt(each) for each in value]
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
