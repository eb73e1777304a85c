"""Loads one job's newest or best state in any process, e.g. for evaluation or export.

Unlike a run, where each rank reads only its own disk and the ranks have to agree on a checkpoint
(see `restore`), this is for a single process that doesn't communicate and needs the parts of all
ranks in one folder. The upside is that it can load the state of any number of ranks, and any rank's
version of the leaves that differ. Also, if the arrays of the newest complete checkpoint are
damaged, it raises an error, while a restarted run would fall back to an older checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from jaxcross._files import with_time
from jaxcross._pytree import forms_of, narrowed, rebuild, unlike
from jaxcross.checkpoint.folders import Folders, folder_name, step_of
from jaxcross.checkpoint.part import Part, UnknownFormatError, UnusableError
from jaxcross.checkpoint.rank_gather import JobLog
from jaxcross.checkpoint.restore import read_arrays

T = TypeVar("T")


def load_checkpoint(
    directory: str | os.PathLike[str], job: str, state: T, *, best: bool = False, rank: int = 0
) -> tuple[T, int]:
    """Loads the newest or best state of a job. Waits for the disk; doesn't communicate.

    Args:
        directory: The directory passed to `Checkpoints`. It must contain the parts of all ranks.
        job: The job's name.
        state: A tree with the structure, shapes and types of the job's state. The values don't
            matter. Static leaves, such as functions, are taken from it.
        best: Whether to load the best state according to `Checkpoints(best=...)` instead of the
            newest state.
        rank: Whose values to load for leaves that differ between ranks.

    Returns:
        The state as a tree with the structure of `state`, and the number of steps the job had made.

    Raises:
        JobError: There's no such checkpoint or rank, or the checkpoint is damaged or belongs to a
            different model or version.
        TypeError: A leaf of `state` is neither an array nor a number, and can't be static.
        OSError: The disk can't be read.

    Example:
        >>> state, step = jaxcross.load_checkpoint("checkpoints", "a", init())  # doctest: +SKIP
    """
    log = JobLog(job, lambda _: None)
    path = with_time(directory).absolute() / folder_name(job)
    parts = _complete(log, path)
    if not parts:
        raise log.error(
            f"has no checkpoint in `{path}` that is complete on all ranks. Check `directory` and "
            "`job`."
        )
    name = max(parts)
    if best:
        name = _best(log, path, parts)
    first = parts[name]
    differs = unlike(forms_of(state), first.forms) or narrowed(first.forms)
    if differs:
        raise log.error(
            f"cannot be loaded from `{path / name}`, which was saved by another model than that of "
            f"`state`. Pass a `state` of the saved model. What differs: {differs}"
        )
    if not 0 <= rank < first.ranks:
        raise log.error(
            f"was saved on {first.ranks} ranks, so `rank` must be from 0 to {first.ranks - 1}, got "
            f"{rank}"
        )
    arrays = {}
    # Rank 0's part contains its values for all leaves. If some leaves differ between ranks, read
    # the requested rank's part second, so that its values for those leaves take precedence.
    for each in sorted({0, rank} if first.rank_local else {0}):
        folders = Folders(path, rank=each, ranks=first.ranks)
        try:
            held, damage, error = read_arrays(
                folders, name, folders.read(name), all_leaves=each == 0
            )
        except UnusableError as unusable:
            held = {}
            damage = str(unusable)
            error = None
        if damage or error is not None:
            raise log.error(f"cannot be loaded from `{path / name}`: {damage or error}") from error
        arrays |= held
    return rebuild(state, first.forms, arrays), first.step


def _complete(log: JobLog, path: Path) -> dict[str, Part]:
    """Returns rank 0's part of each complete checkpoint, by the checkpoint's name."""
    found = {}
    # We don't know yet how many ranks have written a checkpoint; each of its parts records that.
    # Start with rank 0's part, which is always there.
    folders = Folders(path, rank=0, ranks=1)
    for name in folders.names():
        try:
            part = folders.read(name)
        except UnknownFormatError:
            raise log.error(
                f"cannot be loaded from `{path / name}`: another version of jaxcross wrote it. "
                "Load it with that version."
            ) from None
        except UnusableError:
            continue
        # If all leaves are identical on all ranks, rank 0 has stored them all, and its part is
        # enough. Otherwise, the checkpoint is only complete if every rank that took part has
        # completed its part.
        holders = Folders(path, rank=0, ranks=part.ranks).holders().get(name, [])
        if not part.rank_local or len(holders) == part.ranks:
            found[name] = part
    return found


def _best(log: JobLog, path: Path, parts: dict[str, Part]) -> str:
    # Every checkpoint contains the best step as of that time, so the newest is right.
    step = parts[max(parts)].best_step
    if step is None:
        raise log.error(
            f'has no best state in `{path}`. To keep one, pass `Checkpoints(..., best="eval/loss", '
            'mode="min")` to the run.'
        )
    names = [name for name in parts if step_of(name) == step]
    if not names:
        raise log.error(
            f"had its best state at step {step}, whose checkpoint is no longer in `{path}`. To "
            "load the newest checkpoint, leave out `best`."
        )
    return max(names)
