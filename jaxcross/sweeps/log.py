"""The trials of a sweep on disk, one line per start, value and end, written by rank 0 at once.

    sweep.json      what the sweep is and its trials so far, for people and programs
    trials.jsonl    the log that a restart continues from
    metrics/        a JSONL and a CSV file per trial; checkpoints/ holds states

A line is handed to the kernel before anything else acts on it. It is flushed to disk (`fsync`)
before a checkpoint that covers it, and when a trial begins, returns, is pruned or ends. So a kill
loses nothing that a restart needs, and neither does a power failure, if the disk honours flushes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from jaxcross._files import holder, lock, write_whole
from jaxcross._schema import spelt
from jaxcross.sweeps.schedule import Parameters, Pruned, Started, Status

FORMAT = 1
FILES = {"sweep.json", "sweep.json.new", "trials.jsonl", "sweep.png", "metrics", "checkpoints"}


@dataclass(slots=True, kw_only=True)
class TrialRecord:
    """Everything that is known of a trial.

    Attributes:
        number: Number of the trial, from 0, in the order in which the search was asked for trials.
        name: The name of its job.
        parameters: The parameters of its function.
        after: The trial whose place it took, if any.
        returned: Whether its function has returned on all ranks. Its state may not be saved yet.
        values: The metric by step: all values logged at that step, in order.
        latest: The latest of these steps; -1 before the first one.
        status: How it ended; None before that.
        step: Its last step.
        value: The last value that it logged.
        digest: A digest of the final state on all ranks.
        error: Why it failed.
    """

    number: int
    name: str
    parameters: Parameters
    after: int | None = None
    returned: bool = False
    values: dict[int, list[float]] = field(default_factory=dict)
    latest: int = -1
    status: Status | None = None
    step: int = 0
    value: float | None = None
    digest: str = ""
    error: str = ""


@final
class TrialLog:
    """The trials of one sweep, in memory and, with a folder, on disk. Not thread-safe.

    Args:
        folder: Folder of the sweep; None to keep nothing on disk.

    Attributes:
        trials: The trials by number.
        known_until: The latest event on which a decision was based, as time of the schedule and
            number of the trial.
        error: The error of the disk, after which nothing more is written. The file then ends early,
            as after a kill.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: Any = None
        self._settings: Mapping[str, Any] = {}
        self.trials: dict[int, TrialRecord] = {}
        self.known_until = (-1, -1)
        self.error: OSError | None = None

    def open(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Locks the folder and reads what an earlier start left there.

        Returns:
            The settings of the earlier start, or `settings` if there was none.

        Raises:
            ValueError: The folder holds something else, or another process sweeps in it.
            OSError: The folder can't be written.
        """
        self._settings = settings
        if self._folder is None:
            return settings
        self._folder.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in self._folder.iterdir()}
        if found - FILES and "sweep.json" not in found:
            raise ValueError(
                f"`{self._folder}` is to hold a sweep, and holds other files. Name an empty folder."
            )
        self._file = (self._folder / "trials.jsonl").open("a+")
        if not lock(self._file):
            self._file.close()
            raise ValueError(
                f"`{self._folder}` is in use: {holder(self._folder / 'trials.jsonl')} sweeps "
                "there. Wait until it has ended, or end it: the same command then continues that "
                "sweep. In another folder, a sweep begins from nothing."
            )
        if "sweep.json" not in found:
            if self._read():
                raise ValueError(
                    f"`{self._folder}` has trials and no `sweep.json`. Name an empty folder."
                )
            self.write()
            return settings
        try:
            before = json.loads((self._folder / "sweep.json").read_text())
            if before["format"] != FORMAT:
                raise ValueError("another format")
            earlier = before["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`{self._folder / 'sweep.json'}` is not of a sweep ({error}). Name an empty "
                "folder."
            ) from None
        self._read()
        return earlier

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Stores settings that a restart may have changed."""
        self._settings = settings
        self.write()

    def begin(self, name: str, started: Started) -> None:
        """Notes that a trial begins."""
        line = {"trial": started.number, "name": name, "params": started.parameters}
        self._add({**line, "after": started.after, "time": started.time}, forced=True)

    def value(self, number: int, step: int, nth: int, value: float) -> None:
        """Notes the `nth` value of a step, from 0, unless the trial already has it."""
        if nth == len(self.trials[number].values.get(step, ())):
            self._add({"trial": number, "step": step, "value": value})

    def returned(self, number: int, step: int) -> None:
        """Notes that a trial's function has returned on all ranks. A no-op the second time."""
        if not self.trials[number].returned:
            self._add({"trial": number, "returned": step}, forced=True)

    def pruned(self, pruned: Pruned) -> None:
        """Notes that a trial is pruned. A no-op if it has ended."""
        if self.trials[pruned.number].status is None:
            self._add(
                {"trial": pruned.number, "pruned": pruned.step, "time": pruned.time}, forced=True
            )

    def end(
        self,
        number: int,
        status: Status,
        step: int,
        value: float | None,
        *,
        digest: str = "",
        error: str = "",
    ) -> None:
        """Notes the end of a trial. A no-op if it has ended."""
        if self.trials[number].status is None:
            facts = {"end": status, "step": step, "value": value, "digest": digest, "error": error}
            self._add({"trial": number, **facts}, forced=True)

    def sync(self) -> None:
        """Waits until all lines are on disk."""
        if self._file is not None and self.error is None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Flushes the log and releases the folder."""
        self.sync()
        if self._file is not None:
            self._file.close()

    def write(self) -> None:
        """Replaces `sweep.json` atomically."""
        if self._folder is None:
            return
        trials = [
            {
                "number": each.number,
                "name": each.name,
                "params": each.parameters,
                "status": each.status or "running",
                "step": each.step,
                "value": spelt(each.value),
                "digest": each.digest,
                "error": each.error,
            }
            for _, each in sorted(self.trials.items())
        ]
        content = {"format": FORMAT, "settings": self._settings, "trials": trials}
        write_whole(self._folder / "sweep.json", json.dumps(content, indent=1) + "\n")

    def _add(self, line: dict[str, Any], *, forced: bool = False) -> None:
        self._take(line)
        if self._file is None or self.error is not None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            if "end" in line or "pruned" in line:
                self.write()
        except OSError as error:
            self.error = error
        if forced:
            self.sync()

    def _read(self) -> bool:
        """Reads the file and drops a torn last line. Returns whether the file has any lines."""
        self._file.seek(0)
        text = self._file.read()
        whole = text.rpartition("\n")[0]
        for n, line in enumerate(whole.splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"`{self._file.name}` is damaged in line {n} ({error}). Nothing was changed."
                ) from None
        self._file.truncate(len(whole.encode()) + bool(whole))
        return bool(whole)

    def _take(self, line: Mapping[str, Any]) -> None:
        number = line["trial"]
        if "params" in line:
            begun = TrialRecord(
                number=number, name=line["name"], parameters=line["params"], after=line["after"]
            )
            self.trials.setdefault(number, begun)
            if begun.after is not None:
                self.known_until = max(self.known_until, (line["time"], begun.after))
            return
        trial = self.trials[number]
        if "returned" in line:
            trial.returned, trial.step = True, line["returned"]
        elif "pruned" in line:
            trial.status, trial.step = "pruned", line["pruned"]
            trial.value = trial.values[trial.step][-1]
            self.known_until = max(self.known_until, (line["time"], number))
        elif "end" in line:
            trial.status, trial.step, trial.value = line["end"], line["step"], line["value"]
            trial.digest, trial.error = line["digest"], line["error"]
        else:
            trial.values.setdefault(line["step"], []).append(line["value"])
            trial.latest = max(
                trial.latest, line["step"]
            )  # rather than `max` over all values: a file may have 100,000 lines
            trial.step = max(trial.step, line["step"])
            trial.value = trial.values[trial.latest][-1]
