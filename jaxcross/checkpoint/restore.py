"""Finds the newest checkpoint of a job that is complete on all ranks, and reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxcross._pytree import Form, PyTree, digest, narrowed, snapshot, unlike
from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.layout import ABSENT, Folders
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
from jaxcross.checkpoint.select import select, to_offer
from jaxcross.errors import JobError, clause, first_line
from jaxcross.world import World

UNREADABLE = (
    "has checkpoints that cannot be read now, which says nothing against them: none was deleted. "
    "Start again once the disk, or the way to it, is well. What happened"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that all ranks have read.

    Attributes:
        name: Its name.
        part: This rank's part; rank 0's, if this one had none.
        arrays: All leaves, by path.
        complete: Names of the checkpoints that are complete on all ranks, oldest first; this is the
            last of them.
    """

    name: str
    part: Part
    arrays: dict[str, np.ndarray]
    complete: list[str]


@dataclass(frozen=True, slots=True)
class _Survey:
    """The parts on one rank's disk.

    Attributes:
        parts: Its readable parts, by checkpoint.
        faults: Why this rank has no usable part, for each other checkpoint.
        absent: Those of `faults` of which this rank has no part at all.
        marked: Name of a checkpoint that was once complete on all ranks, if this rank has a mark of
            one.
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
    """Returns the newest checkpoint that is complete on all ranks; None if none was ever finished.
    Waits for all ranks.

    Files are read in the caller's thread; texts, and the leaves that rank 0 holds for all, pass
    through `ranks`.

    Args:
        state: The state with which the job would begin.
        wanted: The forms of its leaves.
        world: Rank, size, and a broadcast.
        folders: The places of the parts on this rank's disk.
        ranks: Gathers texts of all ranks.
        local: Whether ranks have different `state`s on purpose.
        named: Paths of the leaves that the job names as rank-local; the same on every rank.

    Raises:
        JobError: On every rank: the newest one does not fit `wanted` or this number of ranks, or is
            of another version; a rank cannot read; or there are some, and all are damaged.
    """
    seen = _survey(folders, ranks)
    parts = seen.parts
    selection = select(ranks.gather("what is there", to_offer(parts)))
    for name, fault in seen.faults.items():
        # Where rank 0 holds everything, or the checkpoint is not used at all, an absent part is not
        # needed.
        if name not in seen.absent or name not in {*selection.complete, *selection.foreign}:
            ranks.log.warn(f"checkpoint `{name}` is not whole: {fault}")
    damaged: dict[str, str] = {}
    complete = selection.complete
    # From the newest to the oldest: a checkpoint whose files turn out to be damaged gives way to
    # the one before. Every decision in this loop follows from gathered texts, so that all ranks
    # make it alike.
    while complete and selection.refused is None:
        name = complete[-1]
        # All ranks take rank 0's description: where leaves are equal on all ranks, it alone is sure
        # to be there.
        first = parse(
            ranks.gather_text("its leaves", to_text(parts[name]) if world.rank == 0 else "")[0]
        )
        part = _part_here(first, parts.get(name), world)
        _check_fit(
            first, part, state, wanted, ranks, world, folders.path / name, local=local, named=named
        )
        held, damage, error = read_arrays(folders, name, part, all_leaves=world.rank == 0)
        gathered = ranks.gather("read", [damage, _error_text(error, folders.arrays_path(name))])
        # A checkpoint on a disk that cannot be read now may be intact: do not skip it.
        ranks.check(UNREADABLE, [error_text for _, error_text in gathered], error)
        if not any(damage for damage, _ in gathered):
            return Found(name, part, held | _common(part, held, world, ranks), complete)
        damaged[name] = "; ".join(
            f"on rank {rank}, {text}" for rank, (text, _) in enumerate(gathered) if text
        )
        ranks.log.warn(f"checkpoint `{name}` is damaged, and passed over: {damaged[name]}")
        complete.pop()
    if selection.refused is not None:
        name = selection.refused
        leaves = _listed(parts[name].rank_local) if world.rank == 0 else ""
        leaves = ranks.gather_text("which leaves", leaves)[0]
        raise _refusal(
            ranks.log,
            f"{folders.path / name}",
            leaves,
            saved_on=selection.foreign[name],
            ranks=world.size,
        )
    # There is nothing to resume from. Beginning again would hide a loss, so that has to be ruled
    # out first.
    found = ranks.gather(
        "whose parts are where",
        {"holders": folders.holders(), "faults": seen.faults, "marked": seen.marked},
    )
    _refuse_misplaced(ranks.log, [each["holders"] for each in found], world.size)
    _refuse_lost(ranks.log, found, damaged, f"{folders.path}")
    return None


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
    """Makes sure that the job and this number of ranks can resume from the checkpoint. Waits for
    all ranks.

    Raises:
        JobError: On every rank: they cannot.
    """
    differs = unlike(wanted, part.forms) or narrowed(part.forms) or ""
    ranks.check(
        _other_shapes(f"{path}", saved_on=first.ranks, ranks=world.size),
        ranks.gather_text("its shapes", differs),
    )
    own = [leaf for leaf in first.leaves if leaf in named]
    if own and first.ranks != world.size:
        # They were not named when they were saved, and happened to be equal on all ranks.
        raise _refusal(ranks.log, f"{path}", _listed(own), saved_on=first.ranks, ranks=world.size)
    if first.ranks == 1 < world.size:
        # A single rank has nothing to compare its leaves with, so that its part calls all of them
        # common.
        _refuse_copies(
            ranks.log, ranks.gather("whose they are", _initial(state, local=local)), f"{path}"
        )


def _refuse_misplaced(
    log: JobLog, holders: Sequence[Mapping[str, Sequence[int]]], ranks: int
) -> None:
    """Refuses to begin again if all parts of a checkpoint are there, but on the disks of other
    ranks.

    Raises:
        JobError: On every rank.
    """
    for name in sorted({name for each in holders for name in each}, reverse=True):
        # The parts that their own ranks do not find, and the rank on whose disk each of them is.
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
    """Refuses to begin again if there was a complete checkpoint once.

    A kill during the first write leaves no rank's mark, and no checkpoint of which every rank has a
    part: then nothing is lost.

    Raises:
        JobError: On every rank.
    """
    holders = [each["holders"] for each in found]
    names = sorted({name for each in holders for name in each}, reverse=True)
    complete = any(
        all(rank in each.get(name, ()) for rank, each in enumerate(holders)) for name in names
    )
    if not names or not (damaged or complete or any(each["marked"] for each in found)):
        return
    reasons = {
        name: f"on rank {rank}, {each['faults'].get(name, 'nothing of it is there')}"
        for name in names
        for rank, each in reversed(
            [*enumerate(found)]
        )  # the lowest rank comes last, and its reason stays
        if name in each["faults"] or name not in holders[rank]
    }
    listed = "; ".join(f"`{name}`: {text}" for name, text in (reasons | dict(damaged)).items())
    raise log.error(
        f"has checkpoints in `{path}`, and none of them is whole any more. It does not begin again "
        "by itself, and nothing was deleted. Bring back what is missing or, to begin again, move "
        f"`{path}` away, on every node. In detail: {listed}."
    )


def _survey(folders: Folders, ranks: RankGather) -> _Survey:
    """Looks at the parts on this rank's disk, without their arrays. Waits for all ranks.

    Raises:
        JobError: On every rank: one cannot read, or a checkpoint is of another version.
    """
    seen = _Survey()
    unknown = ""
    failure: Exception | None = None
    path = folders.path  # the one that an error is about
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
    # No rank may go on alone: the others would wait for it in the next gathering.
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

    That is its own or, where it has none, rank 0's without the states of that rank's iterators.
    """
    if (
        own is not None and own.ranks == world.size
    ):  # ranks that failed apart may have noted different things
        return replace(own, notes=first.notes, best_step=first.best_step)
    return replace(
        first, rank=world.rank, files={}, places=tuple((taken, None) for taken, _ in first.places)
    )


def read_arrays(
    folders: Folders, name: str, part: Part, *, all_leaves: bool
) -> tuple[dict[str, np.ndarray], str, Exception | None]:
    """Reads the arrays that this rank holds.

    Returns:
        The arrays by path, the damage if there is any, and the error that kept this rank from
        reading them.
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
    except (
        Exception
    ) as error:  # of orbax too: the files have been found to be those that were written
        return {}, "", error
    return values, "", None


def _common(
    part: Part, held: Mapping[str, np.ndarray], world: World, ranks: RankGather
) -> dict[str, np.ndarray]:
    """Returns the leaves that rank 0 holds for all. They are sent, as each node may have a disk of
    its own.
    """
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
    """Describes the state with which a rank would begin: paths of its rank-local leaves, and
    digests of all leaves.

    Digests are empty unless ranks have different states on purpose: otherwise rank 0's values would
    be taken anyway.
    """
    digests = {path: leaf.digest if local else "" for path, leaf in snapshot(state).items()}
    return rank_local_leaves(state), digests


def _refuse_copies(
    log: JobLog, initial: Sequence[tuple[list[str], dict[str, str]]], path: str
) -> None:
    """Refuses a checkpoint of a single rank if it has leaves of which each rank needs its own
    value.

    Raises:
        JobError: On every rank.
    """
    _, first = initial[0]
    own = [
        leaf
        for leaf in first
        if any(leaf in local or leaf not in d or d[leaf] != first[leaf] for local, d in initial)
    ]
    if own:
        raise _refusal(log, path, _listed(own), saved_on=1, ranks=len(initial))


def _refusal(log: JobLog, path: str, leaves: str, *, saved_on: int, ranks: int) -> JobError:
    return log.error(
        f"cannot resume on {_ranks(ranks)} from `{path}`, which {_ranks(saved_on)} wrote: each "
        f"rank has its own values of {leaves}. Such values (residuals of an exchange, parts of a "
        "model, leaves that `rank_local` names) belong to that number of ranks. Start "
        f"{_ranks(saved_on)}, or name another directory."
    )


def _listed(leaves: Sequence[str]) -> str:
    return ", ".join(f"`{leaf}`" for leaf in leaves[:3])


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
