"""Which jobs a set of checkpoints has, beside those that the command adds: what joined during a run, or was submitted.

jobs.json     the set: every job that is not known to be over, and what was submitted; read as data from a stranger
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxcross.checkpoint.part import UnusableError

MAX_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The jobs of a set.

    Attributes:
        jobs: Their names.
        submitted: Of those that rank 0 submitted, the text by which it did.
    """

    jobs: tuple[str, ...] = ()
    submitted: Mapping[str, str]


def read(file: Path) -> Members:
    """What the file of a set says; nothing if there is none.

    Raises:
        UnusableError: It is no such file.
        OSError: It cannot be read.
    """
    if not file.exists():
        return Members(submitted={})
    if not file.is_file() or file.is_symlink() or file.stat().st_size > MAX_BYTES:
        raise UnusableError(f"`{file}` is no list of jobs")
    return parse(file.read_bytes())


def parse(content: bytes) -> Members:
    """The set in the text of its file.

    Raises:
        UnusableError: It says no such thing.
    """
    try:
        said = json.loads(content)
        jobs, submitted = said["jobs"], said.get("submitted", {})
        texts = [*jobs, *submitted, *submitted.values()]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise UnusableError(f"is no list of jobs ({type(error).__name__})") from None
    if type(jobs) is not list or not all(type(text) is str for text in texts):
        raise UnusableError("is no list of jobs")
    return Members(jobs=tuple(dict.fromkeys(jobs)), submitted=dict(submitted))
