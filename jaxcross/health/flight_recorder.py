"""The flight recorder, which writes this rank's activities to a file as they happen.

You'll read this file after a run has failed, so it has to survive anything that can end a process,
even `kill -9`. Events that are collected in memory and written at the end would be lost in exactly
those cases. So each event becomes a line that's written immediately, by a single unbuffered
`write`. Once `write` returns, the line is in the kernel, and the death of the process can't affect
it any more. The file is opened in append mode, so threads don't overwrite each other's lines. We
don't call `fsync`, which would only protect against power failures, but make the thread wait for
the disk.

The file must not fill up the disk, even in a run that takes weeks. So when it reaches its maximum
size, we start a new file and keep only the previous one. The new file begins with all activities in
progress, so it makes sense on its own.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import final

from jaxcross._endings import ExitKind
from jaxcross._files import with_time, write_whole
from jaxcross.errors import shortened
from jaxcross.health.activity import Activity
from jaxcross.health.process import ProcessId

_log = logging.getLogger(__name__)
_quoted = lru_cache(4096)(json.dumps)

VERSION = 1
LIMIT_BYTES = 8 << 20
"""Maximum size of a file. A rank keeps two files, so it can't fill the disk."""

_LONGEST_TEXT = 2000


@final
class FlightRecorder:
    """This rank's current activities and, if there's a folder, its event file. Thread-safe.

    Each line is written by a single unbuffered write, so nothing is lost no matter how the process
    ends. Recording never waits for other ranks. If a write fails, e.g. because the disk is full,
    this rank stops recording, but training continues.

    Args:
        processes: The process of every rank.
        rank: This rank.

    Attributes:
        work_begun: Set as soon as a job's first activity begins.
    """

    def __init__(self, processes: Sequence[ProcessId], rank: int) -> None:
        self._processes = processes
        self._rank = rank
        self.work_begun = threading.Event()
        self._tokens = itertools.count(1)
        self._open: dict[int, Activity] = {}
        self._last: Activity | None = None  # the job activity that ended most recently
        self._saved: dict[str, str] = {}  # for each job, the line about its newest checkpoint
        self._file = -1
        self._previous = -1
        self._path = Path()
        self._written_bytes = 0
        self._rotating = threading.Lock()
        self._exit_recorded = False
        self._left_by = threading.local()  # each thread's last activity that raised

    def record_to(self, folder: str | os.PathLike[str]) -> None:
        """Starts recording to `rank-K.jsonl` in `folder`, which is created if it doesn't exist.

        Raises:
            OSError: The folder or the file can't be created.
            ValueError: The folder's name contains an unknown placeholder.
        """
        folder = with_time(folder).absolute()  # the script may change its working directory later
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self._rank}.jsonl"
        with self._rotating:  # another thread may be starting a new file right now
            if path != self._path:
                self._path = path
                self._start_file()

    def begin(self, activity: Activity) -> int:
        """Records the beginning of an activity and returns a token for `end`."""
        token = next(self._tokens)
        self._open[token] = activity
        if activity.job and not self.work_begun.is_set():
            self.work_begun.set()
        if self._file >= 0:
            self._write(_begun(token, activity, time.monotonic_ns()))
        return token

    def end(self, token: int, *, failed: bool = False) -> None:
        """Records the end of an activity. With `failed`, it ended with an exception."""
        activity = self._open.pop(token)
        if failed:
            self._left_by.activity = activity
        if activity.job:
            self._last = activity
        if self._file >= 0:
            self._write(_ended(token, time.monotonic_ns()))

    @contextmanager
    def during(
        self, what: str, *, job: str = "", step: int = 0, segment: int = -1
    ) -> Iterator[None]:
        """Returns a context that's recorded as an activity."""
        token = self.begin(Activity.now(what, job=job, step=step, segment=segment))
        try:
            yield
        except BaseException:
            self.end(token, failed=True)
            raise
        self.end(token)

    def current(self) -> tuple[Activity, ...]:
        """Returns the activities in progress, oldest first."""
        return tuple(self._open.copy().values())

    @property
    def run(self) -> str:
        """A name for this run. Identical across ranks."""
        first = self._processes[0]
        return f"{first.host} {first.pid} {first.started}"

    def replace_file(self, name: str, text: str) -> None:
        """Replaces a small file in the event file's folder.

        The replacement is atomic, so readers see either the old text or the new one. If writing
        fails, logs a warning.
        """
        if self._file < 0:
            return
        path = self._path.with_name(name)
        try:
            write_whole(path, text, durable=False)
        except OSError as error:
            _log.warning(
                "rank %d cannot write `%s`, but training continues: %s. Check the folder's space "
                "and permissions.",
                self._rank,
                path,
                error,
            )

    def beat(self) -> None:
        """Records that this rank is alive."""
        if self._file >= 0:
            self._write(f'{{"beat":1,"at":{time.monotonic_ns()}}}\n')

    def note(self, text: str, *, job: str = "", step: int = 0) -> None:
        """Records something that may be of interest after a failure."""
        self._record(note=shortened(text, _LONGEST_TEXT), job=job, step=step)

    def checkpoint(self, name: str, *, job: str, any_ranks: bool) -> None:
        """Records a job's newest checkpoint, once this rank has written its part of it.

        The record is repeated at the beginning of every later file.

        Args:
            name: The checkpoint's name.
            job: The job's name.
            any_ranks: Whether a different number of ranks can resume from it.
        """
        facts = {"checkpoint": name, "job": job, "any_ranks": any_ranks, "at": time.monotonic_ns()}
        self._saved[job] = json.dumps(facts) + "\n"
        if self._file >= 0:
            self._write(self._saved[job])

    def record_exit(
        self, kind: ExitKind, text: str, lost: Sequence[int] = (), *, script_raised: bool = False
    ) -> str:
        """Records why this rank exits, and returns what it was doing, as text.

        The returned text is meant for error messages. After a failure, it describes the activity
        that raised the exception, even if that activity is over by now.

        Only the first reason is recorded, because later reasons are usually just its consequences.

        Args:
            kind: How the rank exits.
            text: The reason.
            lost: The ranks that this rank reports.
            script_raised: Whether the script raised an exception, either on this rank or on the
                rank because of which this one exits.
        """
        left_by: Activity | None = getattr(self._left_by, "activity", None)
        failed_in = left_by if kind == ExitKind.FAILED else None
        activity = self.describe() if failed_in is None else f"in {failed_in}"
        if not self._exit_recorded:
            self._exit_recorded = True
            self._record(
                exit=kind,
                text=shortened(text, _LONGEST_TEXT),
                lost=list(lost),
                activity=activity,
                script_raised=script_raised,
            )
        return activity

    def describe(self) -> str:
        """Returns what this rank is doing, as text.

        A wait for other ranks takes precedence. Otherwise, this is the activity that began last.
        """
        now = list(self._open.copy().values())
        if not now:
            if self._last is None:
                return "outside of any step"
            return f"outside of any step, after {self._last}"
        first = next((activity for activity in reversed(now) if activity.number), now[-1])
        if first.job:
            return f"in {first}"
        other = next((activity for activity in reversed(now) if activity.job), None)
        if other is not None:
            return f"in {first.what}, alongside {other}"
        return f"in {first.what}" if self._last is None else f"in {first.what}, after {self._last}"

    def _record(self, **facts: object) -> None:
        if self._file >= 0:
            self._write(json.dumps({**facts, "at": time.monotonic_ns()}) + "\n")

    def _write(self, line: str) -> None:
        try:
            # Encode the line before reading `self._file`, because another thread may get to run
            # during the encoding and start a new file.
            text = line.encode()
            written = os.write(self._file, text)
            # Don't merge this with the write. In a single statement, Python would read the old
            # count before the write, and we'd lose whatever other threads add to it during the
            # write.
            self._written_bytes += written
            if self._written_bytes > LIMIT_BYTES and self._rotating.acquire(blocking=False):
                try:
                    # Another thread may have started a new file a moment ago, in which case our
                    # byte count still refers to the previous file. If we trusted it, we might start
                    # yet another file, which would delete the previous file with most of the
                    # history. So ask the kernel for the size of the current file.
                    self._written_bytes = os.fstat(self._file).st_size
                    if self._written_bytes > LIMIT_BYTES:
                        self._start_file()
                finally:
                    self._rotating.release()
        except OSError as error:
            self._file = -1
            _log.warning(
                "rank %d no longer records its events in `%s`, but training continues: %s. Check "
                "the folder's space and permissions before the next run.",
                self._rank,
                self._path.parent,
                error,
            )

    def _start_file(self) -> None:
        """Starts a new file with the activities in progress. Keeps the previous file."""
        now_ns = time.monotonic_ns()
        own = self._processes[self._rank]
        header = {
            "jaxcross": VERSION,
            "run": self.run,
            "rank": self._rank,
            "size": len(self._processes),
            "host": own.host,
            "pid": own.pid,
            "time": time.time(),
            "at": now_ns,
        }
        under_way = self._open.copy()
        lines = [
            json.dumps(header) + "\n",
            *self._saved.copy().values(),
            *_all_begun(under_way, now_ns),
        ]
        text = "".join(lines).encode()
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)  # left behind by a run that was killed at this point
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o644)
        os.write(file, text)
        if self._path.exists():
            os.replace(self._path, self._path.with_suffix(".old.jsonl"))
        os.replace(new, self._path)
        # Keep the old file open until the next rotation. Another thread may have picked up its
        # descriptor just before the switch, and be about to write to it.
        stale = self._previous
        self._previous = self._file
        self._file = file
        self._written_bytes = len(text)
        # While we were creating the new file, other threads may have recorded beginnings and ends
        # of activities in the old file. Repeat these lines in the new file; duplicates do no harm.
        # The ends come last, because an activity that we've just recorded as begun may have ended
        # by now.
        begun = {
            token: activity
            for token, activity in self._open.copy().items()
            if token not in under_way
        }
        os.write(file, "".join(_all_begun(begun, now_ns)).encode())
        ended = [token for token in (*under_way, *begun) if token not in self._open]
        os.write(file, "".join(_ended(token, time.monotonic_ns()) for token in ended).encode())
        if stale >= 0:
            os.close(stale)


def _all_begun(activities: Mapping[int, Activity], now_ns: int) -> list[str]:
    return [_begun(token, activity, now_ns) for token, activity in sorted(activities.items())]


def _begun(token: int, activity: Activity, now_ns: int) -> str:
    """Returns the line for an activity's beginning, in JSON.

    It's formatted by hand, because `json.dumps` would take as long as everything else we do per
    event.
    """
    return (
        f'{{"begin":{token},"at":{now_ns},"what":{_quoted(activity.label)},"job":{_quoted(activity.job)},'
        f'"step":{activity.step},"segment":{activity.segment},"number":{activity.number}}}\n'
    )


def _ended(token: int, now_ns: int) -> str:
    return f'{{"end":{token},"at":{now_ns}}}\n'
