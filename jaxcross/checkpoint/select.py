"""Selects the checkpoints that all ranks can resume from, given the parts on every rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxcross.checkpoint.part import Part

Offer = Mapping[str, tuple[int, bool]]
"""For each checkpoint, the number of ranks that wrote it, and whether all its leaves are common."""


@dataclass(frozen=True, slots=True)
class Selection:
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


def to_offer(parts: Mapping[str, Part]) -> Offer:
    """Summarises one rank's parts for `select`."""
    return {name: (part.ranks, not part.rank_local) for name, part in parts.items()}


def select(offers: Sequence[Offer]) -> Selection:
    """Selects checkpoints, given every rank's `to_offer`, by rank.

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
    return Selection(complete, foreign)
