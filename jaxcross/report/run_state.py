"""Reads the state of a run from its event folder: how far along it is, or how it ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxcross._endings import ExitKind
from jaxcross.report.event_files import Begun, RankRecord, read_event_files
from jaxcross.report.progress import JobProgress, RunProgress, doing_text, read_progress

TAIL_BYTES = 64 << 10
"""How many bytes we read from the end of each rank's event file. Skipping the rest keeps frequent
polling cheap, even for a long run.
"""

_GONE_S = 5.0
_QUIET_S = 30.0
_LATE_S = 2.0
_MOST_RANKS = 64
_ALONE = ("compute", "compile", "checkpoint")
_OWN = "own "


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run.

    Attributes:
        records: The ranks' records, from the ends of their event files.
        run: How far along its jobs are; None if it hasn't run any jobs yet.
        ended: Whether its processes have ended, as far as we can tell from here.
        how: How its processes ended, or what's wrong with them.
        skipped: Why a rank's event file couldn't be read, by rank.
    """

    records: Sequence[RankRecord]
    run: RunProgress | None
    ended: bool
    how: str
    skipped: Mapping[int, str]


def read_state(folder: str | os.PathLike[str], now_s: float) -> RunState:
    """Reads the state of the latest run in `folder` at the time `now_s`, in seconds since 1970.

    Raises:
        ValueError: The folder contains no event files that this version can read.
        OSError: The folder can't be read.
    """
    skipped: dict[int, str] = {}
    records = read_event_files(folder, tail_bytes=TAIL_BYTES, skipped=skipped)
    run = read_progress(folder)
    if run is not None and run.run != records[0].run:
        run = None  # left by an earlier run
    if run is not None:
        run = with_late_ranks(run, records)
    ended, how = _end(records, run, now_s)
    return RunState(records=records, run=run, ended=ended, how=how, skipped=skipped)


def read_run(folder: str | os.PathLike[str]) -> RunProgress | None:
    """Reads how far along the latest run in `folder` is. Returns None if no run has begun.

    When a job is waiting for other ranks, the progress file doesn't say which. The ranks' event
    files do, but there's one per rank, so reading them is far more expensive. We only do so when a
    job has been in the same operation for a while.

    Raises:
        ValueError: A file is damaged, or was written by another version.
        OSError: A file can't be read.
    """
    run = read_progress(folder)
    if run is None or not any(job.doing_s >= _LATE_S and not job.status for job in run.jobs):
        return run
    records = read_event_files(folder, tail_bytes=TAIL_BYTES)
    return with_late_ranks(run, records) if records[0].run == run.run else run


def _end(records: Sequence[RankRecord], run: RunProgress | None, now_s: float) -> tuple[bool, str]:
    failed = [
        record for record in records if record.exit_kind and record.exit_kind != ExitKind.LEFT
    ]
    for record in sorted(failed, key=lambda each: (each.exit_kind != ExitKind.FAILED, each.last_s)):
        subject = f"rank {record.rank} "
        says_it = record.text.startswith((f"{subject}failed", f"{subject}was "))
        if says_it:
            return True, record.text
        return True, f"{subject}{_ENDS.get(record.exit_kind, 'ended')}: {record.text}"
    first = records[0]
    if first.exit_kind == ExitKind.LEFT:
        return True, ""
    quiet_s = now_s - max(first.last_s, 0.0 if run is None else run.at_s)
    here = first.host == os.uname().nodename and Path("/proc/self").exists()
    if quiet_s > _GONE_S and here and not Path(f"/proc/{first.pid}").exists():
        return True, f"rank {first.rank} ended without a word"
    if quiet_s > _QUIET_S:
        return False, f"no sign of life for {quiet_s:.0f} s: it was stopped, or its host is gone"
    return False, ""


_ENDS: dict[str, str] = {
    ExitKind.FAILED: "failed",
    ExitKind.TERMINATED: "received SIGTERM",
    ExitKind.INTERRUPTED: "was interrupted",
    ExitKind.REPORTED: "reported a failure",
    ExitKind.ABORTED: "was ended by another rank",
}


def with_late_ranks(run: RunProgress, records: Sequence[RankRecord]) -> RunProgress:
    """Adds which ranks each job of rank 0 is waiting for, if the event files show it.

    Progress comes from rank 0, which knows that a job is waiting for other ranks but not which. The
    other ranks' event files fill that gap: rank 0 is waiting for every rank that hasn't begun the
    same operation yet. Returns a new object.
    """
    if run.over or not 1 < len(records) <= _MOST_RANKS or records[0].rank != 0:
        return run
    return replace(run, jobs=tuple(_with_late_ranks(job, records) for job in run.jobs))


def _with_late_ranks(job: JobProgress, records: Sequence[RankRecord]) -> JobProgress:
    own = [begun for begun in records[0].under_way.values() if begun.job == job.name]
    waits = [begun for begun in own if begun.what not in _ALONE and not begun.what.startswith(_OWN)]
    if (
        job.status
        or job.doing_s < _LATE_S
        or not waits
        or any(begun.what == "compile" for begun in own)
    ):
        return job
    what = min(waits, key=lambda begun: begun.at_s).what
    late: dict[int, Begun | None] = {}
    for record in records[1:]:
        theirs = [begun for begun in record.under_way.values() if begun.job == job.name]
        if not record.exit_kind and not any(begun.what == what for begun in theirs):
            late[record.rank] = min(theirs, key=lambda begun: begun.at_s, default=None)
    if not late or len(late) == len(records) - 1 > 1:
        return job
    names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
    doing = {None if begun is None else begun.what for begun in late.values()}
    only = doing.pop() if len(doing) == 1 else None
    if only is None:
        return replace(job, doing=f"waiting for {names}")
    return replace(
        job, doing=f"{names} {doing_text(only.removeprefix(_OWN), local=only.startswith(_OWN))}"
    )
