"""The metrics of a run on disk: one JSONL and one CSV file per job, written by rank 0.

Each step appears exactly once, even if a run is killed and resumed. The killed run may have logged
steps beyond its last checkpoint, which the resumed run then repeats and logs again. To avoid
duplicates, the resumed run drops those lines before it writes anything.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from jaxcross._files import holder, lock, replacing, with_time
from jaxcross._schema import spelt, unspelt
from jaxcross.interleave import Instrument

_log = logging.getLogger("jaxcross")
_MARKER = "run.json"
_LONGEST = 150  # maximum length of a file's name, in characters
_OWN_NAMES = {"step_": "step", "time_": "time"}  # metrics named like the file's own columns
Value = Any  # a number, a text, or a list of those


@final
class MetricFiles(Instrument):
    """Writes the metrics that jobs log, as soon as their values arrive from the device.

    Each line of `JOB.jsonl` is an object with `step`, `time` (seconds since 1970) and the metrics,
    whose nested names are joined by slashes. In both files, NaN and infinities are written as text.

    `JOB.csv` has the same contents, minus any lists. A metric that first shows up after the first
    line doesn't get a column until the file is closed.

    A folder belongs to a single run, along with any later runs that resume from its checkpoints.

    Args:
        folder: The folder to write to. Created if it doesn't exist.
        checkpoints: The run's checkpoint folder, or None if it has none. A run that resumes this
            one uses the same checkpoint folder, which is how we recognise it.

    Attributes:
        folder: The folder's absolute path.
    """

    def __init__(self, folder: str | Path, checkpoints: Path | None = None) -> None:
        self.folder = with_time(folder).absolute()
        self._checkpoints = checkpoints
        self._jobs: dict[str, _JobFiles | None] = {}
        self._early: dict[
            str, list[dict[str, Value]]
        ] = {}  # lines that jobs logged before they restored a state
        self._lock = (
            threading.RLock()
        )  # the runner may close files that a job's thread is still writing
        self._closed = False
        self._claim: Any = None

    def writes_to(self) -> str:
        """Returns the folder."""
        return str(self.folder)

    def claim(self) -> None:
        """Claims the folder for this run.

        Raises:
            ValueError: The folder contains other files or another run's metrics, or another run is
                currently writing to it.
            OSError: The folder can't be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        marker = self.folder / _MARKER
        mine = {"checkpoints": None if self._checkpoints is None else str(self._checkpoints)}
        found = [path for path in self.folder.iterdir() if path != marker]
        if marker.exists() and (
            found or marker.stat().st_size
        ):  # an empty marker was left by a run that was killed right here
            if self._checkpoints is None or _load(marker.read_text()) != mine:
                raise ValueError(
                    f"`{self.folder}` has the metrics of another run. Name a different folder, or "
                    "remove this one. To resume that run, use its checkpoint folder as well."
                )
        elif found:
            raise ValueError(
                f"`{self.folder}` holds other files, so metrics are not written to it. Name an "
                "empty folder."
            )
        else:
            marker.write_text(json.dumps(mine) + "\n")
        self._claim = marker.open()
        if not lock(self._claim):
            self._claim.close()
            raise ValueError(
                f"`{self.folder}` is in use: {holder(marker)} writes its metrics there. Wait "
                "until it has ended, or name another folder."
            )

    def begin(self, job: str, step: int, *, without: str = "") -> list[dict[str, Value]]:
        """Drops lines after the restored step, or sets the old file aside if no state was restored.

        Args:
            job: The job's name.
            step: The step that was restored, or 0 if the job starts from scratch.
            without: Name of an evaluation whose lines at that step are dropped as well. It will run
                again, because its result isn't part of the checkpoint.

        Returns:
            The remaining lines of earlier runs.
        """
        kept: list[dict[str, Value]] = []
        with self._lock:
            files = self._jobs.get(job)
            if self._closed or (files is not None and not without):
                return kept  # without checkpoints, the files were opened for the job's first line
            try:
                files = files or _JobFiles(self.folder / file_name(job))
                self._jobs[job] = files
                kept = files.open(step, without)
                for line in self._early.pop(job, ()):
                    if step == 0:  # otherwise the previous run has already written the line
                        files.add(line)
            except OSError as error:
                self._give_up(job, error)
        return kept

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Adds a line to the job's files."""
        line: dict[str, Value] = {"step": step, "time": round(time.time(), 3)}
        for key, value in flatten_metrics(values):
            while key in line:
                key += "_"
            line[key] = value
        with self._lock:
            if self._closed:
                return
            if job not in self._jobs and self._checkpoints is not None:
                self._early.setdefault(job, []).append(line)
                return
            if job not in self._jobs:
                self.begin(job, 0)
            files = self._jobs[job]
            if files is not None:
                try:
                    files.add(line)
                except OSError as error:
                    self._give_up(job, error)

    def note(
        self,
        *,
        job: str,
        kind: str,
        step: int = -1,  # noqa: ARG002
        value: float | str | None = None,  # noqa: ARG002
    ) -> None:
        """Closes a job's files once the job has finished, however it ended.

        At two files per job, a large sweep would otherwise run into the limit on open files.
        """
        if kind in ("done", "closed"):
            with self._lock:
                self._close_job(job)

    def close(self) -> None:
        """Writes the remaining lines and closes the files."""
        with self._lock:
            for job in {**self._jobs, **self._early}:
                self._close_job(job)
            self._closed = True
            if self._claim is not None:
                self._claim.close()

    def _close_job(self, job: str) -> None:
        if job in self._early:
            self.begin(job, 0)  # the job ended before it restored a state
        try:
            files = self._jobs.get(job)
            if files is not None:
                self._jobs[job] = None
                files.close()
        except OSError as error:
            _log.warning(
                "Metrics of job `%s` in `%s` may lack their last lines, because its files could "
                "not be closed: %s. Check whether the disk is full.",
                job,
                self.folder,
                error,
            )

    def _give_up(self, job: str, error: OSError) -> None:
        self._jobs[job] = None
        _log.warning(
            "Metrics of job `%s` are no longer written to `%s`: %s. The job continues without "
            "them. To get them back, make sure that the folder can be written, and start again.",
            job,
            self.folder,
            error,
        )


class _JobFiles:
    """One job's two files. `open` drops the last line if a kill left it incomplete."""

    def __init__(self, path: Path) -> None:
        self._jsonl = path.with_name(f"{path.name}.jsonl")
        self._csv = path.with_name(f"{path.name}.csv")
        self._columns: list[str] = []
        self._lacks_columns = False
        self._file: Any = None
        self._table: Any = None

    def open(self, step: int, without: str = "") -> list[dict[str, Value]]:
        """Drops lines after `step`, and those of one evaluation at `step`. Returns the rest."""
        if self._file is not None:
            self._file.close()
        if step == 0 and self._jsonl.exists():
            aside = (
                self._jsonl.with_name(f"{self._jsonl.name}.old-{n}") for n in itertools.count(1)
            )
            self._jsonl.rename(next(path for path in aside if not path.exists()))
        lines = [line for line in self._lines() if line["step"] <= step]
        lines = [line for line in lines if line["step"] < step or not is_of(line, without)]
        with replacing(self._jsonl) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self._write_table(lines)
        self._file = self._jsonl.open("a")
        return lines

    def add(self, line: Mapping[str, Value]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        scalars = _scalars(line)
        if not self._columns:
            self._columns = list(scalars)
            csv.writer(self._table).writerow(self._columns)
        self._lacks_columns = self._lacks_columns or not set(scalars) <= set(self._columns)
        csv.DictWriter(self._table, self._columns, extrasaction="ignore").writerow(scalars)
        self._table.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._lacks_columns:
            self._write_table(list(self._lines()))
        if self._table is not None:
            self._table.close()

    def _lines(self) -> Iterator[dict[str, Value]]:
        if self._jsonl.exists():
            with self._jsonl.open() as file:
                yield from (
                    line for line in map(_load, file) if line is not None and "step" in line
                )

    def _write_table(self, lines: list[dict[str, Value]]) -> None:
        if self._table is not None:
            self._table.close()
        self._columns = list(dict.fromkeys(key for line in lines for key in _scalars(line)))
        with replacing(self._csv) as file:
            writer = csv.DictWriter(file, self._columns)
            if lines:
                writer.writeheader()
            writer.writerows(map(_scalars, lines))
        self._table = self._csv.open("a", newline="")


def is_of(line: Mapping[str, Value], evaluation: str) -> bool:
    """Whether a line contains nothing but the results of the evaluation with this name."""
    names = {key.partition("/")[0] for key in line if key not in ("step", "time")}
    return bool(evaluation) and names == {evaluation}


def file_name(job: str) -> str:
    """Returns the name of a job's files, without a suffix."""
    name = quote(job, safe=" ")
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"


def flatten_metrics(values: object, path: str = "") -> Iterator[tuple[str, Value]]:
    """Yields the name and value of each metric in a tree. Nested names are like `eval/accuracy`."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from flatten_metrics(value, f"{path}/{key}" if path else str(key))
    elif isinstance(values, tuple | list) and not all(isinstance(v, int | float) for v in values):
        for n, value in enumerate(values):
            yield from flatten_metrics(value, f"{path}/{n}" if path else str(n))
    elif values is not None:
        yield path or "value", _plain(values.tolist() if hasattr(values, "tolist") else values)  # type: ignore[union-attr]


def as_logged(line: Mapping[str, Value]) -> tuple[int, dict[str, Value]]:
    """Returns the step and the metrics of a line. Nested names stay joined by slashes."""
    values = {
        _OWN_NAMES.get(key, key): unspelt(value)
        for key, value in line.items()
        if key not in ("step", "time")
    }
    return line["step"], values


def _plain(value: Any) -> Value:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return spelt(value) if isinstance(value, bool | int | float | str) else str(value)


def _scalars(line: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in line.items() if not isinstance(value, list)}


def _load(text: str) -> dict[str, Any] | None:
    """Parses a line. Returns None if the line is incomplete."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
