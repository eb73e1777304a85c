"""What the user says about checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where the jobs of a `Runner` keep checkpoints, and when. The same on every rank; creating it touches no disk.

    A checkpoint is written by a thread off both lanes, and counts once every rank's part is complete. A run that finds
    checkpoints in `directory` resumes each of its jobs from the newest one that is whole.

    Args:
        directory: A folder on a POSIX file system, shared by all nodes or local to each. One run at a time may use it.
        every: The plain loop of `jaxcross.Job` saves after so many steps; with None only where it ends or is
            interrupted. A loop of your own calls `job.save`.
        keep: How many complete checkpoints of each job are kept.

    Raises:
        ValueError: `every` or `keep` is below 1, or `directory` is empty.

    Example:
        >>> checkpoints = jaxcross.Checkpoints("checkpoints", every=1000)  # doctest: +SKIP
        >>> jaxcross.run(jobs, checkpoints=checkpoints)  # doctest: +SKIP
    """

    directory: str | os.PathLike[str]
    every: int | None = field(default=None, kw_only=True)
    keep: int = field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        if not os.fspath(self.directory):
            raise ValueError("`directory` is empty: say where checkpoints are to lie")
        for name, value in (("every", self.every), ("keep", self.keep)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` of the checkpoints is {value}: it must be at least 1")

    @property
    def path(self) -> Path:
        """The folder, absolute: a job may change the working directory."""
        return Path(self.directory).absolute()
