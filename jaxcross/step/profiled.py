"""Whether profiles are of the step that is to run."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcross.errors import CutError
from jaxcross.plan.profile import Profile
from jaxcross.program.ir import Program, human_bytes

_ALIKE_BYTES = 64  # and a hundredth: a metric more is not another step


def check_profiles(profiles: Sequence[Profile], program: Program, ranks: int) -> None:
    """Makes sure that profiles are of this step on so many ranks. Does not communicate.

    Batch sizes are not compared: the profile says nothing about arguments. Nor are bytes where the
    host takes branches with other exchanges, such as one in every eighth step: the profile is of
    one of them.

    Raises:
        CutError: They are of another number of ranks, or of a step that exchanges other bytes.
    """
    exchanged = sum(segment.nbytes for segment in program.segments)
    branches = program.traced is not None and program.traced.choices
    for profile in profiles:
        measured = sum(profile.graph.nbytes)
        if profile.ranks != ranks:
            raise CutError(
                f"The profile `{profile.name}` was measured on {profile.ranks} ranks, and "
                f"`{program.name}` runs on {ranks}. Give the profile of a run on as many ranks, or "
                "a number of segments as `cut`."
            )
        if (
            measured
            and not branches
            and abs(measured - exchanged) > _ALIKE_BYTES + 0.01 * exchanged
        ):
            raise CutError(
                f"The profile `{profile.name}` is of a step that exchanges {measured} bytes "
                f"({human_bytes(measured)}), and `{program.name}` exchanges {exchanged}. It is of "
                "another step: measure this one, or give a number of segments as `cut`."
            )
