"""The jobs in a set of checkpoints: the command's own, and those that joined during a run.

The list is in `jobs.json`, which is parsed as untrusted data. It contains `jobs`, `added`,
`submitted`, the process that uses the folder, and some facts for people.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxcross.checkpoint.part import UnusableError
from jaxcross.health import ProcessId

MAX_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """The jobs of a set that aren't known to have ended.

    Attributes:
        jobs: The names of all of them.
        added: Names of those that joined during a run.
        submitted: The texts with which rank 0 submitted jobs, by the job's name.
        process: Rank 0 of the run that uses the folder; None if that run has closed it.
    """

    jobs: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    submitted: Mapping[str, str]
    process: ProcessId | None = None


def read(file: Path) -> JobList:
    """Reads a set's file. Returns an empty list if there is none.

    Raises:
        UnusableError: The file isn't a list of jobs.
        OSError: The file can't be read.
    """
    try:
        about = file.lstat()
    except FileNotFoundError:
        return JobList(submitted={})
    if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
        raise UnusableError("is not a list of jobs")
    return parse(file.read_bytes())


def parse(content: bytes) -> JobList:
    """Parses the text of a set's file.

    Raises:
        UnusableError: The text isn't a list of jobs.
    """
    try:
        body = json.loads(content)
        jobs = body["jobs"]
        added = body.get("added", [])
        submitted = body.get("submitted", {})
        names = [*jobs, *added, *submitted]
        texts = submitted.values()
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise UnusableError(f"is not a list of jobs ({type(error).__name__})") from None
    if not type(jobs) is type(added) is list or not all(
        type(text) is str for text in (*names, *texts)
    ):
        raise UnusableError("is not a list of jobs")
    if not all(name and name.isprintable() for name in names):
        raise UnusableError("has names that no job can have")
    return JobList(
        jobs=tuple(dict.fromkeys(names)),
        added=tuple(dict.fromkeys([*added, *submitted])),
        submitted=dict(submitted),
        process=_process(body.get("process")),
    )


def _process(value: Any) -> ProcessId | None:
    """Returns the process that a file names, or None if the value is malformed."""
    names = {"host": str, "machine": str, "pid": int, "started": int}
    if not isinstance(value, dict) or {name: type(each) for name, each in value.items()} != names:
        return None
    return ProcessId(**value)
