"""Finds a job's newest checkpoint that's complete on all ranks, and reads it.

**The problem.** All ranks have to resume from the same checkpoint, but each rank may have its own
disk and can only see the parts on that. The run may have been killed when some ranks had written
their parts of the newest checkpoint and others hadn't, or a part may be damaged on one rank's disk.
If every rank just picked the newest checkpoint on its own disk, they would resume from different
steps.

**The idea.** No rank ever decides on its own which checkpoint to use. Instead, each rank sends what
it has found on its disk to all the others, then they all apply the same pure function to these
findings and arrive at the same decision:

1. Each rank lists the parts on its disk, without reading any arrays yet (`_survey`). Given the
   lists of all ranks, `_select` works out which checkpoints are complete on all of them.
2. The ranks try these checkpoints, newest first. Each rank reads its arrays and verifies their
   digests. If any rank finds damage, all of them fall back to the next older checkpoint.
3. Leaves that are identical on all ranks are stored only by rank 0, which broadcasts them.

**Damaged or unreadable.** There's a difference between a checkpoint that is *damaged* and one that
*can't be read*. If the newest checkpoint is damaged, it makes sense to fall back to an older one.
But if a network drive has a hiccup, the newest checkpoint is most likely intact; silently resuming
from an older one, or even from scratch, could cost the user days of training without anyone
noticing. So if a file can't be read, every rank raises an error, and the user can restart once the
disk is working again.

**Starting from scratch.** There needn't be a complete checkpoint: the job may be new, or it may
have been killed before completing its first one. But it could also mean that checkpoints have been
lost. Before starting from scratch, we therefore make sure that none of the checkpoints whose
folders still exist was ever complete. Signs that one was are parts on the wrong ranks' disks,
damaged checkpoints, and a mark that each rank writes once its first checkpoint is complete.
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
    "has checkpoints that cannot be read now. They may be intact, so none was deleted. Restart "
    "once the disk, or the network to it, works again. What happened"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that all ranks have read.

    Attributes:
        name: The checkpoint's name.
        part: This rank's part, or rank 0's part if this rank has none.
        arrays: All leaves, by path.
        complete: Names of the checkpoints that are complete on all ranks, oldest first, ending with
            this one.
    """

    name: str
    part: Part
    arrays: dict[str, np.ndarray]
    complete: list[str]


_Offer = Mapping[str, tuple[int, bool]]
"""One rank's checkpoints: how many ranks wrote each, and whether all leaves are common."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The checkpoints to choose from. The same on every rank.

    Attributes:
        complete: Names of the checkpoints from which all ranks can resume, oldest first.
        foreign: Names of the checkpoints that have rank-local leaves and were written by a
            different number of ranks, along with that number.
    """

    complete: list[str]
    foreign: dict[str, int]

    @property
    def refused(self) -> str | None:
        """The newest checkpoint, if it can't be used with this number of ranks; otherwise None."""
        newest = max((*self.complete, *self.foreign), default=None)
        return newest if newest in self.foreign else None


@dataclass(frozen=True, slots=True)
class _Survey:
    """The parts on one rank's disk.

    Attributes:
        parts: The readable parts, by the checkpoint's name.
        faults: Why a checkpoint has no readable part on this rank, by the checkpoint's name.
        absent: Names of the checkpoints that have no part at all on this rank.
        marked: The name of a checkpoint that was once complete on all ranks, according to this
            rank's mark; empty if there's no mark.
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
    """Returns the newest checkpoint that's complete on all ranks. Waits for all ranks.

    Returns None if there has never been a complete checkpoint.

    Files are read in the job's own thread. Only the communication between ranks takes place in the
    exchange lane (the thread that does the communication for all jobs), which means that other jobs
    carry on even if reading takes a while.

    Args:
        state: The state that the job would start from if there were no checkpoint.
        wanted: The shapes and types of its leaves.
        world: Rank, size, and a broadcast.
        folders: Where the parts are on this rank's disk.
        ranks: Gathers texts from all ranks.
        local: Whether `state` differs between ranks by design.
        named: Paths of the leaves that the job declares as rank-local, the same on every rank.

    Raises:
        JobError: Raised on every rank. The newest checkpoint doesn't match `wanted`, can't be used
            with this number of ranks, or belongs to a different version; a rank can't read its
            disk; or there are checkpoints, but all of them are damaged.
    """
    seen = _survey(folders, ranks)
    parts = seen.parts
    candidates = _select(ranks.gather("what is there", _to_offer(parts)))
    for name, fault in seen.faults.items():
        # Warn about parts that can't be used, except for parts that are merely missing from a
        # checkpoint that doesn't need them: either rank 0 has stored all leaves, or the checkpoint
        # was written by a different number of ranks and can't be used anyway.
        if name not in seen.absent or name not in {*candidates.complete, *candidates.foreign}:
            ranks.log.warn(f"checkpoint `{name}` cannot be used: {fault}")
    damaged: dict[str, str] = {}
    complete = candidates.complete
    # Try the checkpoints, newest first, until we find one that isn't damaged. Since the body of the
    # loop is collective, ranks would deadlock unless all of them leave it at the same time. That's
    # why all conditions in it depend only on values gathered from all ranks.
    while complete and candidates.refused is None:
        name = complete[-1]
        # Rank 0 sends its description of the checkpoint to everyone, since some ranks may not have
        # a part of their own. That's normal if, for example, this run has more ranks than the last
        # one and all leaves are identical on all ranks.
        first = parse(
            ranks.gather_text("its leaves", to_text(parts[name]) if world.rank == 0 else "")[0]
        )
        part = _part_here(first, parts.get(name), world)
        _check_fit(
            first, part, state, wanted, ranks, world, folders.path / name, local=local, named=named
        )
        held, damage, error = read_arrays(folders, name, part, all_leaves=world.rank == 0)
        gathered = ranks.gather("read", [damage, _error_text(error, folders.arrays_path(name))])
        # If a rank couldn't read its disk, raise an error on all ranks. Don't try an older
        # checkpoint, because this one may well be intact and become readable again.
        ranks.check(UNREADABLE, [error_text for _, error_text in gathered], error)
        if not any(damage for damage, _ in gathered):
            return Found(name, part, held | _common(part, held, world, ranks), complete)
        damaged[name] = "; ".join(
            f"on rank {rank}, {text}" for rank, (text, _) in enumerate(gathered) if text
        )
        ranks.log.warn(f"checkpoint `{name}` is damaged, so an older one is tried: {damaged[name]}")
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
    # There's nothing to resume from. Before starting from scratch, make sure that we haven't lost a
    # complete checkpoint.
    found = ranks.gather(
        "whose parts are where",
        {"holders": folders.holders(), "faults": seen.faults, "marked": seen.marked},
    )
    _refuse_misplaced(ranks.log, [each["holders"] for each in found], world.size)
    _refuse_lost(ranks.log, found, damaged, f"{folders.path}")
    return None


def _to_offer(parts: Mapping[str, Part]) -> _Offer:
    return {name: (part.ranks, not part.rank_local) for name, part in parts.items()}


def _select(offers: Sequence[_Offer]) -> _Candidates:
    """Selects the checkpoints that can be used, given the results of `_to_offer` on all ranks.

    Which parts a checkpoint needs depends on its leaves. If all of them are identical on all ranks,
    rank 0 has stored everything, and its part is enough for any number of ranks. If some leaves are
    rank-local, every rank needs its own part, and the number of ranks must be the same as when the
    checkpoint was saved.
    """
    complete: list[str] = []
    foreign: dict[str, int] = {}
    for name, (ranks, common) in sorted(offers[0].items()):
        if common or (ranks == len(offers) and all(name in offer for offer in offers)):
            complete.append(name)
        # Otherwise, some rank's part is missing, i.e. the checkpoint is incomplete. Leave it out.
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
    """Checks that the checkpoint fits the job and the number of ranks. Waits for all ranks."""
    differs = unlike(wanted, part.forms) or narrowed(part.forms) or ""
    ranks.check(
        _other_shapes(f"{path}", saved_on=first.ranks, ranks=world.size),
        ranks.gather_text("its shapes", differs),
    )
    own = [leaf for leaf in first.leaves if leaf in named]
    if own and first.ranks != world.size:
        # The job now names these leaves as rank-local, but it didn't when the checkpoint was saved.
        # Since they were equal on all ranks at the time, the checkpoint doesn't say that they're
        # rank-local. Rank-local values can't be restored on a different number of ranks, so refuse.
        raise _refusal(
            ranks.log, f"{path}", quoted(own[:3]), saved_on=first.ranks, ranks=world.size
        )
    if first.ranks == 1 < world.size:
        # With a single rank, there was nothing to compare with, so the checkpoint doesn't say which
        # leaves may differ between ranks. Now that several ranks are about to restore it, find out
        # whether there are leaves that mustn't be copied to all of them.
        _refuse_copies(
            ranks.log, ranks.gather("whose they are", _initial(state, local=local)), f"{path}"
        )


def _refuse_misplaced(
    log: JobLog, holders: Sequence[Mapping[str, Sequence[int]]], ranks: int
) -> None:
    """Raises an error if there's a complete checkpoint whose parts are on the wrong disks.

    This happens when a restart assigns ranks to different nodes.
    """
    for name in sorted({name for each in holders for name in each}, reverse=True):
        # The ranks that can't find their own part, and the rank whose disk it's on.
        where = {
            r: here
            for here, each in enumerate(holders)
            for r in each.get(name, ())
            if r not in holders[r].get(name, ())
        }
        if where and {r for each in holders for r in each.get(name, ())} == set(range(ranks)):
            misplaced = ", ".join(
                f"rank {r}'s part is on rank {here}'s disk" for r, here in sorted(where.items())
            )
            raise log.error(
                f"has a checkpoint `{name}` whose parts are on the wrong disks: {misplaced}. Start "
                "each rank on the node where it ran before, copy the parts to the right disks, or "
                "name another directory."
            )


def _refuse_lost(
    log: JobLog, found: Sequence[Mapping[str, Any]], damaged: Mapping[str, str], path: str
) -> None:
    """Raises an error if there was a complete checkpoint once.

    It's fine if the run was killed while writing its first checkpoint. In that case, there's no
    checkpoint with parts from all ranks, and no rank has the mark that's written after the first
    complete checkpoint. Nothing has been lost, so the job may start from scratch.
    """
    holders = [each["holders"] for each in found]
    names = sorted({name for each in holders for name in each}, reverse=True)
    complete = any(
        all(rank in each.get(name, ()) for rank, each in enumerate(holders)) for name in names
    )
    if not names or not (damaged or complete or any(each["marked"] for each in found)):
        return
    # Show just one reason per checkpoint, from the lowest rank that has one. Go through the ranks
    # in reverse, because the last item wins in a dict comprehension.
    reasons = {
        name: f"on rank {rank}, {each['faults'].get(name, 'all of its files are missing')}"
        for name in names
        for rank, each in reversed([*enumerate(found)])
        if name in each["faults"] or name not in holders[rank]
    }
    listed = "; ".join(f"`{name}`: {text}" for name, text in (reasons | dict(damaged)).items())
    raise log.error(
        f"has checkpoints in `{path}`, but none of them is intact any more. The job does not start "
        "from scratch by itself, and nothing was deleted. Restore the missing or damaged files or, "
        f"to start from scratch, move `{path}` away on every node. In detail: {listed}."
    )


def _survey(folders: Folders, ranks: RankGather) -> _Survey:
    """Reads the descriptions of the parts on this rank's disk. Waits for all ranks.

    Raises:
        JobError: Raised on every rank. A rank can't read its disk, or a checkpoint belongs to a
            different version.
    """
    seen = _Survey()
    unknown = ""
    failure: Exception | None = None
    path = folders.path  # the path to mention if there's an error
    try:
        seen = _Survey(marked=folders.marked("whole"))
        for name in folders.names():
            path = folders.part_path(name)
            try:
                part = folders.read(name)
                if part.job != ranks.log.job:
                    raise UnusableError(f"`{path}` belongs to a job `{part.job}`")
                seen.parts[name] = part
            except UnknownFormatError:
                unknown = f"`{path}`"
            except UnusableError as error:
                seen.faults[name] = str(error)
                seen.absent.update([name] if isinstance(error, AbsentError) else ())
    except (OSError, MemoryError) as error:
        failure = error
    # Don't raise this rank's error right away. The other ranks are about to gather everyone's
    # errors, and would wait for this rank forever.
    gathered = ranks.gather("versions", [unknown, _error_text(failure, path)])
    ranks.check(UNREADABLE, [text for _, text in gathered], failure)
    ranks.check(
        "has a checkpoint that another version of jaxcross wrote. Resume with that version, or "
        "name another directory. The checkpoint is",
        [text for text, _ in gathered],
    )
    return seen


def _error_text(error: Exception | None, path: Path) -> str:
    if error is None:
        return ""
    return f"in `{path}`, {type(error).__name__}: {clause(first_line(str(error)))}"


def _part_here(first: Part, own: Part | None, world: World) -> Part:
    """Returns the part that this rank resumes from.

    A rank resumes from its own part if it has one and the number of ranks hasn't changed.
    Otherwise, the leaves are the same on all ranks, so it resumes from rank 0's part, but without
    the states of rank 0's data iterators, which are only valid for rank 0's data.
    """
    # The notes (on evaluations and skipped steps) have to be the same on all ranks, so take them
    # from rank 0. They may differ between parts: when ranks fail at different times, each of them
    # has saved its own version.
    if own is not None and own.ranks == world.size:
        return replace(own, notes=first.notes, best_step=first.best_step)
    return replace(
        first, rank=world.rank, files={}, places=tuple((taken, None) for taken, _ in first.places)
    )


def read_arrays(
    folders: Folders, name: str, part: Part, *, all_leaves: bool
) -> tuple[dict[str, np.ndarray], str, Exception | None]:
    """Reads and checks the arrays stored by this rank. Doesn't raise.

    Returns:
        The arrays by path, a description of any damage ("" if there is none), and the error that
        prevented this rank from reading the arrays, or None.
    """
    folder = folders.arrays_path(name)
    try:
        # Check the files before orbax opens them, to tell damage apart from other orbax errors.
        if part.files:
            folders.check_files(name, part.files)
        held = {
            path: saved for path, saved in part.leaves.items() if all_leaves or not saved.common
        }
        values = arrays.read(folder, {path: saved.form for path, saved in held.items()})
        for path, saved in held.items():
            if digest(saved.form, values[path]) != saved.digest:
                raise UnusableError(f"`{folder}` holds `{path}` with other values than were saved")
    # A missing file also counts as damage, because all files existed when the part was completed.
    except (UnusableError, *ABSENT) as error:
        return {}, str(error), None
    # Any other error, even from orbax, means that the part can't be read right now, not that it's
    # damaged: we have just verified that the files are unchanged since they were written.
    except Exception as error:
        return {}, "", error
    return values, "", None


def _common(
    part: Part, held: Mapping[str, np.ndarray], world: World, ranks: RankGather
) -> dict[str, np.ndarray]:
    """Broadcasts the leaves that only rank 0 stores, because nodes may have separate disks."""
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
    """Returns the paths of rank-local leaves in a rank's initial state, and all digests.

    Digests are only needed if states differ between ranks by design (`local`); otherwise, they're
    empty strings.
    """
    digests = {path: leaf.digest if local else "" for path, leaf in snapshot(state).items()}
    return rank_local_leaves(state), digests


def _refuse_copies(
    log: JobLog, initial: Sequence[tuple[list[str], dict[str, str]]], path: str
) -> None:
    """Raises if a single rank's checkpoint has leaves that mustn't be copied to all ranks."""
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
        "model, leaves that `rank_local` names) are only valid for that number of ranks. Start "
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
        "Residuals of an exchange, or parts of a model, may be sharded for that number of ranks: "
        f"start {_ranks(saved_on)}, or name another directory. Otherwise, its model, its optimizer "
        "or an argument of its exchange has changed. What differs"
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"
