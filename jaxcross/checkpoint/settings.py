"""The user's checkpoint settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxcross._arguments import is_whole


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Folder and frequency of a `Runner`'s checkpoints. Must be the same on every rank.

    Creating this object doesn't access the disk. A checkpoint is written by a separate thread
    rather than in a lane, and counts once every rank's part is complete. If a run finds checkpoints
    in `directory`, it resumes each of its jobs from the newest one that is intact.

    Args:
        directory: A folder on a POSIX file system, either shared by all nodes or local to each.
            Only one run may use it at a time.
        every: The plain loop of `jaxcross.Job` saves after every `every` steps; with None, it saves
            only when it ends or is interrupted. Your own loop calls `job.save` instead.
        keep: Number of complete checkpoints to keep for each job.
        best: The name of a metric of each job's evaluations, such as `eval/accuracy`. The state
            with the best value so far is saved when it's evaluated, and kept in addition to the
            others; read it with `jaxcross.load_checkpoint(..., best=True)`.
        mode: Whether the `min` or the `max` is best. Required with `best`.

    Raises:
        TypeError: `directory` isn't a path, `every` or `keep` isn't a whole number, or `best` isn't
            a string.
        ValueError: `every` or `keep` is below 1, `directory` is empty, or `mode` doesn't go with
            `best`.

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
            raise ValueError("`directory` of the checkpoints is empty: name a folder.")
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
        return Path(self.directory).absolute()
