"""Progress of a run as plain data, and as a file in the folder of events for other processes."""

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
"""The file that rank 0 replaces about once a second during a run."""

VERSION = 1
_MOST_BYTES = 4 << 20
_MOST_JOBS = 10_000
_LONGEST_TEXT = 200
_PACE_S = 10.0
_LATEST = 8  # entries to search for the loss, since evaluations may follow the step that logged it
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
    """One job at one moment, as observed on rank 0.

    Attributes:
        name: The job's name.
        step: Number of steps done.
        steps: Number of steps at the end of its loop; None if unknown.
        steps_per_s: Its latest rate; None before the second step.
        doing: What it does or waits for; "" if unknown.
        doing_s: For how many seconds it has been doing that.
        metric: What it logged last, as text.
        status: How it ended; "" before that.
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
        """Seconds until its last step at this rate; None if unknown."""
        if self.status or not self.steps or not self.steps_per_s:
            return None
        return max(0, self.steps - self.step) / self.steps_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """All jobs of a run at one moment.

    Attributes:
        run: Identifies the processes of the ranks, as in their event files.
        ranks: Number of ranks.
        at_s: The moment, in seconds of the epoch.
        run_s: Seconds since the run began.
        over: Whether the run has ended.
        shown: False if the script doesn't want its progress to be shown.
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
        """Returns the text of the file."""
        return json.dumps({"jaxcross": VERSION, **asdict(self)}) + "\n"


class StepRate:
    """Steps per second of one job, over the last ten seconds and at least one step.

    Ignores the first step, because it compiles.
    """

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque()

    def look(self, now_s: float, steps_made: int) -> float | None:
        """Receives the number of steps made until now. Returns the rate; None before two steps."""
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
        # If the current step has taken more than twice as long as the earlier ones, include the
        # time since the last step: a stall then lowers the rate.
        overdue = (now_s - last_s) * (last - first) > 2 * length_s
        return (last - first) / (now_s - first_s if overdue else length_s)


class LatestMetric:
    """The latest value of one metric of a job. Only reads what was logged since the last call."""

    def __init__(self) -> None:
        self._seen = 0
        self._text = ""

    def look(self, history: Sequence[tuple[int, object]], name: str) -> str:
        """Receives everything that the job has logged until now. Returns the metric as text; "" if
        it hasn't been logged yet.
        """
        new = history[self._seen :]
        for _, values in reversed(new):
            value = dict(flatten_metrics(values)).get(name)
            if isinstance(value, int | float):
                self._text = f"{name} {number(value)}"
                break
        # Not just `len(history)`: the job may have logged more since `new` was read. It may also
        # have dropped entries.
        self._seen = min(self._seen + len(new), len(history))
        return self._text


def metric_of(history: Sequence[tuple[int, object]]) -> str:
    """Returns what a job logged last: its `loss`, even if an evaluation followed; else a number."""
    texts = [metric_text(values) for _, values in reversed(history[-_LATEST:])]
    return next((text for text in texts if text.startswith("loss ")), texts[0] if texts else "")


def metric_text(values: object) -> str:
    """Returns one of the metrics that a job logged: `loss`, or else the first number."""
    numbers = {
        key: value for key, value in flatten_metrics(values) if isinstance(value, int | float)
    }
    name = "loss" if "loss" in numbers else next(iter(numbers), None)
    return "" if name is None else f"{name} {number(numbers[name])}"


def doing_text(what: str, *, local: bool) -> str:
    """Returns words for an activity of a job, which has the flight recorder's name for it."""
    if what in _WORDS:
        return _WORDS[what]
    if what.startswith("batch "):
        return "waiting for data" if local else "waiting for other ranks' data"
    return what if local else f"{what}, with all ranks"


def read_progress(folder: str | os.PathLike[str]) -> RunProgress | None:
    """Reads the progress of the latest run in `folder`; None if no run has begun there.

    Raises:
        ValueError: The file is damaged or of another version.
        OSError: The file can't be read.
    """
    path = Path(folder) / PROGRESS_FILE
    try:
        # Open neither a link to elsewhere nor a pipe, which would wait for a writer.
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
            f"`{path}` is not the progress of a run, or is of another version of jaxcross."
        ) from None


def _cleaned(run: RunProgress) -> RunProgress:
    """Returns the progress with texts that can't move a terminal's cursor. Limits all lengths.

    Raises:
        ValueError: A number is NaN or infinite.
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
