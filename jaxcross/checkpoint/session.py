"""The checkpoints of one run: a keeper for each job, one thread that writes, and a list of the set."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import jax

from jaxcross.checkpoint.folders import Folders, folder_name, write_text
from jaxcross.checkpoint.keeper import Keeper
from jaxcross.checkpoint.part import FORMAT
from jaxcross.checkpoint.restore import KeeperWorld
from jaxcross.checkpoint.settings import Checkpoints
from jaxcross.checkpoint.talk import Talk
from jaxcross.checkpoint.writer import Writer
from jaxcross.errors import JobError


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

    Raises:
        JobError: On every rank: the folder cannot be made or written on one of them.
    """

    def __init__(self, settings: Checkpoints, world: SessionWorld, *, jobs: Sequence[str], policy: str) -> None:
        self._settings, self._world = settings, world
        self._environment = _environment(world)
        trouble = ""
        try:
            settings.path.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                about = {"format": FORMAT, "ranks": world.size, "policy": policy, "jobs": list(jobs)}
                write_text(settings.path / "jobs.json", json.dumps({**about, **self._environment}, indent=1))
        except OSError as error:
            trouble = str(error)
        for rank, text in enumerate(world.control.allgather_text(trouble)):
            if text:
                raise JobError(f"Checkpoints cannot be kept in `{settings.path}`, on rank {rank}: {text}.")
        self._writer = Writer()

    @property
    def every(self) -> int | None:
        return self._settings.every

    def keeper(self, job: str, note: Callable[[str], None]) -> Keeper:
        """What restores and saves one job; `note` tells a person."""
        folders = Folders(self._settings.path / folder_name(job), rank=self._world.rank, ranks=self._world.size)
        return Keeper(
            Talk(job, note), world=self._world, folders=folders, keep=self._settings.keep,
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
