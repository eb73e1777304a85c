"""The metrics of a run on disk: one JSONL and one CSV a job, written by rank 0, each step once whatever was killed."""

from __future__ import annotations

import csv
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from jaxcross.interleave.instrument import Instrument

_log = logging.getLogger("jaxcross")
_MARKER = "run.json"
_OWN = ("step", "time")  # keys of every line; a metric of that name gets an underscore
Value = Any  # a number, a text, or a list of them


@final
class MetricFiles(Instrument):
    """Writes what jobs log, as it is read back.

    A line of `JOB.jsonl` has `step`, `time` (seconds since 1970) and the metrics; keys of a metric inside another are
    joined by slashes. `JOB.csv` has the same, less what is no number. NaN and the infinities are texts in both. A
    folder belongs to one run, or to one run and those that go on from its checkpoints.

    Args:
        folder: Where to write. Made where it is missing.
        goes_on: The run's checkpoints, by whose path a later run is known to go on; None without any.
    """

    def __init__(self, folder: str | Path, goes_on: Path | None = None) -> None:
        self._folder, self._goes_on = Path(folder).absolute(), goes_on
        self._jobs: dict[str, _JobFiles | None] = {}

    def claim(self) -> None:
        """Makes the folder this run's.

        Raises:
            ValueError: It holds something else: files of the user's, or another run's metrics.
            OSError: It cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        marker, mine = self._folder / _MARKER, {"checkpoints": None if self._goes_on is None else str(self._goes_on)}
        if marker.exists():
            if self._goes_on is None or _load(marker.read_text()) != mine:
                raise ValueError(
                    f"`{self._folder}` has the metrics of another run. Name another folder, or remove it; a run goes on"
                    " there if it has the same folder of checkpoints."
                )
        elif any(self._folder.iterdir()):
            raise ValueError(f"`{self._folder}` is to hold metrics, and holds other files. Name an empty folder.")
        else:
            marker.write_text(json.dumps(mine) + "\n")

    def begin(self, job: str, step: int) -> list[tuple[int, dict[str, Value]]]:
        """Lets a job's files end with a step, after which it goes on. Returns `(step, metrics)` of what is left."""
        lines: list[dict[str, Value]] = []
        try:
            files = self._jobs[job] = _JobFiles(self._folder / quote(job, safe=" "))
            lines = files.cut(step)
        except OSError as error:
            self._give_up(job, error)
        return [(line["step"], {k: v for k, v in line.items() if k not in _OWN}) for line in lines]

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Adds a line."""
        if job not in self._jobs:
            self.begin(job, 0)  # it has restored nothing, so it has begun at its beginning
        if (files := self._jobs[job]) is None:
            return
        try:
            files.add({"step": step, "time": round(time.time(), 3), **dict(flat(values))})
        except OSError as error:
            self._give_up(job, error)

    def close(self) -> None:
        """Closes the files."""
        for files in self._jobs.values():
            if files is not None:
                files.close()

    def _give_up(self, job: str, error: OSError) -> None:
        self._jobs[job] = None
        _log.warning("Metrics of job `%s` are not written from here on: %s.", job, error)


class _JobFiles:
    """One job's two files. Each line is whole on disk before the next is begun, or it is dropped at the next start."""

    def __init__(self, path: Path) -> None:
        self._jsonl, self._csv = path.with_name(f"{path.name}.jsonl"), path.with_name(f"{path.name}.csv")
        self._columns: list[str] = [*_OWN]
        self._files: tuple[Any, ...] = ()

    def cut(self, step: int) -> list[dict[str, Value]]:
        """Drops lines of later steps, and of a write that was cut short. Returns those that are left."""
        found = self._jsonl.read_text().splitlines() if self._jsonl.exists() else []
        lines = [line for line in map(_load, found) if line is not None and line["step"] <= step]
        self._columns = list(dict.fromkeys([*_OWN, *(key for line in lines for key in _scalars(line))]))
        self._write(self._jsonl, (json.dumps(line) + "\n" for line in lines))
        self._write_table(lines)
        self._files = (self._jsonl.open("a"), self._csv.open("a", newline=""))
        return lines

    def add(self, line: Mapping[str, Value]) -> None:
        jsonl, table = self._files
        jsonl.write(json.dumps(line) + "\n")
        jsonl.flush()
        scalars = _scalars(line)
        if set(scalars) <= set(self._columns):
            csv.DictWriter(table, self._columns).writerow(scalars)
            table.flush()
            return
        # A metric that no line had so far: the table gets a column.
        table.close()
        self._columns += [key for key in scalars if key not in self._columns]
        self._write_table([each for each in map(_load, self._jsonl.read_text().splitlines()) if each is not None])
        self._files = (jsonl, self._csv.open("a", newline=""))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _write_table(self, lines: list[dict[str, Value]]) -> None:
        temporary = self._csv.with_suffix(".csv.new")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(map(_scalars, lines))
        temporary.replace(self._csv)

    @staticmethod
    def _write(path: Path, lines: Iterator[str]) -> None:
        temporary = path.with_suffix(path.suffix + ".new")
        with temporary.open("w") as file:
            file.writelines(lines)
        temporary.replace(path)


def flat(values: object, path: str = "") -> Iterator[tuple[str, Value]]:
    """Yields names and values of a tree of metrics: `eval/accuracy` for a metric in a dictionary."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from flat(value, f"{path}/{key}" if path else f"{key}_" if key in _OWN else str(key))
    elif isinstance(values, tuple | list) and not all(isinstance(v, int | float) for v in values):
        for n, value in enumerate(values):
            yield from flat(value, f"{path}/{n}" if path else str(n))
    elif values is not None:
        yield path or "value", _plain(values.tolist() if hasattr(values, "tolist") else values)  # type: ignore[union-attr]


def _plain(value: Any) -> Value:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no number for it
    return value if isinstance(value, bool | int | float | str) else str(value)


def _scalars(line: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in line.items() if not isinstance(value, list)}


def _load(text: str) -> dict[str, Any] | None:
    """Returns a line as it was written; None if it is not whole."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
