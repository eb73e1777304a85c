"""Reads `jobs.toml`, a hand-written file that lists the jobs of a plan."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxcross._schema import read_text
from jaxcross.errors import clause
from jaxcross.plan.plan import MAX_NAME
from jaxcross.step import Profile

MAX_FILE_BYTES = 10_000_000
MAX_JOBS = 100_000
_TOP = {"script", "job"}
_JOB = {"name", "profile", "ranks", "steps"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsFile:
    """The jobs to plan.

    Attributes:
        profiles: The profiles of all jobs, each renamed to its job.
        steps: Number of steps that each job has to make; None if the file doesn't say so.
        script: Path of the script that runs a group of jobs; "" if the file names none.
        notes: Remarks to show with a plan of these jobs.
    """

    profiles: tuple[Profile, ...]
    steps: Mapping[str, float] | None
    script: str = ""
    notes: tuple[str, ...] = ()


def read_jobs(path: Path, *, profiles: Path | None = None) -> JobsFile:
    """Reads the file, along with all profiles that it names.

    Args:
        path: The file.
        profiles: The folder that paths of profiles are relative to. Defaults to the file's folder.

    Raises:
        ValueError: The file or a profile has invalid content, or a profile can't be read. The
            message says which file it is, and where the problem is.
        OSError: The file can't be read.
    """
    try:
        data = tomllib.loads(read_text(path, MAX_FILE_BYTES))
        _check_keys(data, _TOP, "the file")
        rows = data.get("job")
        if (
            not isinstance(rows, list)
            or not 0 < len(rows) <= MAX_JOBS
            or not all(isinstance(r, dict) for r in rows)
        ):
            raise ValueError(f"the file must have 1 to {MAX_JOBS} jobs, each in a table `[[job]]`")
        script = data.get("script", "")
        if not isinstance(script, str):
            raise ValueError(f"`script` must be the path of a script, got {script!r:.60}")
        named = _named(rows)
        steps = _steps(named)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}`: {clause(str(error))}.") from error
    folder = path.parent if profiles is None else profiles
    loaded: dict[Path, Profile] = {}
    found = []
    elsewhere = []
    for name, row in named.items():
        for file in row["profile"]:
            place = folder / file
            if place not in loaded:
                loaded[place] = _profile(place, name)
            profile = replace(loaded[place], name=name)
            ranks = row.get("ranks", profile.ranks)
            if ranks != profile.ranks:
                elsewhere.append(f"`{name}` ({ranks} instead of {profile.ranks})")
                profile = replace(profile, ranks=ranks, rank_seconds=())
            found.append(profile)
    return JobsFile(
        profiles=tuple(found), steps=steps, script=script, notes=tuple(_notes(elsewhere))
    )


def _notes(elsewhere: list[str]) -> list[str]:
    """Returns a remark about the jobs that were measured on a different number of ranks."""
    if not elsewhere:
        return []
    shown = ", ".join(list(dict.fromkeys(elsewhere))[:3]) + " ..." * (len(set(elsewhere)) > 3)
    return [
        (
            "Planned for other numbers of ranks than measured, assuming that exchanges take as "
            f"long and that all ranks are as fast as the slowest that was measured: {shown}."
        )
    ]


def _named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Checks each job's table. Returns the tables by name, each with a list of profiles."""
    named: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        name = row.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ValueError(
                f"`name` of job {number} must be 1 to {MAX_NAME} printable characters, got "
                f"{name!r:.60}"
            )
        if name in named:
            raise ValueError(f"two jobs have the name `{name}`. Give each job a different name")
        _check_keys(row, _JOB, f"job `{name}`")
        files = row.get("profile")
        files = [files] if isinstance(files, str) else files
        if (
            not isinstance(files, list)
            or not files
            or not all(isinstance(file, str) and file for file in files)
        ):
            raise ValueError(
                f"`profile` of job `{name}` must be a file, or a list of files for several cuts, "
                f"got {row.get('profile')!r:.60}"
            )
        ranks = row.get("ranks", 1)
        if type(ranks) is not int or not 1 <= ranks <= 10_000_000:
            raise ValueError(
                f"`ranks` of job `{name}` must be a whole number of at least 1, got {ranks!r:.60}"
            )
        named[name] = {**row, "profile": files}
    return named


def _steps(named: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
    steps = {name: row["steps"] for name, row in named.items() if "steps" in row}
    for name, count in steps.items():
        if type(count) not in (int, float) or not 0 < count < 2**63 or math.isnan(count):
            raise ValueError(f"`steps` of job `{name}` must be a number above 0, got {count!r:.60}")
    if steps and len(steps) < len(named):
        missing = next(name for name in named if name not in steps)
        raise ValueError(
            f"job `{missing}` has no `steps`, but other jobs have. Give `steps` to all jobs, or "
            "to none"
        )
    return {name: float(count) for name, count in steps.items()} or None


def _profile(place: Path, name: str) -> Profile:
    try:
        return Profile.load(place)
    except OSError as error:
        reason = clause(error.strerror or str(error))
        raise ValueError(
            f"the profile `{place}` of job `{name}` cannot be read: {reason}. Write it with "
            f"`jaxcross plan --profile-of REPORT {name} {place}`."
        ) from error


def _check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        raise ValueError(
            f"{where} has the unknown key `{unknown[0]:.60}`. The known keys are "
            f"{', '.join(sorted(known))}"
        )
