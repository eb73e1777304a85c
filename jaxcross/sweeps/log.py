"""The log of a sweep: what happened to its trials, on disk. Written by rank 0.

The log itself is the file `trials.jsonl` in the sweep's folder, with one line for each trial that
begins, each value of the metric, and each trial that ends. There's also a summary of the sweep and
its trials so far, for people and other programs (`sweep.json`), a JSONL and a CSV file per trial
(in the folder `metrics`), and the trials' states (in the folder `checkpoints`).

A restart has to find everything that earlier decisions were based on. We therefore write each line
to the file before acting on it; even if the process is killed right after that, the line is safe
with the kernel. That's not true in a power failure, when the kernel's buffers are lost, so we also
flush the file to disk with `fsync`. Doing so for every value would be slow, though, and it's enough
to do it when a trial begins, returns, is pruned or ends, and before each checkpoint. If values
after the last checkpoint are lost, the restarted trial just logs them again.
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
    """Everything we know about a trial.

    Attributes:
        number: The trial's number, counting from 0 in the order in which trials were proposed.
        name: The name of the trial's job.
        parameters: The parameters passed to the training function.
        after: The number of the trial that had to end for this trial to begin; None for the first
            few trials.
        returned: Whether the training function has returned on all ranks. The state may not be
            saved yet.
        values: The values of the metric, by the step at which they were logged. Each step has a
            list, in order.
        latest: The latest step with a value; -1 if there isn't any.
        status: How the trial ended, or None if it hasn't yet.
        step: The latest step.
        value: The value that was logged last.
        digest: A digest of the final state on all ranks.
        error: Why the trial failed; "" if it didn't.
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
    """The trials of one sweep, in memory and, if there's a folder, on disk. Not thread-safe.

    Args:
        folder: The sweep's folder; None to keep nothing on disk.

    Attributes:
        trials: The trials by number.
        known_until: The latest event that a decision was based on: its time on the schedule's
            clock, and the number of its trial.
        error: The first disk error, if any. Nothing is written after that, which leaves the file as
            if the process had been killed at this point.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: Any = None
        self._settings: Mapping[str, Any] = {}
        self.trials: dict[int, TrialRecord] = {}
        self.known_until = (-1, -1)
        self.error: OSError | None = None

    def open(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Locks the folder, and reads the log if there is one.

        Returns:
            The settings that the sweep began with, either from the folder or, for a new sweep,
            `settings`.

        Raises:
            ValueError: The folder contains something other than a sweep, or another process is
                using it.
            OSError: The folder can't be written.
        """
        self._settings = settings
        if self._folder is None:
            return settings
        self._folder.mkdir(parents=True, exist_ok=True)
        found = {path.name for path in self._folder.iterdir()}
        if found - FILES and "sweep.json" not in found:
            raise ValueError(
                f"`{self._folder}` contains files that do not belong to a sweep. Name an empty "
                "folder."
            )
        self._file = (self._folder / "trials.jsonl").open("a+")
        if not lock(self._file):
            self._file.close()
            raise ValueError(
                f"`{self._folder}` is in use: {holder(self._folder / 'trials.jsonl')} is running a "
                "sweep there. Wait until it has ended, or end it: the same command then continues "
                "that sweep. To start a new sweep, name another folder."
            )
        if "sweep.json" not in found:
            if self._read():
                raise ValueError(
                    f"`{self._folder}` has trials but no `sweep.json`, so the sweep cannot be "
                    "resumed. Name an empty folder."
                )
            self.write()
            return settings
        try:
            before = json.loads((self._folder / "sweep.json").read_text())
            if before["format"] != FORMAT:
                raise ValueError(f"it has format {before['format']!r:.60}, not {FORMAT}")
            earlier = before["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`{self._folder / 'sweep.json'}` does not belong to a sweep of this version of "
                f"jaxcross ({error}). Name an empty folder."
            ) from None
        self._read()
        return earlier

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Stores the settings, some of which may change in a restart."""
        self._settings = settings
        self.write()

    def begin(self, name: str, started: Started) -> None:
        """Records that a trial begins."""
        line = {"trial": started.number, "name": name, "params": started.parameters}
        self._add({**line, "after": started.after, "time": started.time}, forced=True)

    def value(self, number: int, step: int, nth: int, value: float) -> None:
        """Records the `nth` value of a step, from 0. A no-op if the trial already has it."""
        if nth == len(self.trials[number].values.get(step, ())):
            self._add({"trial": number, "step": step, "value": value})

    def returned(self, number: int, step: int) -> None:
        """Records that a trial's function has returned on all ranks. A second call is a no-op."""
        if not self.trials[number].returned:
            self._add({"trial": number, "returned": step}, forced=True)

    def pruned(self, pruned: Pruned) -> None:
        """Records that a trial has been pruned. A no-op if the trial has ended."""
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
        """Records the end of a trial. A no-op if the trial has ended."""
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
        """Reads the file and drops an incomplete last line. Returns whether there are any lines."""
        self._file.seek(0)
        text = self._file.read()
        whole = text.rpartition("\n")[0]
        for n, line in enumerate(whole.splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"`{self._file.name}` is damaged in line {n} ({error}). Nothing was changed. "
                    "Restore the file from a copy, or name another folder."
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
            trial.returned = True
            trial.step = line["returned"]
        elif "pruned" in line:
            trial.status = "pruned"
            trial.step = line["pruned"]
            trial.value = trial.values[trial.step][-1]
            self.known_until = max(self.known_until, (line["time"], number))
        elif "end" in line:
            trial.status = line["end"]
            trial.step = line["step"]
            trial.value = line["value"]
            trial.digest = line["digest"]
            trial.error = line["error"]
        else:
            trial.values.setdefault(line["step"], []).append(line["value"])
            trial.latest = max(
                trial.latest, line["step"]
            )  # not a `max` over all steps, as a file may have 100,000 lines
            trial.step = max(trial.step, line["step"])
            trial.value = trial.values[trial.latest][-1]
