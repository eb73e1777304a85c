"""Lists the jobs whose checkpoints are in a folder, including those added during a run.

A restart needs this for two reasons. First, any jobs that were added or submitted during the
earlier run have to take part in the new run from the start. Second, the restart mustn't write to
the folder if another process is still using it. The file `jobs.json` contains the lists `jobs`,
`added` and `submitted`, the process that uses the folder, and some information for human readers.
It's parsed as untrusted data.
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
    """The jobs in a folder of checkpoints, except those that are known to have ended.

    Attributes:
        jobs: The names of all jobs.
        added: The names of the jobs added during a run.
        submitted: The submissions of jobs that rank 0 has submitted: maps their names to texts.
        process: Rank 0's process in the run that uses the folder; None if that run has ended.
    """

    jobs: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    submitted: Mapping[str, str]
    process: ProcessId | None = None


def read(file: Path) -> JobList:
    """Reads the list of jobs from a file, which is empty if the file doesn't exist.

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
    """Parses the contents of such a file.

    Raises:
        UnusableError: The contents aren't a list of jobs.
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
    """Returns the process given in the file, or None if the value isn't valid."""
    names = {"host": str, "machine": str, "pid": int, "started": int}
    if not isinstance(value, dict) or {name: type(each) for name, each in value.items()} != names:
        return None
    return ProcessId(**value)
