"""Finds the newest checkpoint of a job that is whole on all ranks, and reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.choice import choose, to_offer
from jaxcross.checkpoint.folders import Folders
from jaxcross.checkpoint.leaves import Form, digest, unlike
from jaxcross.checkpoint.part import Part, UnknownFormatError, UnusableError, parse, to_text
from jaxcross.checkpoint.talk import Talk, Together
from jaxcross.errors import JobError


class KeeperFlight(Protocol):
    """Where a rank says what it is in."""

    def during(self, what: str, *, job: str, step: int) -> AbstractContextManager[None]: ...


class KeeperWatch(AbstractContextManager[None], Protocol):
    """A context whose length is watched."""

    def renew(self) -> None: ...


class KeeperWorld(Protocol):
    """What the checkpoints of a job need of the world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def flight(self) -> KeeperFlight: ...
    def watching(
        self, *, job: str, step: int, segment: int, what: str, awaited: Any = None, own: bool = False
    ) -> KeeperWatch: ...
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


def find(
    wanted: Mapping[str, Form], *, world: KeeperWorld, folders: Folders, talk: Talk, together: Together
) -> Found | None:
    """The newest checkpoint that is whole on all ranks; None if there is none. Waits for all ranks.

    Files are read in the caller's thread; texts, and the leaves that rank 0 holds for all, pass through `together`.

    Raises:
        JobError: On every rank: the newest one does not fit `wanted` or this number of ranks, or is of another version.
    """
    parts = _survey(folders, talk, together)
    choice = choose(talk.gather(together, "what is there", to_offer(parts)))
    whole = choice.whole
    while whole and choice.refused is None:
        name = whole[-1]
        first = parse(talk.gather(together, "its leaves", to_text(parts[name]) if world.rank == 0 else "")[0])
        part = _part_here(first, parts.get(name), world)
        differs = unlike(wanted, part.forms) or ""
        talk.check(
            f"cannot resume from `{folders.path / name}`. Its model or optimizer has changed: go back to the old one, "
            "or name another directory. What differs", talk.gather(together, "its shapes", differs),
        )  # fmt: skip
        held, trouble = _read(folders, name, part, all_leaves=world.rank == 0)
        troubles = talk.gather(together, "read", trouble)
        if not any(troubles):
            return Found(name, part, held | _common(part, held, world, together), whole)
        for rank, text in enumerate(troubles):
            if text:
                talk.warn(f"checkpoint `{name}` is damaged, an older one is used: on rank {rank}, {text}")
        whole.pop()
    if choice.refused is not None:
        name = choice.refused
        apart = ", ".join(f"`{path}`" for path in parts[name].apart[:3]) if world.rank == 0 else ""
        apart = talk.gather(together, "which leaves", apart)[0]
        raise _refusal(talk, f"{folders.path / name}", apart, saved_on=choice.foreign[name], ranks=world.size)
    _refuse_astray(talk, talk.gather(together, "whose parts are where", json.dumps(folders.holders())), world.size)
    return None


def _refuse_astray(talk: Talk, texts: Sequence[str], ranks: int) -> None:
    """Nothing is whole: but is a checkpoint whole on other ranks' disks?

    Raises:
        JobError: On every rank.
    """
    told: list[dict[str, list[int]]] = [json.loads(text) for text in texts]
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


def _survey(folders: Folders, talk: Talk, together: Together) -> dict[str, Part]:
    """This rank's parts that say what they are."""
    parts: dict[str, Part] = {}
    unknown = ""
    for name in folders.names():
        try:
            part = folders.read(name)
            if part.job != talk.job:
                raise UnusableError(f"`{folders.part_path(name)}` is of a job `{part.job}`")
            parts[name] = part
        except UnknownFormatError:
            unknown = f"`{folders.part_path(name)}`"
        except (UnusableError, OSError) as error:
            talk.warn(f"checkpoint `{name}` is not whole: {error}")
    found = talk.gather(together, "versions", unknown)
    talk.check(
        "has a checkpoint that another version of jaxcross wrote. Resume with that version, or name another directory. "
        "It is", found,
    )  # fmt: skip
    return parts


def _part_here(first: Part, own: Part | None, world: KeeperWorld) -> Part:
    """What this rank resumes from: its own part or, where it has none, rank 0's without that rank's iterators."""
    if own is not None and own.ranks == world.size:
        return own
    return replace(first, rank=world.rank, files={}, places=tuple((taken, None) for taken, _ in first.places))


def _read(folders: Folders, name: str, part: Part, *, all_leaves: bool) -> tuple[dict[str, np.ndarray], str]:
    """The arrays that this rank holds, or why it cannot have them."""
    folder = folders.arrays_path(name)
    try:
        if part.files:
            folders.check_files(name, part.files)
        held = {path: saved for path, saved in part.leaves.items() if all_leaves or not saved.common}
        values = arrays.read(folder, {path: saved.form for path, saved in held.items()})
        for path, saved in held.items():
            if digest(saved.form, values[path]) != saved.digest:
                raise UnusableError(f"`{folder}` has other values in `{path}` than were saved")
    except (UnusableError, OSError) as error:
        return {}, str(error)
    return values, ""


def _common(
    part: Part, held: dict[str, np.ndarray], world: KeeperWorld, together: Together
) -> dict[str, np.ndarray]:  # fmt: skip
    """The leaves that rank 0 holds for all: sent, as each node may have a disk of its own."""
    forms = {path: saved.form for path, saved in part.leaves.items() if saved.common}
    if world.size == 1 or not forms:
        return {}
    sent = {path: held[path] if path in held else np.zeros(f.shape, np.dtype(f.dtype)) for path, f in forms.items()}
    return together("checkpoint: values", lambda _: world.broadcast_or_check(sent, mode="broadcast"))


def _refusal(talk: Talk, path: str, apart: str, *, saved_on: int, ranks: int) -> JobError:
    return talk.error(
        f"cannot resume on {ranks} ranks from `{path}`, which {saved_on} ranks wrote: each had its own values of "
        f"{apart}. What they are, residuals of an exchange or parts of a model, belongs to that number of ranks. Start "
        f"{saved_on} ranks, or name another directory."
    )
