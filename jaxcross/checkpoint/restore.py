"""Finds the newest checkpoint of a job that is whole on all ranks, and reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxcross._pytree import Form, digest, narrowed, snapshot, unlike
from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.layout import ABSENT, Folders
from jaxcross.checkpoint.part import AbsentError, Part, UnknownFormatError, UnusableError, parse, to_text
from jaxcross.checkpoint.rank_gather import RankGather, Together
from jaxcross.checkpoint.rank_local import own_leaves
from jaxcross.checkpoint.select import choose, to_offer
from jaxcross.errors import JobError, clause, first_line

UNREADABLE = (
    "has checkpoints that cannot be read now, which says nothing against them: none was deleted. Start again once the "
    "disk, or the way to it, is well. What happened"
)


class CheckpointerFlight(Protocol):
    """Where a rank says what it is in."""

    def during(self, what: str, *, job: str, step: int) -> AbstractContextManager[None]: ...


class CheckpointerWatch(AbstractContextManager[None], Protocol):
    """A context whose length is watched."""

    def renew(self) -> None: ...


class CheckpointerWorld(Protocol):
    """What the checkpoints of a job need of the world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def flight(self) -> CheckpointerFlight: ...
    def watching(
        self, *, job: str, step: int, segment: int, what: str, awaited: Any = None, own: bool = False
    ) -> CheckpointerWatch: ...
    def broadcast_or_check(self, state: Any, *, mode: str = "check") -> Any: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that all ranks have read.

    Attributes:
        name: Its name.
        part: What it is on this rank; of another rank's part, if this one had none.
        arrays: All leaves, by path.
        whole: Names of the checkpoints that are there in full, oldest first; it is the last of them.
    """

    name: str
    part: Part
    arrays: dict[str, np.ndarray]
    whole: list[str]


@dataclass(frozen=True, slots=True)
class _Survey:
    """What one rank found on its disk.

    Attributes:
        parts: Its parts that say what they are, by checkpoint.
        faults: Of other checkpoints: why this rank has no such part.
        absent: Of those, where nothing is in the part's place.
        marked: A checkpoint that was once complete on all ranks, if this rank noted one.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    marked: str = ""


def find(
    state: Any,
    wanted: Mapping[str, Form],
    *,
    world: CheckpointerWorld,
    folders: Folders,
    talk: RankGather,
    together: Together,
    local: bool,
) -> Found | None:
    """The newest checkpoint that is whole on all ranks; None if none was ever finished. Waits for all ranks.

    Files are read in the caller's thread; texts, and the leaves that rank 0 holds for all, pass through `together`.

    Args:
        state: What the job would begin with.
        wanted: The forms of its leaves.
        world: Rank, size, and a broadcast.
        folders: Where the parts lie.
        talk: The job's voice.
        together: Runs what communicates.
        local: Ranks mean each their own `state`.

    Raises:
        JobError: On every rank: the newest one does not fit `wanted` or this number of ranks, or is of another version;
            a rank cannot read; or there are some, and all are damaged.
    """
    seen = _survey(folders, talk, together)
    parts = seen.parts
    choice = choose(talk.gather(together, "what is there", to_offer(parts)))
    for name, why in seen.faults.items():
        if name not in seen.absent or name not in {*choice.whole, *choice.foreign}:  # else its part is not needed
            talk.warn(f"checkpoint `{name}` is not whole: {why}")
    damaged: dict[str, str] = {}
    whole = choice.whole
    while whole and choice.refused is None:
        name = whole[-1]
        first = parse(talk.gather(together, "its leaves", to_text(parts[name]) if world.rank == 0 else "")[0])
        part = _part_here(first, parts.get(name), world)
        differs = unlike(wanted, part.forms) or narrowed(part.forms) or ""
        talk.check(
            _other_shapes(f"{folders.path / name}", saved_on=first.ranks, ranks=world.size),
            talk.gather(together, "its shapes", differs),
        )
        if first.ranks == 1 < world.size:
            _refuse_copies(
                talk, talk.gather(together, "whose they are", _fresh(state, local=local)), f"{folders.path / name}"
            )
        held, damage, error = _read(folders, name, part, all_leaves=world.rank == 0)
        said = json.dumps([damage, _said(error, folders.arrays_path(name))])
        heard = [json.loads(text) for text in talk.gather(together, "read", said)]
        talk.check(UNREADABLE, [trouble for _, trouble in heard], error)
        if not any(text for text, _ in heard):
            return Found(name, part, held | _common(part, held, world, together), whole)
        damaged[name] = "; ".join(f"on rank {rank}, {text}" for rank, (text, _) in enumerate(heard) if text)
        talk.warn(f"checkpoint `{name}` is damaged, and passed over: {damaged[name]}")
        whole.pop()
    if choice.refused is not None:
        name = choice.refused
        apart = ", ".join(f"`{path}`" for path in parts[name].apart[:3]) if world.rank == 0 else ""
        apart = talk.gather(together, "which leaves", apart)[0]
        raise _refusal(talk, f"{folders.path / name}", apart, saved_on=choice.foreign[name], ranks=world.size)
    said = {"holders": folders.holders(), "faults": seen.faults, "marked": seen.marked}
    heard = [json.loads(t) for t in talk.gather(together, "whose parts are where", json.dumps(said))]
    _refuse_astray(talk, [each["holders"] for each in heard], world.size)
    _refuse_lost(talk, heard, damaged, f"{folders.path}")
    return None


def _refuse_astray(talk: RankGather, told: Sequence[Mapping[str, Sequence[int]]], ranks: int) -> None:
    """Nothing is whole: but is a checkpoint whole on other ranks' disks?

    Raises:
        JobError: On every rank.
    """
    for name in sorted({name for each in told for name in each}, reverse=True):
        where = {
            r: here for here, each in enumerate(told) for r in each.get(name, ()) if r not in told[r].get(name, ())
        }
        if where and {r for each in told for r in each.get(name, ())} == set(range(ranks)):
            astray = ", ".join(f"that of rank {r} on rank {here}'s disk" for r, here in sorted(where.items()))
            raise talk.error(
                f"has a checkpoint `{name}` whose parts lie where other ranks look for theirs: {astray}. Start each "
                "rank on the node on which it was, copy the parts, or name another directory."
            )


def _refuse_lost(talk: RankGather, heard: Sequence[Mapping[str, Any]], damaged: Mapping[str, str], path: str) -> None:
    """Nothing is whole: but was anything ever? A kill during the first write leaves no rank's mark, and no checkpoint
    of which every rank has a part.

    Raises:
        JobError: On every rank.
    """
    holders = [each["holders"] for each in heard]
    names = sorted({name for each in holders for name in each}, reverse=True)
    complete = any(all(rank in each.get(name, ()) for rank, each in enumerate(holders)) for name in names)
    if not names or not (damaged or complete or any(each["marked"] for each in heard)):
        return
    reasons = {
        name: f"on rank {rank}, {each['faults'].get(name, 'nothing of it is there')}"
        for name in names
        for rank, each in reversed([*enumerate(heard)])  # the first one's stays
        if name in each["faults"] or name not in holders[rank]
    }
    listed = "; ".join(f"`{name}`: {text}" for name, text in (reasons | dict(damaged)).items())
    raise talk.error(
        f"has checkpoints in `{path}`, and none of them is whole any more. It does not begin anew by itself, and "
        f"nothing was deleted. Bring back what is missing or, to begin anew, move `{path}` away, on every node. In "
        f"detail: {listed}."
    )


def _survey(folders: Folders, talk: RankGather, together: Together) -> _Survey:
    """What lies on this rank's disk.

    Raises:
        JobError: On every rank: one cannot read, or a checkpoint is of another version.
    """
    seen = _Survey()
    unknown, trouble, path = "", None, folders.path
    try:
        seen = _Survey(marked=folders.marked("whole"))
        for name in folders.names():
            path = folders.part_path(name)
            try:
                part = folders.read(name)
                if part.job != talk.job:
                    raise UnusableError(f"`{path}` is of a job `{part.job}`")
                seen.parts[name] = part
            except UnknownFormatError:
                unknown = f"`{path}`"
            except UnusableError as error:
                seen.faults[name] = str(error)
                seen.absent.update([name] if isinstance(error, AbsentError) else ())
    except (OSError, MemoryError) as error:
        trouble = error
    heard = [json.loads(t) for t in talk.gather(together, "versions", json.dumps([unknown, _said(trouble, path)]))]
    talk.check(UNREADABLE, [text for _, text in heard], trouble)
    talk.check(
        "has a checkpoint that another version of jaxcross wrote. Resume with that version, or name another directory. "
        "It is", [text for text, _ in heard],
    )  # fmt: skip
    return seen


def _said(error: Exception | None, path: Path) -> str:
    return "" if error is None else f"in `{path}`, {type(error).__name__}: {clause(first_line(str(error)))}"


def _part_here(first: Part, own: Part | None, world: CheckpointerWorld) -> Part:
    """What this rank resumes from: its own part or, where it has none, rank 0's without that rank's iterators."""
    if own is not None and own.ranks == world.size:
        return own
    return replace(first, rank=world.rank, files={}, places=tuple((taken, None) for taken, _ in first.places))


def _read(
    folders: Folders, name: str, part: Part, *, all_leaves: bool
) -> tuple[dict[str, np.ndarray], str, Exception | None]:
    """The arrays that this rank holds; else how they are damaged, or what kept this rank from reading them."""
    folder = folders.arrays_path(name)
    try:
        if part.files:
            folders.check_files(name, part.files)
        held = {path: saved for path, saved in part.leaves.items() if all_leaves or not saved.common}
        values = arrays.read(folder, {path: saved.form for path, saved in held.items()})
        for path, saved in held.items():
            if digest(saved.form, values[path]) != saved.digest:
                raise UnusableError(f"`{folder}` has other values in `{path}` than were saved")
    except (UnusableError, *ABSENT) as error:
        return {}, str(error), None
    except Exception as error:  # of orbax too: the files have been found to be those that were written
        return {}, "", error
    return values, "", None


def _common(
    part: Part, held: dict[str, np.ndarray], world: CheckpointerWorld, together: Together
) -> dict[str, np.ndarray]:  # fmt: skip
    """The leaves that rank 0 holds for all: sent, as each node may have a disk of its own."""
    forms = {path: saved.form for path, saved in part.leaves.items() if saved.common}
    if world.size == 1 or not forms:
        return {}
    sent = {path: held[path] if path in held else np.zeros(f.shape, np.dtype(f.dtype)) for path, f in forms.items()}
    return together("checkpoint: values", lambda _: world.broadcast_or_check(sent, mode="broadcast"))


def _fresh(state: Any, *, local: bool) -> str:
    """Of the state that a rank would begin with: leaves that are its own for certain, and digests of those that may be.

    Unless they are meant to be, unlike values mean nothing: rank 0's would be taken.
    """
    digests = {path: leaf.digest if local else "" for path, leaf in snapshot(state).items()}
    return json.dumps([own_leaves(state), digests])


def _refuse_copies(talk: RankGather, texts: Sequence[str], path: str) -> None:
    """One rank wrote the checkpoint, so that all leaves look equal: are there any of which each rank needs its own?

    Raises:
        JobError: On every rank.
    """
    heard = [json.loads(text) for text in texts]
    _, first = heard[0]
    own = [leaf for leaf in first if any(leaf in kept or leaf not in d or d[leaf] != first[leaf] for kept, d in heard)]
    if own:
        raise _refusal(talk, path, ", ".join(f"`{leaf}`" for leaf in own[:3]), saved_on=1, ranks=len(heard))


def _refusal(talk: RankGather, path: str, apart: str, *, saved_on: int, ranks: int) -> JobError:
    return talk.error(
        f"cannot resume on {_ranks(ranks)} from `{path}`, which {_ranks(saved_on)} wrote: each rank has its own values "
        f"of {apart}. What they are, residuals of an exchange or parts of a model, belongs to that number of ranks. "
        f"Start {_ranks(saved_on)}, or name another directory."
    )


def _other_shapes(path: str, *, saved_on: int, ranks: int) -> str:
    if saved_on == ranks:
        return (
            f"cannot resume from `{path}`. Its model or optimizer has changed: go back to the old one, or name another "
            "directory. What differs"
        )
    return (
        f"cannot resume on {_ranks(ranks)} from `{path}`, which {_ranks(saved_on)} wrote. Residuals of an exchange, or "
        f"parts of a model, may be cut for that number of ranks: start {_ranks(saved_on)}, or name another directory. "
        "Else its model or optimizer has changed. What differs"
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"
