"""`cut`: picks the best cut for a step that runs alone, based on its profiles."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcross.errors import quoted
from jaxcross.plan.make_plan import by_job
from jaxcross.plan.rates import fastest_alone
from jaxcross.plan.twin import VOTE_S
from jaxcross.step import Profile, ProfiledCut

Profiles = Profile | Sequence[Profile]
"""A profile of a step, or several profiles, one for each cut that was measured."""


def cut(profiles: Profiles) -> ProfiledCut:
    """Returns the cut with which a step that runs alone is predicted to be fastest.

    The prediction is computed from the profiles, without running any steps. The result depends only
    on the arguments, and there's no communication.

    At this point, we can't check whether the profiles belong to the step that you're going to cut.
    If they're for a different step or number of ranks, `crossover` raises an error when you call
    the step.

    Args:
        profiles: A `Profile` of the step, or several profiles of it with different cuts. Given only
            the profile of the uncut step, we estimate how long the pieces of a cut step would take.

    Raises:
        TypeError: An argument isn't a profile.
        ValueError: The profiles are of several jobs or of several numbers of ranks, or two of them
            are of the same cut, or the step takes no time.

    Example:
        >>> profile = Profile.whole("a", compute_s=1.0, exchange_s=1.0, nbytes=10**8, ranks=2)
        >>> cut(profile)
        ProfiledCut(pieces=32)
    """
    found = profiles_of_step(profiles)
    (cuts,) = by_job(found).values()
    return ProfiledCut(fastest_alone(cuts, None, VOTE_S)[1], found)


def profiles_of_step(profiles: Profiles) -> tuple[Profile, ...]:
    """Returns the profiles of one step as a tuple.

    Raises:
        TypeError: An argument isn't a profile.
        ValueError: The profiles are of several jobs or of several numbers of ranks, or two of them
            are of the same cut.
    """
    found = (profiles,) if isinstance(profiles, Profile) else profiles
    if (
        isinstance(found, str)
        or not isinstance(found, Sequence)
        or not found
        or not all(isinstance(each, Profile) for each in found)
    ):
        raise TypeError(
            f"`profiles` must be one `jaxcross.plan.Profile` or several, got {profiles!r:.60}."
        )
    names = {profile.name for profile in found}
    if len(names) > 1:
        raise ValueError(
            "all `profiles` must be of the same step and have the same name, got "
            f"{quoted(sorted(names))}"
        )
    by_job(found)
    return tuple(found)
