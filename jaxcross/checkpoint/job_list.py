"""Which jobs a set of checkpoints has: those that a command adds, and what joined during a run.

jobs.json     the set, as data from a stranger: jobs, added, submitted, and what else a person may want to know
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxcross.checkpoint.part import UnusableError

MAX_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The jobs of a set that are not known to have ended.

    Attributes:
        jobs: All their names.
        added: Of those that joined during a run.
        submitted: Of those that rank 0 submitted, by name: the text by which it did.
    """

    jobs: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    submitted: Mapping[str, str]


def read(file: Path) -> Members:
    """What the file of a set says; nothing if there is none.

    Raises:
        UnusableError: It is no such file.
        OSError: It cannot be read.
    """
    try:
        about = file.lstat()
    except FileNotFoundError:
        return Members(submitted={})
    if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
        raise UnusableError("is no list of jobs")
    return parse(file.read_bytes())


def parse(content: bytes) -> Members:
    """The set in the text of its file.

    Raises:
        UnusableError: It says no such thing.
    """
    try:
        said = json.loads(content)
        jobs, added, submitted = said["jobs"], said.get("added", []), said.get("submitted", {})
        names, texts = [*jobs, *added, *submitted], submitted.values()
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise UnusableError(f"is no list of jobs ({type(error).__name__})") from None
    if not type(jobs) is type(added) is list or not all(type(text) is str for text in (*names, *texts)):
        raise UnusableError("is no list of jobs")
    if not all(name and name.isprintable() for name in names):
        raise UnusableError("has names that no job can have")
    return Members(
        jobs=tuple(dict.fromkeys(names)),
        added=tuple(dict.fromkeys([*added, *submitted])),
        submitted=dict(submitted),
    )
