"""Finds the newest checkpoint of a job that is complete on all ranks, and reads it.

All ranks must resume from the same checkpoint, though each sees only its own disk, so every
decision here follows from texts that were gathered from all ranks:

1. Each rank surveys the parts on its disk, without reading arrays. From these, `_select` finds the
   checkpoints that are complete on all ranks.
2. The ranks try them from the newest to the oldest. A rank reads its arrays and compares them with
   their digests. If a rank finds damage, all ranks pass over that checkpoint.
3. Leaves that only rank 0 stores are broadcast.

A checkpoint that can't be *read* is different from one that is *damaged*. If a disk or the network
fails for a moment, the checkpoint may be intact, and silently resuming from an older one, or
starting again, would lose work. So such an error is raised rather than passed over. For the same
reason, as long as any checkpoint's folder is left, a job starts from scratch only if none of them
was ever complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxcross._pytree import Form, PyTree, digest, narrowed, snapshot, unlike
from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.folders import ABSENT, Folders
from jaxcross.checkpoint.part import (
    AbsentError,
    Part,
    UnknownFormatError,
    UnusableError,
    parse,
    to_text,
)
from jaxcross.checkpoint.rank_gather import JobLog, RankGather
from jaxcross.checkpoint.rank_local import rank_local_leaves
from jaxcross.errors import JobError, clause, first_line, quoted
from jaxcross.world import World

UNREADABLE = (
    "has checkpoints that cannot be read now, which says nothing against them: none was deleted. "
    "Start again once the disk, or the way to it, is well. What happened"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that all ranks have read.

    Attributes:
        name: The checkpoint's name.
        part: This rank's part, or rank 0's if this rank had none.
        arrays: All leaves, by path.
        complete: Names of the checkpoints that are complete on all ranks, oldest first. This
            checkpoint is the last of them.
    """

    name: str
    part: Part
    arrays: dict[str, np.ndarray]
    complete: list[str]


_Offer = Mapping[str, tuple[int, bool]]
"""For each checkpoint, the number of ranks that wrote it, and whether all its leaves are common."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The checkpoints of all ranks. The same on every rank.

    Attributes:
        complete: Names of the checkpoints that all ranks can resume from, oldest first.
        foreign: Checkpoints with rank-local leaves that a different number of ranks wrote: that
            number, by the checkpoint's name.
    """

    complete: list[str]
    foreign: dict[str, int]

    @property
    def refused(self) -> str | None:
        """The newest checkpoint, if this number of ranks can't resume from it; otherwise None."""
        newest = max((*self.complete, *self.foreign), default=None)
        return newest if newest in self.foreign else None


@dataclass(frozen=True, slots=True)
class _Survey:
    """The parts on one rank's disk.

    Attributes:
        parts: The readable parts, by checkpoint.
        faults: For each other checkpoint, why this rank has no usable part of it.
        absent: Those of `faults` of which this rank has no part at all.
        marked: Name of a checkpoint that was once complete on all ranks, if this rank has such a
            mark.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    marked: str = ""


def find(
    state: PyTree,
    wanted: Mapping[str, Form],
    *,
    world: World,
    folders: Folders,
    ranks: RankGather,
    local: bool,
    named: Collection[str],
) -> Found | None:
    """Returns the newest checkpoint that is complete on all ranks. Waits for all ranks.

    Returns None if no checkpoint was ever finished. The caller's thread reads the files. Texts, and
    the leaves that rank 0 stores for all ranks, are exchanged through `ranks`.

    Args:
        state: The state with which the job would start from scratch.
        wanted: The forms of its leaves.
        world: Rank, size, and a broadcast.
        folders: Where the parts are on this rank's disk.
        ranks: Gathers texts from all ranks.
        local: Whether ranks have different `state`s on purpose.
        named: Paths of the leaves that the job names as rank-local; the same on every rank.

    Raises:
        JobError: Raised on every rank. The newest checkpoint doesn't fit `wanted` or this number of
            ranks, or belongs to another version; or a rank can't read its disk; or there are
            checkpoints, but all are damaged.
    """
    seen = _survey(folders, ranks)
    parts = seen.parts
    candidates = _select(ranks.gather("what is there", _to_offer(parts)))
    for name, fault in seen.faults.items():
        # A missing part isn't needed if rank 0 stores everything, or if the checkpoint isn't used
        # at all.
        if name not in seen.absent or name not in {*candidates.complete, *candidates.foreign}:
            ranks.log.warn(f"checkpoint `{name}` is not whole: {fault}")
    damaged: dict[str, str] = {}
    complete = candidates.complete
    # Go from the newest to the oldest, and pass over any checkpoint whose files turn out to be
    # damaged. Every decision in this loop follows from gathered texts, so all ranks decide alike.
    while complete and candidates.refused is None:
        name = complete[-1]
        # All ranks use rank 0's description: if the leaves are identical on all ranks, only rank 0
        # is sure to have a part.
        first = parse(
            ranks.gather_text("its leaves", to_text(parts[name]) if world.rank == 0 else "")[0]
        )
        part = _part_here(first, parts.get(name), world)
        _check_fit(
            first, part, state, wanted, ranks, world, folders.path / name, local=local, named=named
        )
        held, damage, error = read_arrays(folders, name, part, all_leaves=world.rank == 0)
        gathered = ranks.gather("read", [damage, _error_text(error, folders.arrays_path(name))])
        # A checkpoint on a disk that can't be read right now may be intact, so don't skip it.
        ranks.check(UNREADABLE, [error_text for _, error_text in gathered], error)
        if not any(damage for damage, _ in gathered):
            return Found(name, part, held | _common(part, held, world, ranks), complete)
        damaged[name] = "; ".join(
            f"on rank {rank}, {text}" for rank, (text, _) in enumerate(gathered) if text
        )
        ranks.log.warn(f"checkpoint `{name}` is damaged, and passed over: {damaged[name]}")
        complete.pop()
    if candidates.refused is not None:
        name = candidates.refused
        leaves = quoted(parts[name].rank_local[:3]) if world.rank == 0 else ""
        leaves = ranks.gather_text("which leaves", leaves)[0]
        raise _refusal(
            ranks.log,
            f"{folders.path / name}",
            leaves,
            saved_on=candidates.foreign[name],
            ranks=world.size,
        )
    # There's nothing to resume from. Before we start from scratch, rule out that this would hide a
    # loss.
    found = ranks.gather(
        "whose parts are where",
        {"holders": folders.holders(), "faults": seen.faults, "marked": seen.marked},
    )
    _refuse_misplaced(ranks.log, [each["holders"] for each in found], world.size)
    _refuse_lost(ranks.log, found, damaged, f"{folders.path}")
    return None


def _to_offer(parts: Mapping[str, Part]) -> _Offer:
    """Summarises one rank's parts for `_select`."""
    return {name: (part.ranks, not part.rank_local) for name, part in parts.items()}


def _select(offers: Sequence[_Offer]) -> _Candidates:
    """Selects checkpoints, given every rank's `_to_offer`, by rank.

    Rank 0 stores the leaves that are identical on all ranks. If that's all of them, its part is
    enough for any number of ranks. Otherwise each rank needs its own part, so the number of ranks
    must be the same.
    """
    complete: list[str] = []
    foreign: dict[str, int] = {}
    for name, (ranks, common) in sorted(offers[0].items()):
        if common or (ranks == len(offers) and all(name in offer for offer in offers)):
            complete.append(name)
        elif ranks != len(offers):
            foreign[name] = ranks
    return _Candidates(complete, foreign)


def _check_fit(
    first: Part,
    part: Part,
    state: PyTree,
    wanted: Mapping[str, Form],
    ranks: RankGather,
    world: World,
    path: Path,
    *,
    local: bool,
    named: Collection[str],
) -> None:
    """Checks that this job and number of ranks can resume from it. Waits for all ranks."""
    differs = unlike(wanted, part.forms) or narrowed(part.forms) or ""
    ranks.check(
        _other_shapes(f"{path}", saved_on=first.ranks, ranks=world.size),
        ranks.gather_text("its shapes", differs),
    )
    own = [leaf for leaf in first.leaves if leaf in named]
    if own and first.ranks != world.size:
        # These leaves weren't named when they were saved, and happened to be equal on all ranks.
        raise _refusal(
            ranks.log, f"{path}", quoted(own[:3]), saved_on=first.ranks, ranks=world.size
        )
    if first.ranks == 1 < world.size:
        # A single rank has no other rank to compare its leaves with, so its part declares all of
        # them common.
        _refuse_copies(
            ranks.log, ranks.gather("whose they are", _initial(state, local=local)), f"{path}"
        )


def _refuse_misplaced(
    log: JobLog, holders: Sequence[Mapping[str, Sequence[int]]], ranks: int
) -> None:
    """Refuses to start from scratch if a complete checkpoint's parts are on wrong ranks' disks."""
    for name in sorted({name for each in holders for name in each}, reverse=True):
        # The parts that their own ranks don't find, and the rank on whose disk each of them is.
        where = {
            r: here
            for here, each in enumerate(holders)
            for r in each.get(name, ())
            if r not in holders[r].get(name, ())
        }
        if where and {r for each in holders for r in each.get(name, ())} == set(range(ranks)):
            misplaced = ", ".join(
                f"that of rank {r} on rank {here}'s disk" for r, here in sorted(where.items())
            )
            raise log.error(
                f"has a checkpoint `{name}` whose parts lie where other ranks look for theirs: "
                f"{misplaced}. Start each rank on the node on which it was, copy the parts, or "
                "name another directory."
            )


def _refuse_lost(
    log: JobLog, found: Sequence[Mapping[str, Any]], damaged: Mapping[str, str], path: str
) -> None:
    """Refuses to start from scratch if there was once a complete checkpoint.

    If the run was killed during its first write, no rank has a mark, and no checkpoint has parts
    from every rank. Then nothing is lost.
    """
    holders = [each["holders"] for each in found]
    names = sorted({name for each in holders for name in each}, reverse=True)
    complete = any(
        all(rank in each.get(name, ()) for rank, each in enumerate(holders)) for name in names
    )
    if not names or not (damaged or complete or any(each["marked"] for each in found)):
        return
    # In reverse, because the last reason stays: it's the lowest rank's.
    reasons = {
        name: f"on rank {rank}, {each['faults'].get(name, 'nothing of it is there')}"
        for name in names
        for rank, each in reversed([*enumerate(found)])
        if name in each["faults"] or name not in holders[rank]
    }
    listed = "; ".join(f"`{name}`: {text}" for name, text in (reasons | dict(damaged)).items())
    raise log.error(
        f"has checkpoints in `{path}`, and none of them is whole any more. It does not begin again "
        "by itself, and nothing was deleted. Bring back what is missing or, to begin again, move "
        f"`{path}` away, on every node. In detail: {listed}."
    )


def _survey(folders: Folders, ranks: RankGather) -> _Survey:
    """Looks at the parts on this rank's disk, but not at their arrays. Waits for all ranks.

    Raises:
        JobError: Raised on every rank. A rank can't read its disk, or a checkpoint belongs to
            another version.
    """
    seen = _Survey()
    unknown = ""
    failure: Exception | None = None
    path = folders.path  # the path that an error refers to
    try:
        seen = _Survey(marked=folders.marked("whole"))
        for name in folders.names():
            path = folders.part_path(name)
            try:
                part = folders.read(name)
                if part.job != ranks.log.job:
                    raise UnusableError(f"`{path}` is of a job `{part.job}`")
                seen.parts[name] = part
            except UnknownFormatError:
                unknown = f"`{path}`"
            except UnusableError as error:
                seen.faults[name] = str(error)
                seen.absent.update([name] if isinstance(error, AbsentError) else ())
    except (OSError, MemoryError) as error:
        failure = error
    # No rank may continue alone, because the others would wait for it in the next gathering.
    gathered = ranks.gather("versions", [unknown, _error_text(failure, path)])
    ranks.check(UNREADABLE, [text for _, text in gathered], failure)
    ranks.check(
        "has a checkpoint that another version of jaxcross wrote. Resume with that version, or "
        "name another directory. It is",
        [text for text, _ in gathered],
    )
    return seen


def _error_text(error: Exception | None, path: Path) -> str:
    if error is None:
        return ""
    return f"in `{path}`, {type(error).__name__}: {clause(first_line(str(error)))}"


def _part_here(first: Part, own: Part | None, world: World) -> Part:
    """Returns the part that this rank resumes from.

    That's its own part. If it has none, it's rank 0's part, without the states of that rank's data
    iterators.
    """
    # Take rank 0's notes: ranks that failed separately may have noted different things.
    if own is not None and own.ranks == world.size:
        return replace(own, notes=first.notes, best_step=first.best_step)
    return replace(
        first, rank=world.rank, files={}, places=tuple((taken, None) for taken, _ in first.places)
    )


def read_arrays(
    folders: Folders, name: str, part: Part, *, all_leaves: bool
) -> tuple[dict[str, np.ndarray], str, Exception | None]:
    """Reads the arrays that this rank stores.

    Returns:
        The arrays by path; a description of the damage, if any; and the error that prevented this
        rank from reading the arrays, if any.
    """
    folder = folders.arrays_path(name)
    try:
        if part.files:
            folders.check_files(name, part.files)
        held = {
            path: saved for path, saved in part.leaves.items() if all_leaves or not saved.common
        }
        values = arrays.read(folder, {path: saved.form for path, saved in held.items()})
        for path, saved in held.items():
            if digest(saved.form, values[path]) != saved.digest:
                raise UnusableError(f"`{folder}` has other values in `{path}` than were saved")
    except (UnusableError, *ABSENT) as error:
        return {}, str(error), None
    # This includes orbax's errors: the files are those that were written, so it isn't damage.
    except Exception as error:
        return {}, "", error
    return values, "", None


def _common(
    part: Part, held: Mapping[str, np.ndarray], world: World, ranks: RankGather
) -> dict[str, np.ndarray]:
    """Returns rank 0's leaves for all ranks. They're broadcast: nodes may have separate disks."""
    forms = {path: saved.form for path, saved in part.leaves.items() if saved.common}
    if world.size == 1 or not forms:
        return {}
    sent = {
        path: held[path] if path in held else np.zeros(f.shape, np.dtype(f.dtype))
        for path, f in forms.items()
    }
    return ranks.run_on_all_ranks(
        "checkpoint: values", lambda _: world.broadcast_or_check(sent, mode="broadcast")
    )


def _initial(state: PyTree, *, local: bool) -> tuple[list[str], dict[str, str]]:
    """Returns the rank-local leaves' paths, and all leaves' digests, of a rank's initial state.

    Digests are empty unless ranks have different states on purpose: otherwise rank 0's values would
    be used anyway.
    """
    digests = {path: leaf.digest if local else "" for path, leaf in snapshot(state).items()}
    return rank_local_leaves(state), digests


def _refuse_copies(
    log: JobLog, initial: Sequence[tuple[list[str], dict[str, str]]], path: str
) -> None:
    """Refuses a single rank's checkpoint if it has leaves that each rank needs for itself."""
    _, first = initial[0]
    own = [
        leaf
        for leaf in first
        if any(leaf in local or leaf not in d or d[leaf] != first[leaf] for local, d in initial)
    ]
    if own:
        raise _refusal(log, path, quoted(own[:3]), saved_on=1, ranks=len(initial))


def _refusal(log: JobLog, path: str, leaves: str, *, saved_on: int, ranks: int) -> JobError:
    return log.error(
        f"cannot resume on {_ranks(ranks)} from `{path}`, which {_ranks(saved_on)} wrote: each "
        f"rank has its own values of {leaves}. Such values (residuals of an exchange, parts of a "
        "model, leaves that `rank_local` names) belong to that number of ranks. Start "
        f"{_ranks(saved_on)}, or name another directory."
    )


def _other_shapes(path: str, *, saved_on: int, ranks: int) -> str:
    if saved_on == ranks:
        return (
            f"cannot resume from `{path}`. Its model, its optimizer or an argument of its exchange "
            "has changed: go back to the old one, or name another directory. What differs"
        )
    return (
        f"cannot resume on {_ranks(ranks)} from `{path}`, which {_ranks(saved_on)} wrote. "
        "Residuals of an exchange, or parts of a model, may be cut for that number of ranks: start "
        f"{_ranks(saved_on)}, or name another directory. Else its model, its optimizer or an "
        "argument of its exchange has changed. What differs"
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"
