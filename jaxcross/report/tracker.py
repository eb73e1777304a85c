"""Sends the metrics of a run to an experiment tracker, such as Weights & Biases or MLflow.

**Each step once.** A killed run may have logged steps beyond its last checkpoint, which the resumed
run repeats and logs again. Conversely, it may have lost steps from before the checkpoint, because
trackers buffer what they're given: after a SIGKILL, W&B's offline file may well be empty. What we
can rely on are the metrics files. When a job resumes after step S, they contain exactly the lines
of all steps up to S. So a resumed tracker asks its service (or knows) what it has already got, and
sends everything else: first the lines from the files, then what the job logs.

**Nobody waits for the service.** A thread sends the metrics, so a slow or unreachable service
doesn't hold up training. The run's end waits for that thread, but only for a limited time.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxcross._files import write_whole
from jaxcross._schema import unspelt
from jaxcross.errors import clause
from jaxcross.interleave import Instrument
from jaxcross.report.metric_files import as_logged, file_name, flatten_metrics

_log = logging.getLogger("jaxcross")
_RETRY_S = 60  # the least time between two attempts to reach a service that has failed
_PATIENCE_S = 180  # how long the end of a run waits for the rest, at most

_LONGEST_LIST = 100  # a longer list is more likely to be data than a hyperparameter


class Row(NamedTuple):
    """The metrics of one `job.log` call. `time_s` is in seconds since 1970."""

    step: int
    time_s: float
    values: Mapping[str, Any]


class TrackedRun(Protocol):
    """One job's run at the service. Its methods wait for the service, and may raise anything."""

    def write(self, rows: Sequence[Row]) -> None:
        """Sends the rows, except for what the service had already got when the run was opened."""
        ...

    def finish(self, status: str) -> None:
        """Ends the run. `status` is the job's final status, or `pruned`."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class TrackedJob:
    """What a tracker knows about a job.

    Attributes:
        name: The job's name.
        params: The plain values among the arguments of the job's function.
        group: A name for the sweep that the job is a trial of, or "".
        saved: What a restart needs in order to find the job's run, e.g. the run's id. Kept in
            `file`.
        earlier: The contents of `file` if it's from a run of the job that this one doesn't resume.
        file: Where to keep `saved`. None if the run can't be resumed.
        rows: What hasn't been sent yet.
        restored: The restored step, and the names of its metrics in the metrics file. If these are
            logged once more, e.g. by an evaluation that a kill has interrupted, they're left out.
        begun: Whether we know the step that the job resumes after.
        status: The job's final status, or "" while it's running.
        over: Whether the run has been finished, or given up.
        run: The job's run at the service, once it's open.
        retry_at_s: Don't try again before this time, which is on the monotonic clock.
        failures: The number of failed attempts since the last successful one.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    saved: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None
    rows: deque[Row] = field(default_factory=deque)
    restored: tuple[int, AbstractSet[str]] = (0, frozenset())
    begun: bool = False
    status: str = ""
    over: bool = False
    run: TrackedRun | None = None
    retry_at_s: float = 0.0
    failures: int = 0

    def save(self, **saved: Any) -> None:
        """Sets `saved`, and writes it to the file."""
        self.saved = saved
        if self.file is not None:
            write_whole(self.file, json.dumps(saved) + "\n")


class Tracker(Instrument):
    """Base class for trackers.

    Every rank must be given a tracker, but only the one on rank 0 sends anything.

    In a run with checkpoints, the folder of the run's metrics files must be known. It also contains
    a small file per job with the id of the job's run.
    """

    service: ClassVar[str]
    """The service's name in messages."""
    suffix: ClassVar[str]
    """The suffix of the files in the folder of metrics."""
    reopens: ClassVar[bool]
    """Whether a run that failed to write can be opened again without losing or repeating rows."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._jobs: dict[str, TrackedJob] = {}
        self._todo: SimpleQueue[TrackedJob | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # there's none on ranks other than 0
        self._folder: Path | None = None
        self._resumable = False
        self._patience_s = 0.0

    def writes_to(self) -> str:
        """Returns the service's name, since a run has at most one tracker for each service."""
        return self.service

    @abstractmethod
    def open_run(self, job: TrackedJob) -> TrackedRun:
        """Creates a run for the job, or opens the one that it had before a restart.

        Called in the tracker's thread. Waits for the service, and may raise anything.
        """

    # Called by the runner.

    def attach(
        self, *, rank: int, folder: Path | None, resumable: bool, stall_timeout_s: float
    ) -> None:
        """Starts the tracker's thread if this is rank 0.

        Args:
            rank: This rank.
            folder: The folder of the metrics files, or None.
            resumable: Whether the run has checkpoints, in which case it has a folder as well.
            stall_timeout_s: How long the other ranks wait for this one before they give up.
        """
        if rank != 0:
            return
        self._folder = folder
        self._resumable = resumable
        self._patience_s = min(_PATIENCE_S, stall_timeout_s / 2)
        self._todo = SimpleQueue()
        # A daemon, because some service may keep this thread waiting forever, and the process has
        # to end at some point.
        self._thread = threading.Thread(
            target=self._work, args=(self._todo,), name=f"jaxcross-{self.suffix}", daemon=True
        )
        self._thread.start()

    def describe(self, job: str, params: Mapping[str, Any], group: str = "") -> None:
        """Sets a job's hyperparameters, and the name of its sweep."""
        with self._lock:
            if self._thread is not None:
                known = self._job(job)
                known.params = plain_values(params)
                known.group = group

    def begin(self, job: str, step: int, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        """Called when a job begins or resumes. A second call is a no-op.

        Args:
            job: The job's name.
            step: The step that was restored, or 0 if the job starts from scratch.
            lines: The lines of all steps up to this one in the metrics file.
        """
        with self._lock:
            if self._thread is None or self._job(job).begun:
                return
            known = self._job(job)
            known.begun = True
            if self._folder is not None and self._resumable:
                known.file = self._folder / f"{file_name(job)}.{self.suffix}.json"
            found = _read(known.file)
            if step > 0:
                known.saved = found
                known.rows.clear()  # logged before the restored step, so the files contain them
            else:
                known.earlier = found
            earlier = [Row(line["step"], line["time"], as_logged(line)[1]) for line in lines]
            known.rows.extendleft(reversed(earlier))
            known.restored = (
                step,
                {key for row in earlier if row.step == step for key in row.values},
            )
            self._todo.put(known)

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Queues the metrics. Doesn't wait."""
        with self._lock:
            if self._thread is None:
                return
            known = self._job(job)
            if known.over:
                return
            at, names = known.restored
            flat = {
                key: unspelt(value)
                for key, value in flatten_metrics(values)
                if step != at or key not in names
            }
            if not flat:
                return
            known.rows.append(Row(step, time.time(), flat))
            if known.begun:
                self._todo.put(known)
            elif not self._resumable:
                self.begin(job, 0)

    def end(self, job: str, status: str) -> None:
        """Called when a job has ended, after the last call of `metrics` for this job.

        Args:
            job: The job's name.
            status: How the job ended, or `pruned`.
        """
        with self._lock:
            known = self._jobs.pop(job, None)
            if known is None or not (known.begun or known.rows):
                return
            self._jobs[job] = known
            self.begin(job, 0)
            known.status = status
            self._todo.put(known)

    def close(self) -> None:
        """Waits until everything is sent, for three minutes at most. Called at a run's end.

        If other ranks wouldn't wait for that long, waits for half of their `stall_timeout_s`.
        A second call is a no-op.
        """
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._todo.put(None)
        thread.join(self._patience_s)
        with self._lock:
            unsent = sum(len(job.rows) for job in self._jobs.values())
            unfinished = any(job.status and not job.over for job in self._jobs.values())
            self._jobs.clear()
        if unsent or unfinished:
            _log.warning(
                "%s may lack the last metrics of this run: %d of them had not been sent within "
                "%g s of its end, or could not be sent. The metrics files, if any, have them all.",
                self.service,
                unsent,
                self._patience_s,
            )

    # In the tracker's own thread.

    def _job(self, name: str) -> TrackedJob:
        return self._jobs.setdefault(name, TrackedJob(name=name))

    def _work(self, todo: SimpleQueue[TrackedJob | None]) -> None:
        while (job := todo.get()) is not None:
            self._send(job)
        with self._lock:
            left = [job for job in self._jobs.values() if job.begun and (job.rows or job.status)]
        for job in left:
            self._send(job, last=True)

    def _send(self, job: TrackedJob, *, last: bool = False) -> None:
        with self._lock:
            rows = list(job.rows)
            status = job.status
        if job.over or (not last and time.monotonic() < job.retry_at_s):
            return
        if job.run is not None and not rows and not status:
            return  # an earlier call has sent them
        try:
            if job.run is None:
                job.run = self.open_run(job)
            job.run.write(rows)
            if status:
                job.run.finish(status)
        except BaseException as error:  # if this thread died, it would end all ranks
            self._failed(job, error)
            return
        job.failures = 0
        with self._lock:
            for _ in rows:
                job.rows.popleft()
            if status:
                job.over = True
                self._jobs.pop(job.name, None)

    def _failed(self, job: TrackedJob, error: BaseException) -> None:
        gives_up = job.run is not None and not self.reopens
        job.run = None
        job.retry_at_s = time.monotonic() + _RETRY_S
        job.failures += 1
        if gives_up:
            with self._lock:
                job.over = True
                job.rows.clear()
        if job.failures == 1:
            _log.warning(
                "Metrics of job `%s` do not reach %s: %s: %s. The job continues. %s",
                job.name,
                self.service,
                type(error).__name__,
                clause(str(error).partition("\n")[0]),
                "Its remaining metrics are not sent, but a restart from its checkpoints sends them."
                if gives_up
                else "We keep its metrics and try again, once a minute and at the end.",
            )


def check_name(value: Any, argument: str, what: str) -> None:
    """Checks that an argument, such as the name of a project, is a string that isn't empty.

    Raises:
        ValueError: It isn't a string, or it's empty.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"`{argument}` must be the name of {what}, got {value!r:.60}.")


def plain_values(value: Any) -> Any:
    """Returns the numbers, strings, None, and nested dicts and short lists of these in `value`.

    Everything else, such as arrays and data sets, is left out.
    """
    if isinstance(value, Mapping):
        found = {str(key): plain_values(each) for key, each in value.items()}
        return {key: each for key, each in found.items() if each is not _OTHER}
    if isinstance(value, list | tuple):
        plain = [plain_values(each) for each in value] if len(value) <= _LONGEST_LIST else [_OTHER]
        return _OTHER if _OTHER in plain else plain
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        try:
            value = value.item()
        except Exception:  # e.g. a key of `jax.random`, or an array that has been donated
            return _OTHER
    return value if value is None or isinstance(value, bool | int | float | str) else _OTHER


_OTHER = object()  # stands for a value that isn't plain


def _read(file: Path | None) -> dict[str, Any]:
    try:
        found = {} if file is None else json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
