"""Selects the checkpoints that all ranks can resume from, from the parts that every rank has.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxcross.checkpoint.part import Part

Offer = Mapping[str, tuple[int, bool]]
"""Number of ranks that wrote each checkpoint, and whether all its leaves are the same on all of
them.
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoints of all ranks. The same on every rank.

    Attributes:
        complete: Names of the checkpoints that all ranks can resume from, oldest first.
        foreign: Number of the ranks that wrote a checkpoint, by its name, where that is another
            number than this run's and each rank has leaves of its own.
    """

    complete: list[str]
    foreign: dict[str, int]

    @property
    def refused(self) -> str | None:
        """The newest checkpoint, if this number of ranks cannot resume from it."""
        newest = max((*self.complete, *self.foreign), default=None)
        return newest if newest in self.foreign else None


def to_offer(parts: Mapping[str, Part]) -> Offer:
    """Summarises one rank's parts for `select`."""
    return {name: (part.ranks, not part.rank_local) for name, part in parts.items()}


def select(offers: Sequence[Offer]) -> Selection:
    """Selects checkpoints from `to_offer` of every rank, by rank.

    Rank 0 holds what is equal on all ranks. Where that is everything, its part is enough, for any
    number of ranks; else each rank needs its own part.
    """
    complete: list[str] = []
    foreign: dict[str, int] = {}
    for name, (ranks, common) in sorted(offers[0].items()):
        if common or (ranks == len(offers) and all(name in offer for offer in offers)):
            complete.append(name)
        elif ranks != len(offers):
            foreign[name] = ranks
    return Selection(complete, foreign)
