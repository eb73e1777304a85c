"""The checkpoints of one run: a keeper for each job, one thread that writes, and a list of the set."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import jax

from jaxcross.checkpoint.checkpointer import JobCheckpointer
from jaxcross.checkpoint.job_list import Members, read
from jaxcross.checkpoint.layout import SET_FILE, Folders, folder_name, write_text
from jaxcross.checkpoint.part import FORMAT, UnusableError
from jaxcross.checkpoint.rank_gather import RankGather
from jaxcross.checkpoint.restore import CheckpointerWorld
from jaxcross.checkpoint.settings import Checkpoints
from jaxcross.checkpoint.writer import Writer
from jaxcross.errors import JobError, clause

_log = logging.getLogger("jaxcross")


class SessionWorld(CheckpointerWorld, Protocol):
    """What the checkpoints of a run need of the world."""

    @property
    def vendor(self) -> str: ...
    @property
    def pool_size(self) -> int: ...
    @property
    def control(self) -> Any: ...


class Session:
    """The checkpoints of one run. Opening it waits for all ranks.

    Args:
        settings: What the user wants.
        world: All ranks.
        jobs: The jobs' names, for the list of the set.
        policy: Whose turn it is, for that list.

    Attributes:
        again: What was submitted in an earlier run and has not ended, to be submitted again: by the job's name, the
            text. Both as the set's file has them, where they need not go together.
        added_before: Jobs that joined during an earlier run and have not ended: who repeats the step in which one was
            added adds it once more.
        missing: Jobs of an earlier run that are not over, and of which this one has no function.

    Raises:
        JobError: On every rank: the folder cannot be made or written on one of them.
    """

    def __init__(self, settings: Checkpoints, world: SessionWorld, *, jobs: Sequence[str], policy: str) -> None:
        self._settings, self._world = settings, world
        self._environment = _environment(world)
        self._about = {"format": FORMAT, "ranks": world.size, "policy": policy, **self._environment}
        self._lock = threading.Lock()  # of what follows, which rank 0 alone keeps up to date
        self._jobs, self._added, self._submitted = list(jobs), [], {}
        said: dict[str, Any] = {"trouble": ""}
        try:
            settings.path.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                said |= self._take_over()
                self._write_set()
        except Exception as error:
            said["trouble"] = f"{type(error).__name__}: {error}"
        heard = [json.loads(text) for text in world.control.allgather_text(json.dumps(said))]
        for rank, each in enumerate(heard):
            if each["trouble"]:
                raise JobError(f"Checkpoints cannot be kept in `{settings.path}`, on rank {rank}: {each['trouble']}.")
        self.again: dict[str, str] = heard[0]["again"]
        self.added_before: frozenset[str] = frozenset(heard[0]["added"])
        self.missing: list[str] = heard[0]["missing"]
        self._writer = Writer()

    def _take_over(self) -> dict[str, Any]:
        """What earlier runs had, and did not end, is still part of the set."""
        file = self._settings.path / SET_FILE
        try:
            before = read(file)
        except UnusableError as error:
            _log.warning("`%s` %s: jobs that joined during an earlier run are not known.", file, error)
            before = Members(submitted={})
        left = {name: self._folders(name).marked("left") for name in before.jobs}
        going = [name for name in before.jobs if left[name] != "ended"]
        lacking = [name for name in going if name not in self._jobs]
        self._submitted = {name: text for name, text in before.submitted.items() if name in lacking}
        self._added = [name for name in before.added if name in going]
        self._jobs += lacking
        return {
            "again": self._submitted,
            "added": self._added,
            "missing": [name for name in lacking if name not in self._submitted and left[name] != "stopped"],
        }

    def _write_set(self) -> None:
        with self._lock:
            members = {"jobs": self._jobs, "added": self._added, "submitted": self._submitted}
            text = json.dumps({**self._about, **members}, indent=1)
        write_text(self._settings.path / SET_FILE, text)

    def _note_members(self) -> None:
        try:
            self._write_set()
        except OSError as error:
            _log.warning("A restart will not know all jobs of this run: %s.", clause(str(error)))

    def added(self, job: str, submission: str | None = None) -> None:
        """A job was added during the run; by which text, if it was submitted. Does not wait: this is on disk before any
        checkpoint that begins later.
        """
        if self._world.rank != 0:
            return
        with self._lock:
            self._jobs += [job] if job not in self._jobs else []
            self._added += [job] if job not in self._added else []
            if submission is not None:
                self._submitted[job] = submission
        self._writer.submit(self._note_members)

    def _folders(self, job: str) -> Folders:
        return Folders(self._settings.path / folder_name(job), rank=self._world.rank, ranks=self._world.size)

    @property
    def every(self) -> int | None:
        return self._settings.every

    def keeper(self, job: str, note: Callable[[str], None]) -> JobCheckpointer:
        """What restores and saves one job; `note` tells a person."""
        return JobCheckpointer(
            RankGather(job, note), world=self._world, folders=self._folders(job), keep=self._settings.keep,
            environment=self._environment, writer=self._writer,
        )  # fmt: skip

    def close(self) -> None:
        """Ends the thread that writes, after what it has begun. Waits; the watchdog tells of a disk that hangs."""
        last = self._writer.submit(lambda: None)
        self._writer.wait_for(last, self._world, job="", step=0, lacks="what is left to write")
        self._writer.close()


def _environment(world: SessionWorld) -> dict[str, str]:
    """What decides the last bits of results, beside program and data."""
    device = jax.local_devices()[0]
    packages = {name: version(name) for name in ("jaxcross", "jax", "jaxlib")}
    return {
        **packages, "device": f"{device.platform} {device.device_kind}", "mpi": world.vendor,
        "threads": str(world.pool_size),
    }  # fmt: skip
