"""State that all variants of a step share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxcross.plan.profile import Profile
from jaxcross.program.cut import Cut
from jaxcross.step.unit_agreement import Units


class ChosenCut(NamedTuple):
    """The cut that `cut="auto"` chose.

    Attributes:
        n_segments: Its number of segments; 0 for the default cut.
        signature: Hash of the exchanges of the program in that cut.
    """

    n_segments: int
    signature: int


@dataclass(slots=True, eq=False)
class StepRecord:
    """State that all variants of a step share.

    Attributes:
        cut, bucket_bytes: As given to `crossover`.
        profiles: The profiles that determined the cut, if any. They must be of this step.
        warned: What a warning was logged about, such as loops and `optax.MultiSteps`.
        chosen_cuts: The cut that `cut="auto"` chose first in this process, by the default program's
            signature. It's stored here rather than in a variant, because shapes may change on one
            rank only, and the other ranks wouldn't take part in a new search.
        units: Agreements on programs that call mpi4jax.
    """

    cut: Cut
    bucket_bytes: int
    profiles: tuple[Profile, ...] = ()
    warned: set[str] = field(default_factory=set)
    chosen_cuts: dict[int, ChosenCut] = field(default_factory=dict)
    units: Units = field(default_factory=Units)
