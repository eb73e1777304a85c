"""A run's progress as plain data. Rank 0 also writes it to a file that other processes can read."""

from __future__ import annotations

import json
import math
import os
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxcross._schema import record
from jaxcross.report.metric_files import flatten_metrics
from jaxcross.report.units import number

PROGRESS_FILE = "progress.json"
"""Name of a file in the event folder. Rank 0 replaces it about once a second during a run."""

VERSION = 1
_MOST_BYTES = 4 << 20
_MOST_JOBS = 10_000
_LONGEST_TEXT = 200
_PACE_S = 10.0
_LATEST = 8  # how far back to look for the loss; evaluations may have logged since
_WORDS = {
    "compile": "compiling",
    "compute": "computing",
    "exchange": "exchanging",
    "checkpoint": "saving",
    "comparison": "agreeing with all ranks",
    "call of the step": "waiting for other ranks",
    "end of the job": "waiting for other ranks to end",
    "other ranks, to leave": "waiting for other ranks to leave",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """The progress of one job at one moment, as observed on rank 0.

    Attributes:
        name: The job's name.
        step: Number of completed steps.
        steps: Total number of steps that its loop will make; None if unknown.
        steps_per_s: Its current rate; None before the second step.
        doing: What the job is doing or waiting for; "" if unknown.
        doing_s: How many seconds it has been doing that.
        metric: The latest value that it logged, as text.
        status: How it ended; "" while it's running.
    """

    name: str
    step: int = 0
    steps: int | None = None
    steps_per_s: float | None = None
    doing: str = ""
    doing_s: float = 0.0
    metric: str = ""
    status: str = ""

    @property
    def left_s(self) -> float | None:
        """Seconds until its last step at the current rate; None if unknown."""
        if self.status or not self.steps or not self.steps_per_s:
            return None
        return max(0, self.steps - self.step) / self.steps_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of all jobs of a run at one moment.

    Attributes:
        run: The run's identifier, which can also be found in the ranks' event files.
        ranks: Number of ranks.
        at_s: The moment, in seconds since 1970.
        run_s: Seconds since the run began.
        over: Whether the run has ended.
        shown: False if the script opted out of having its progress shown.
        jobs: The jobs, in the order in which they were added.
    """

    run: str
    ranks: int
    at_s: float
    run_s: float
    over: bool = False
    shown: bool = True
    jobs: tuple[JobProgress, ...] = ()

    def to_json(self) -> str:
        """Returns the content of the progress file."""
        return json.dumps({"jaxcross": VERSION, **asdict(self)}) + "\n"


class StepRate:
    """Measures a job's steps per second, over the last ten seconds or at least one step.

    The first step doesn't count, since it includes compilation.
    """

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque()

    def look(self, now_s: float, steps_made: int) -> float | None:
        """Returns the rate, given the number of steps made so far; None before the second step."""
        changes = self._changes
        if steps_made > (changes[-1][1] if changes else 0):
            changes.append((now_s, steps_made))
        while len(changes) > 2 and changes[1][0] <= now_s - _PACE_S:
            changes.popleft()
        if len(changes) < 2:
            return None
        first_s, first = changes[0]
        last_s, last = changes[-1]
        length_s = last_s - first_s
        # Normally we only count completed steps. But that way, a job that hangs in the middle of a
        # step would keep its old rate forever. So once the current step has taken more than twice
        # as long as the earlier steps did on average, include the time since the last step ended,
        # which makes the rate fall.
        overdue = (now_s - last_s) * (last - first) > 2 * length_s
        return (last - first) / (now_s - first_s if overdue else length_s)


class LatestMetric:
    """Keeps track of the latest value of a job's metric. Each call only looks at new entries."""

    def __init__(self) -> None:
        self._seen = 0
        self._text = ""

    def look(self, history: Sequence[tuple[int, object]], name: str) -> str:
        """Returns the latest value of the metric as text, or "" if it hasn't been logged yet.

        `history` is everything that the job has logged so far.
        """
        new = history[self._seen :]
        for _, values in reversed(new):
            value = dict(flatten_metrics(values)).get(name)
            if isinstance(value, int | float):
                self._text = f"{name} {number(value)}"
                break
        # The job's thread may have appended more entries after we read `new`. Only advance past the
        # entries that we did search; advancing to `len(history)` would make the next call skip the
        # rest. The history may also have become shorter, hence the `min`.
        self._seen = min(self._seen + len(new), len(history))
        return self._text


def metric_of(history: Sequence[tuple[int, object]]) -> str:
    """Returns a job's latest `loss` (even if an evaluation was logged since), or else a number."""
    texts = [metric_text(values) for _, values in reversed(history[-_LATEST:])]
    return next((text for text in texts if text.startswith("loss ")), texts[0] if texts else "")


def metric_text(values: object) -> str:
    """Returns the metric to show: `loss` if the job logged it, otherwise its first number."""
    numbers = {
        key: value for key, value in flatten_metrics(values) if isinstance(value, int | float)
    }
    name = "loss" if "loss" in numbers else next(iter(numbers), None)
    return "" if name is None else f"{name} {number(numbers[name])}"


def doing_text(what: str, *, local: bool) -> str:
    """Puts the flight recorder's name for an activity into plain words."""
    if what in _WORDS:
        return _WORDS[what]
    if what.startswith("batch "):
        return "waiting for data" if local else "waiting for other ranks' data"
    return what if local else f"{what}, with all ranks"


def read_progress(folder: str | os.PathLike[str]) -> RunProgress | None:
    """Reads the progress of the latest run in `folder`. Returns None if no run has begun there.

    Raises:
        ValueError: The file is damaged, or was written by another version.
        OSError: The file can't be read.
    """
    path = Path(folder) / PROGRESS_FILE
    try:
        # Don't follow symlinks out of the folder, and don't block on a pipe that has no writer.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as stream:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        text = stream.read(_MOST_BYTES) if regular else b""
    try:
        found = json.loads(text)
        if found["jaxcross"] != VERSION:
            raise ValueError
        return _cleaned(record(found, RunProgress))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"`{path}` is not the progress of a run, so it is damaged or was written by a "
            "different version of jaxcross. Read it with that version."
        ) from None


def _cleaned(run: RunProgress) -> RunProgress:
    """Strips control characters from all texts, and shortens them.

    We don't trust the file. Its texts are printed to a terminal, where control characters could
    move the cursor or do worse.
    """
    jobs = tuple(
        replace(
            job,
            name=_text(job.name),
            doing=_text(job.doing),
            metric=_text(job.metric),
            status=_text(job.status),
        )
        for job in run.jobs[:_MOST_JOBS]
    )
    numbers = [run.at_s, run.run_s]
    numbers += [number for job in jobs for number in (job.doing_s, job.steps_per_s or 0.0)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError
    return replace(run, run=_text(run.run), jobs=jobs)


def _text(value: str) -> str:
    return "".join(c if c.isprintable() else " " for c in value[:_LONGEST_TEXT])
