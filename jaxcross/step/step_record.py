"""State that all variants of a step share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxcross.plan.profile import Profile
from jaxcross.program.cut import Cut
from jaxcross.step.unit_agreement import Units


class ChosenCut(NamedTuple):
    """The cut that `cut="auto"` chose: its number of segments, 0 for the default one, and that
    program's signature.
    """

    n_segments: int
    signature: int


@dataclass(slots=True, eq=False)
class StepRecord:
    """State that all variants of a step share.

    Attributes:
        cut, bucket_bytes: As given to `crossover`.
        profiles: Those that chose the cut, if any, and must be of this step.
        warned: Source lines of loops and of `optax.MultiSteps` that a warning was logged for.
        chosen_cuts: The cut that `cut="auto"` chose first in this process, by the default program's
            signature. Kept here and not in a variant, because shapes may change on one rank alone,
            and the other ranks would not come to a new search.
        units: Agreements on programs that call mpi4jax.
    """

    cut: Cut
    bucket_bytes: int
    profiles: tuple[Profile, ...] = ()
    warned: set[str] = field(default_factory=set)
    chosen_cuts: dict[int, ChosenCut] = field(default_factory=dict)
    units: Units = field(default_factory=Units)
