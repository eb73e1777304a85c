"""Checks that the given profiles are of the step that is about to run."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcross.errors import CutError
from jaxcross.plan.profile import Profile
from jaxcross.program.ir import Program, human_bytes

_ALIKE_BYTES = 64  # plus 1%: one more metric doesn't make it a different step


def check_profiles(profiles: Sequence[Profile], program: Program, ranks: int) -> None:
    """Makes sure that profiles are of this step on this number of ranks. Does not communicate.

    Batch sizes aren't compared, because a profile says nothing about arguments. Bytes aren't
    compared if the host decides between branches with different exchanges, e.g. one on every eighth
    step, because the profile is of only one branch.

    Raises:
        CutError: A profile is of a different number of ranks, or of a step that exchanges a
            different number of bytes.
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
