"""Which checkpoints all ranks can resume from: decided from what every rank found, the same on each. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxcross.checkpoint.part import Part


@dataclass(frozen=True, slots=True)
class Choice:
    """What the ranks have together.

    Attributes:
        whole: Names of the checkpoints that are there in full, oldest first.
        foreign: Of those that another number of ranks wrote, each with leaves of its own: name -> how many ranks.
    """

    whole: list[str]
    foreign: dict[str, int]

    @property
    def refused(self) -> str | None:
        """The newest checkpoint, if this number of ranks cannot resume from it."""
        newest = max((*self.whole, *self.foreign), default=None)
        return newest if newest in self.foreign else None


def to_offer(parts: Mapping[str, Part]) -> str:
    """What one rank found, for `choose`."""
    return json.dumps({name: [part.ranks, not part.apart] for name, part in parts.items()})


def choose(texts: Sequence[str]) -> Choice:
    """What all ranks have, from `to_offer` of each, by rank.

    Rank 0 holds what is equal on all ranks. Where that is everything, its part is enough, for any number of ranks;
    else each rank needs its own part.
    """
    offers = [json.loads(text) for text in texts]
    whole: list[str] = []
    foreign: dict[str, int] = {}
    for name, (ranks, common) in sorted(offers[0].items()):
        if common or (ranks == len(offers) and all(name in offer for offer in offers)):
            whole.append(name)
        elif ranks != len(offers):
            foreign[name] = ranks
    return Choice(whole, foreign)
