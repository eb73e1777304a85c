"""The checkpoints of one run: the user's settings, and a session with everything jobs share."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax

from jaxcross._arguments import is_whole
from jaxcross._endings import JobStatus
from jaxcross._files import check_placeholders, with_time, write_whole
from jaxcross.checkpoint.checkpointer import JobCheckpointer, Writer
from jaxcross.checkpoint.folders import SET_FILE, Folders, folder_name
from jaxcross.checkpoint.job_list import JobList, read
from jaxcross.checkpoint.part import FORMAT, UnusableError
from jaxcross.checkpoint.rank_gather import JobLog
from jaxcross.errors import JobError, clause
from jaxcross.health import process_state, this_process
from jaxcross.world import World, gather

_log = logging.getLogger("jaxcross")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where and how often a `Runner` saves its jobs. Must be the same on every rank.

    If `directory` already contains checkpoints, each job resumes from its newest intact checkpoint.
    Writing happens in a separate thread while training continues, and a checkpoint is only used if
    every rank has written its part of it. Creating this object doesn't access the disk.

    Args:
        directory: A folder on a POSIX file system, which may be shared by all nodes or local to
            each of them. Only one run may use it at a time. As in all folders that a run writes to,
            `{time}` stands for the time when the run was started; it's the same on all ranks and
            after a restart by `jaxcross launch`. To resume a run later, pass the actual name.
        every: The interval, in steps, at which the plain loop of `jaxcross.Job` saves. If None, it
            saves only when it ends or is interrupted. In a loop that you write yourself, call
            `job.save` instead.
        keep: How many complete checkpoints to keep for each job.
        best: The name of a metric from each job's evaluations, such as `eval/accuracy`. Whenever an
            evaluation finds a new best value, the state is saved, and it's kept in addition to the
            newest checkpoints. Load it with `jaxcross.load_checkpoint(..., best=True)`.
        mode: Whether smaller (`min`) or larger (`max`) values are better. Required with `best`.

    Raises:
        TypeError: `directory` isn't a path, `every` or `keep` isn't a whole number, or `best` isn't
            a string.
        ValueError: `every` or `keep` is below 1, `directory` is empty or contains a placeholder
            other than `{time}`, or `mode` is missing or invalid for `best`, or was passed without
            it.

    Example:
        >>> checkpoints = jaxcross.Checkpoints("checkpoints", every=1000)  # doctest: +SKIP
        >>> jaxcross.run(jobs, checkpoints=checkpoints)  # doctest: +SKIP
    """

    directory: str | os.PathLike[str]
    every: int | None = field(default=None, kw_only=True)
    keep: int = field(default=3, kw_only=True)
    best: str | None = field(default=None, kw_only=True)
    mode: Literal["min", "max"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike):
            raise TypeError(
                "`directory` of the checkpoints must be the path of a folder, got "
                f"{self.directory!r}."
            )
        if not os.fspath(self.directory):
            raise ValueError(
                "`directory` of the checkpoints must be the path of a folder, got an empty text."
            )
        check_placeholders(self.directory)
        for name, value in (("every", self.every), ("keep", self.keep)):
            if value is None and name == "every":
                continue
            if not is_whole(value):
                raise TypeError(
                    f"`{name}` of the checkpoints must be a whole number, got {value!r}."
                )
            if value < 1:
                raise ValueError(f"`{name}` of the checkpoints must be at least 1, got {value}.")
            object.__setattr__(self, name, int(value))  # ranks exchange it as JSON
        if self.best is not None and not isinstance(self.best, str):
            raise TypeError(
                f"`best` of the checkpoints must be the name of a metric, got {self.best!r}."
            )
        if self.mode not in (("min", "max") if self.best is not None else (None,)):
            needs = "None without `best`"
            if self.best is not None:
                needs = "'min' or 'max', as `best` names a metric"
            raise ValueError(f"`mode` of the checkpoints must be {needs}, got {self.mode!r}.")

    @property
    def agreed(self) -> tuple[object, ...]:
        """The settings that must be the same on every rank."""
        return self.every, self.keep, self.best, self.mode

    @property
    def path(self) -> Path:
        """The folder as an absolute path, because a job may change the working directory."""
        return with_time(self.directory).absolute()


class Session:
    """One run's checkpoints. Opening it waits for all ranks.

    Args:
        settings: The user's settings.
        world: All ranks.
        jobs: The jobs' names, for the list of jobs.
        policy: The run's policy, to be recorded in that list.

    Attributes:
        resubmit: The submissions of jobs that were submitted in an earlier run and haven't ended:
            maps their names to texts. We don't check that the two match.
        added_before: The jobs that were added during an earlier run and haven't ended. When the
            code that adds such a job runs again after the restart, the job is already there.
        missing: Unfinished jobs of an earlier run that this run doesn't have, which means that
            there's no function to run for them.

    Raises:
        JobError: Raised on every rank. A rank can't create its folder or write to it, or another
            run is using the folder.
    """

    def __init__(
        self, settings: Checkpoints, world: World, *, jobs: Sequence[str], policy: str
    ) -> None:
        self._settings = settings
        self._world = world
        self._environment = _environment(world)
        self._about = {"format": FORMAT, "ranks": world.size, "policy": policy, **self._environment}
        self._lock = threading.Lock()  # for the lists below, which are complete only on rank 0
        self._jobs = list(jobs)
        self._added = []
        self._submitted = {}
        mine: dict[str, Any] = {"error": ""}
        try:
            settings.path.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                mine["new"] = not (settings.path / SET_FILE).exists()
                mine |= self._adopt_earlier_jobs()
                self._about["process"] = asdict(this_process())
                self._write_set()
        except Exception as error:
            mine["error"] = f"{type(error).__name__}: {error}"
        gathered = gather(world.control, mine)
        for rank, each in enumerate(gathered):
            if each["error"]:
                raise JobError(
                    f"Checkpoints cannot be kept in `{settings.path}`, on rank {rank}: "
                    f"{each['error']}. `directory` must be a folder that every rank can create and "
                    "write to, and that no other run is using."
                )
        self.resubmit: dict[str, str] = gathered[0]["resubmit"]
        self.added_before: frozenset[str] = frozenset(gathered[0]["added"])
        self.missing: list[str] = gathered[0]["missing"]
        self._is_new: bool = gathered[0]["new"]
        self._writer = Writer()

    def _adopt_earlier_jobs(self) -> dict[str, Any]:
        """Adds unfinished jobs of earlier runs to this run's list."""
        file = self._settings.path / SET_FILE
        try:
            before = read(file)
        except UnusableError as error:
            _log.warning(
                "`%s` %s, so the jobs that joined during an earlier run are not known. To resume "
                "them, add them before `runner.run()`.",
                file,
                error,
            )
            before = JobList(submitted={})
        owner = before.process
        me = this_process()
        # The folder's list of jobs names the process that's using the folder. As long as that
        # process is running, no other run may use it. If it was on another host, we can't check
        # that, so we assume that it has ended; otherwise, a crashed host would make the folder
        # unusable forever.
        if owner is not None and owner != me and process_state(owner, me) in ("running", "stopped"):
            raise ValueError(
                f"process {owner.pid} on this host is using it for training now: wait until that "
                "has ended, or name another folder"
            )
        status = {name: self._folders(name).marked("left") for name in before.jobs}
        unfinished = [name for name in before.jobs if status[name] != JobStatus.ENDED]
        lacking = [name for name in unfinished if name not in self._jobs]
        self._submitted = {name: text for name, text in before.submitted.items() if name in lacking}
        self._added = [name for name in before.added if name in unfinished]
        self._jobs += lacking
        return {
            "resubmit": self._submitted,
            "added": self._added,
            "missing": [
                name
                for name in lacking
                if name not in self._submitted and status[name] != JobStatus.STOPPED
            ],
        }

    def _write_set(self) -> None:
        with self._lock:
            members = {"jobs": self._jobs, "added": self._added, "submitted": self._submitted}
            text = json.dumps({**self._about, **members}, indent=1)
        write_whole(self._settings.path / SET_FILE, text)

    def _rewrite_set(self) -> None:
        try:
            self._write_set()
        except OSError as error:
            _log.warning(
                "A restart will not know all jobs of this run, because the list of jobs cannot be "
                "written: %s.",
                clause(str(error)),
            )

    def added(self, job: str, submission: str | None = None) -> None:
        """Adds a job that joined the run to the list, along with its text if it was submitted.

        Doesn't wait. The list is written before any checkpoint that's begun later.
        """
        if self._world.rank != 0:
            return
        with self._lock:
            self._jobs += [job] if job not in self._jobs else []
            self._added += [job] if job not in self._added else []
            if submission is not None:
                self._submitted[job] = submission
        self._writer.submit(self._rewrite_set)

    def _folders(self, job: str) -> Folders:
        return Folders(
            self._settings.path / folder_name(job), rank=self._world.rank, ranks=self._world.size
        )

    @property
    def every(self) -> int | None:
        return self._settings.every

    @property
    def best(self) -> tuple[str, Literal["min", "max"]] | None:
        """The metric by which the best state is chosen, and its mode."""
        best = self._settings.best
        mode = self._settings.mode
        return None if best is None or mode is None else (best, mode)

    def checkpointer(self, job: str, note: Callable[[str], None]) -> JobCheckpointer:
        """Returns the object that restores and saves one job. `note` shows a line in the output."""
        return JobCheckpointer(
            JobLog(job, note),
            world=self._world,
            folders=self._folders(job),
            keep=self._settings.keep,
            environment=self._environment,
            writer=self._writer,
        )

    def _remove(self) -> None:
        """Removes this rank's files and any empty folders, unless a restart needs some of them."""
        folders = [self._folders(job) for job in self._jobs]
        with suppress(OSError):
            if any(
                each.names() or each.marked("left") == JobStatus.STOPPED or each.marked("paused")
                for each in folders
            ):
                return
            for each in folders:
                each.remove_marks()
            if self._world.rank == 0:
                (self._settings.path / SET_FILE).unlink(missing_ok=True)
            self._settings.path.rmdir()  # if the ranks share the folder, only the last one succeeds

    def close(self, *, unused: bool = False) -> None:
        """Ends the writing thread after it has finished its tasks.

        Waits for it. If the disk hangs, the watchdog reports it.

        Args:
            unused: Whether the run failed before its first step. If so, the folder is removed again
                along with the list of jobs, provided that this run created the list and that a
                restart doesn't need anything in there.
        """
        if unused and self._is_new and not (self._added or self._submitted):
            self._writer.submit(self._remove)
        elif self._world.rank == 0:
            self._about["process"] = None  # so that other processes may use the folder
            self._writer.submit(self._rewrite_set)
        last = self._writer.submit(lambda: None)
        self._writer.wait_for(last, self._world, job="", step=0, missing="what is left to write")
        self._writer.close()


def _environment(world: World) -> dict[str, str]:
    """Returns everything that affects the last bits of results, apart from program and data."""
    device = jax.local_devices()[0]
    return {
        **_packages(),
        "device": f"{device.platform} {device.device_kind}",
        "mpi": world.vendor,
        "wire": world.over,
        "threads": str(world.pool_size),
    }


@cache
def _packages() -> Mapping[str, str]:
    """Returns package versions. Cached, because looking them up takes milliseconds."""
    return {name: version(name) for name in ("jaxcross", "jax", "jaxlib")}
