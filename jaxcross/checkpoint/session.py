"""The checkpoints of one run: a keeper for each job, one thread that writes, and a list of the set."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import jax

from jaxcross.checkpoint.folders import SET_FILE, Folders, folder_name, write_text
from jaxcross.checkpoint.keeper import Keeper
from jaxcross.checkpoint.members import Members, read
from jaxcross.checkpoint.part import FORMAT, UnusableError
from jaxcross.checkpoint.restore import KeeperWorld
from jaxcross.checkpoint.settings import Checkpoints
from jaxcross.checkpoint.talk import Talk
from jaxcross.checkpoint.writer import Writer
from jaxcross.errors import JobError

_log = logging.getLogger("jaxcross")


class SessionWorld(KeeperWorld, Protocol):
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
        again: What was submitted in an earlier run and is not over, as texts: to be submitted again.
        missing: Names of jobs of an earlier run that are not over, and of which this one has no function.

    Raises:
        JobError: On every rank: the folder cannot be made or written on one of them.
    """

    def __init__(self, settings: Checkpoints, world: SessionWorld, *, jobs: Sequence[str], policy: str) -> None:
        self._settings, self._world = settings, world
        self._environment = _environment(world)
        self._about = {"format": FORMAT, "ranks": world.size, "policy": policy, **self._environment}
        self._lock = threading.Lock()
        self._jobs: list[str] = list(jobs)  # rank 0 keeps the list
        self._submitted: dict[str, str] = {}
        trouble, left = "", Members(submitted={})
        try:
            settings.path.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                left = self._left_from_before()
                self._jobs += left.jobs
                self._submitted = dict(left.submitted)
                self._write_set()
        except OSError as error:
            trouble = str(error)
        said = {"trouble": trouble, "jobs": left.jobs, "submitted": left.submitted}
        heard = [json.loads(text) for text in world.control.allgather_text(json.dumps(said))]
        for rank, each in enumerate(heard):
            if each["trouble"]:
                raise JobError(f"Checkpoints cannot be kept in `{settings.path}`, on rank {rank}: {each['trouble']}.")
        self.again: list[str] = list(heard[0]["submitted"].values())
        self.missing = [name for name in heard[0]["jobs"] if name not in heard[0]["submitted"]]
        self._writer = Writer()

    def _left_from_before(self) -> Members:
        """What earlier runs had, and did not end, and this one lacks."""
        file = self._settings.path / SET_FILE
        try:
            before = read(file)
        except UnusableError as error:
            _log.warning("`%s` %s: jobs that joined during an earlier run are not known.", file, error)
            return Members(submitted={})
        jobs = [name for name in before.jobs if name not in self._jobs and not self._folders(name).marked("left")]
        return Members(jobs=tuple(jobs), submitted={n: text for n, text in before.submitted.items() if n in jobs})

    def _write_set(self) -> None:
        with self._lock:
            about = {**self._about, "jobs": self._jobs, "submitted": self._submitted}
            text = json.dumps(about, indent=1)
        write_text(self._settings.path / SET_FILE, text)

    def _note_members(self) -> None:
        try:
            self._write_set()
        except OSError as error:
            _log.warning("A restart will not know all jobs of this run: %s.", error)

    def added(self, job: str, submission: str | None = None) -> None:
        """A job was added during the run; by which text, if it was submitted. Does not wait: this is on disk before any
        checkpoint that begins later.
        """
        with self._lock:
            if self._world.rank != 0 or job in self._jobs:
                return
            self._jobs.append(job)
            if submission is not None:
                self._submitted[job] = submission
        self._writer.submit(self._note_members)

    def _folders(self, job: str) -> Folders:
        return Folders(self._settings.path / folder_name(job), rank=self._world.rank, ranks=self._world.size)

    @property
    def every(self) -> int | None:
        return self._settings.every

    def keeper(self, job: str, note: Callable[[str], None]) -> Keeper:
        """What restores and saves one job; `note` tells a person."""
        return Keeper(
            Talk(job, note), world=self._world, folders=self._folders(job), keep=self._settings.keep,
            environment=self._environment, writer=self._writer,
        )  # fmt: skip

    def close(self) -> None:
        """Ends the thread that writes, after what it has begun. Waits."""
        self._writer.close()


def _environment(world: SessionWorld) -> dict[str, str]:
    """What decides the last bits of results, beside program and data."""
    device = jax.local_devices()[0]
    packages = {name: version(name) for name in ("jaxcross", "jax", "jaxlib")}
    return {
        **packages, "device": f"{device.platform} {device.device_kind}", "mpi": world.vendor,
        "threads": str(world.pool_size),
    }  # fmt: skip
