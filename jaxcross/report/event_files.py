"""Reads the ranks' event files after a run, to find out what each rank was doing when it ended.

We don't trust these files: every line is validated, and there's a limit on how much we read. A rank
that's killed in the middle of a write leaves a truncated line behind, so an unreadable last line
doesn't count as damage.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from jaxcross._endings import ExitKind

VERSION = 1
MOST_RANKS = 10_000
MOST_BYTES = 32 << 20
MOST_LINE_BYTES = 16 << 10
_LONGEST_TEXT = 2000
_LAST_S = 1e11  # the year 5138
_MOST_PLACES = 8
_CHECKPOINT = re.compile(r"\d{12}-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An operation that a rank began.

    Attributes:
        what: The kind of operation: `exchange`, `vote`, `compute`, `compile`, ... ...
        job: Name of the job, or "".
        step: Step of the job.
        segment: Segment of its program, or -1 if the operation isn't a segment.
        number: If this operation waits for other ranks, its position in the sequence of such waits,
            which is identical across ranks. Otherwise 0.
        at_s: When it began, in seconds since 1970.
    """

    what: str
    job: str
    step: int
    segment: int
    number: int
    at_s: float

    def __str__(self) -> str:
        parts = [f"job {self.job!r}"] if self.job else []
        parts += [f"step {self.step}"] if self.job or self.step else []
        parts += [f"segment {self.segment}"] if self.segment >= 0 else []
        return f"{', '.join(parts)} ({self.what})" if parts else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """A rank's part of a job's checkpoint.

    Attributes:
        name: The checkpoint's name. Sorting by name puts newer checkpoints last.
        any_ranks: Whether a different number of ranks can resume from it.
    """

    name: str
    any_ranks: bool

    @property
    def step(self) -> int:
        """The job's step when the checkpoint was saved."""
        return int(self.name.partition("-")[0])


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """The contents of one rank's event file.

    Attributes:
        rank, size, host, pid, run: The values in the file's header.
        last_s: The rank's last sign of life, in seconds since 1970.
        under_way: Operations that had begun but not ended, by token.
        done: The last operation to end, across all jobs.
        done_of: For each job that was still running, the last operation it completed.
        entered: How many waits for other ranks this rank had begun.
        exit_kind: How the rank ended according to its last record (an `ExitKind`); "" if it didn't
            get to write such a record.
        text: The text of that record.
        activity: The operation that the rank was in, according to that record.
        lost: The ranks that this record reports as lost.
        script_raised: Whether the script raised an exception, according to the last record. If
            `exit_kind` is `failed`, it was raised on this rank; if `exit_kind` is `aborted`, on
            another rank, which then made this one end.
        unread: Number of lines that couldn't be read.
        saved: For each job, the newest checkpoint for which this rank's part is on disk.
    """

    rank: int
    size: int
    host: str
    pid: int
    run: str
    last_s: float
    under_way: dict[int, Begun] = field(default_factory=dict)
    done: Begun | None = None
    done_of: dict[str, Begun] = field(default_factory=dict)
    entered: int = 0
    exit_kind: str = ""
    text: str = ""
    activity: str = ""
    lost: tuple[int, ...] = ()
    script_raised: bool = False
    unread: int = 0
    saved: dict[str, SavedPart] = field(default_factory=dict)

    @property
    def where(self) -> Begun | None:
        """The operation that the rank was in when it ended; None if there was none.

        A rank has several threads, so it may have been in the middle of several operations. If it
        was waiting for other ranks, we return that wait, since the first question in a post-mortem
        is who was waiting for whom. Otherwise we return the operation that began last.
        """
        now = sorted(self.under_way.values(), key=lambda b: (b.number > 0, b.at_s))
        return now[-1] if now else None

    @property
    def place(self) -> str:
        """The operation that the rank was in, as text."""
        if self.exit_kind == ExitKind.FAILED and self.activity:
            return self.activity  # the exception has already ended the operation that raised it
        where = self.where
        if where is None:
            if self.done is None:
                return "outside of any step"
            return f"outside of any step, after {self.done}"
        if where.job:
            return f"in {where}"
        other = max(
            (b for b in self.under_way.values() if b.job), key=lambda b: b.at_s, default=None
        )
        if other is not None:
            return f"in {where}, alongside {other}"
        return f"in {where}" if self.done is None else f"in {where}, after {self.done}"

    @property
    def places(self) -> str:
        """All operations that the rank was in, as text.

        When a rank dies without saying why, any of its threads could be the cause, so we list the
        operations of all of them.

        A job with no operation in progress was running its own code, e.g. between two steps. Event
        files don't record what that code does, so we name the last operation that the job completed
        instead.
        """
        if self.exit_kind or self.where is None:
            return self.place
        rest = sorted(
            (b for b in self.under_way.values() if b is not self.where and b.job),
            key=lambda b: -b.at_s,
        )
        idle = self.done_of.keys() - {b.job for b in self.under_way.values()}
        own = sorted((self.done_of[job] for job in idle), key=lambda b: -b.at_s)
        listed = [*map(str, rest), *(f"job {b.job!r} after step {b.step} ({b.what})" for b in own)][
            :_MOST_PLACES
        ]
        return f"in {self.where}{', alongside ' if listed else ''}{' and '.join(listed)}"


def read_event_files(
    folder: str | os.PathLike[str],
    *,
    tail_bytes: int | None = None,
    skipped: dict[int, str] | None = None,
) -> list[RankRecord]:
    """Reads the records of the latest run in `folder`, sorted by rank.

    A rank leaves an empty file behind if it was killed right after starting, or if the disk was
    full. We skip such files (and anything else that doesn't start like an event file) so that the
    other ranks' records remain usable, and only raise an error if none of the files can be read.

    Args:
        folder: The event folder.
        tail_bytes: How many bytes to read from the end of each file, which keeps frequent polling
            of a long run cheap. If None, reads up to 32 MiB per file, along with the older part of
            the file if it has been rotated.
        skipped: If given, we add an entry for each skipped file: its rank, and the reason.

    Raises:
        ValueError: There are no event files, or none that this version can read; the message says
            which.
        OSError: The folder can't be read, or none of the files can.
    """
    names = [
        (int(m[1]), name)
        for name in sorted(os.listdir(folder))
        if (m := re.fullmatch(r"rank-(\d{1,6})\.jsonl", name))
    ]
    if not names:
        raise ValueError(
            f"`{folder}` holds no event files (`rank-0.jsonl`, ...). Name the folder to which the "
            "ranks write them, i.e. `JAXCROSS_EVENTS` or `Runner(events=...)`. `jaxcross launch` "
            "sets `JAXCROSS_EVENTS` to its `--events`."
        )
    if len(names) > MOST_RANKS:
        raise ValueError(
            f"`{folder}` holds {len(names)} event files, but those of at most {MOST_RANKS} ranks "
            "can be read. Copy the files of fewer ranks to a different folder."
        )
    records: list[RankRecord] = []
    errors: dict[int, OSError | ValueError] = {}
    for rank, name in names:
        try:
            records.append(_read_rank(Path(folder) / name, rank, tail_bytes))
        except (OSError, ValueError) as error:
            errors[rank] = error
    if not records:
        raise next(iter(errors.values()))
    if skipped is not None:
        skipped.update({rank: str(error) for rank, error in errors.items()})
    latest = max(records, key=lambda record: record.last_s)
    return sorted(
        (r for r in records if r.run == latest.run and r.rank < latest.size), key=lambda r: r.rank
    )


def _read_rank(path: Path, rank: int, tail_bytes: int | None) -> RankRecord:
    if tail_bytes is not None:
        return _read_file(path, rank, None, tail_bytes)
    record = _read_file(path, rank, None)
    old = path.with_suffix(".old.jsonl")
    if old.exists():
        try:
            before = _read_file(old, rank, None)
        except ValueError:
            return record  # written by another version, hence by another run
        if (before.run, before.pid, before.host) == (record.run, record.pid, record.host):
            return _read_file(path, rank, before)
    return record


def _read_file(
    path: Path, rank: int, before: RankRecord | None, tail_bytes: int | None = None
) -> RankRecord:
    """Reads the end of one file.

    Ranks rotate their event file when it gets long. If this is the newer part of a rotated file,
    `before` is the record of the older part, which we update in place.
    """
    # Don't follow symlinks out of the folder, and don't block on a pipe that has no writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        facts = os.fstat(stream.fileno())
        most_bytes = tail_bytes or MOST_BYTES
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(
                f"`{path}` is not a regular file, but e.g. a folder or a pipe. Move it out of the "
                "event folder."
            )
        if not facts.st_size:
            raise ValueError(
                f"`{path}` is empty: its rank was killed at its start, or the disk was full."
            )
        header = _parse(stream.readline(MOST_LINE_BYTES)) or {}
        if facts.st_size > most_bytes:
            stream.seek(-most_bytes, os.SEEK_END)
            stream.readline(MOST_LINE_BYTES)
        lines = stream.read(most_bytes).split(b"\n")
    version = header.get("jaxcross")
    start_s = header.get("time")
    start_ns = header.get("at")
    if (
        version != VERSION
        or not isinstance(start_s, int | float)
        or not 0 <= start_s < _LAST_S
        or not _is_int(start_ns)
    ):
        raise ValueError(
            f"`{path}` does not begin as an event file of version {VERSION} does, so it is damaged "
            "or was written by a different version of jaxcross. Read it with that version."
        )
    record = before or RankRecord(
        rank=rank,
        size=max(_int(header, "size"), rank + 1),
        host=_text(header, "host"),
        pid=_int(header, "pid"),
        run=_text(header, "run"),
        last_s=float(start_s),
    )
    record.under_way.clear()  # each file starts with the operations in progress
    for n, line in enumerate(lines):
        event = _parse(line)
        if event is not None and _is_int(event.get("at")):
            _take(record, event, float(start_s) + (event["at"] - start_ns) / 1e9)
        elif n < len(lines) - 1:  # a process that died mid-write leaves a torn last line
            record.unread += 1
    return record


def _take(record: RankRecord, event: Mapping[str, Any], at_s: float) -> None:
    record.last_s = max(record.last_s, at_s)
    begins = event.get("begin")
    ends = event.get("end")
    if _is_int(begins):
        begun = Begun(
            what=_text(event, "what"),
            job=_text(event, "job"),
            step=_int(event, "step"),
            segment=_int(event, "segment"),
            number=_int(event, "number"),
            at_s=at_s,
        )
        record.under_way[begins] = begun
        record.entered = max(record.entered, begun.number)
    elif _is_int(ends):
        ended = record.under_way.pop(ends, None)
        if ended is not None and ended.job:
            record.done = ended
            record.done_of[ended.job] = ended
    elif _text(event, "note").startswith(("done: ", "closed: ")):
        record.done_of.pop(_text(event, "job"), None)
    elif "checkpoint" in event:
        name = _text(event, "checkpoint")
        if _CHECKPOINT.fullmatch(name):
            record.saved[_text(event, "job")] = SavedPart(
                name=name, any_ranks=event.get("any_ranks") is True
            )
    elif "exit" in event:
        record.exit_kind = _text(event, "exit")
        record.text = _text(event, "text")
        record.activity = _text(event, "activity")
        lost = event.get("lost")
        record.lost = tuple(r for r in lost if _is_int(r)) if isinstance(lost, list) else ()
        record.script_raised = event.get("script_raised") is True


def _parse(line: bytes) -> dict[str, Any] | None:
    if len(line) > MOST_LINE_BYTES:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _int(event: Mapping[str, Any], name: str) -> int:
    value = event.get(name)
    return value if _is_int(value) else 0


def _text(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else " " for c in value[:_LONGEST_TEXT])
