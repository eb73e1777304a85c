"""Tests the cut of a step that runs alone, chosen from the step's profiles."""

from dataclasses import replace
from typing import Any

import pytest

from jaxcross.plan import Profile, cut
from jaxcross.plan.profiled_cut import ProfiledCut

WHOLE = Profile.whole("a", compute_s=1.0, exchange_s=1.0, nbytes=10**8, ranks=2)
FINE = WHOLE.cut_evenly(2)


def test_the_fastest_cut_is_chosen() -> None:
    assert cut(replace(WHOLE, seconds=(1.0, 0.0, 0.0))).pieces == 1
    slow = replace(WHOLE, seconds=(9.0, 9.0, 9.0))
    assert cut([slow, FINE]) == ProfiledCut(2, (slow, FINE))
    assert cut([FINE, slow]).pieces == 2
    assert cut(FINE).profiles == (FINE,)


def test_of_a_whole_step_alone_finer_cuts_are_estimated() -> None:
    assert cut(WHOLE).pieces > 1
    assert repr(cut(WHOLE)) == f"ProfiledCut(pieces={cut(WHOLE).pieces})"


@pytest.mark.parametrize(
    ("profiles", "error", "message"),
    [
        (2, TypeError, "`profiles` must be one `jaxcross.plan.Profile` or several, got 2"),
        ((), TypeError, "`profiles` must be one"),
        ("whole", TypeError, "`profiles` must be one"),
        ([WHOLE, 2], TypeError, "`profiles` must be one"),
        ([WHOLE, replace(FINE, name="b")], ValueError, "have the same name, got `a`, `b`"),
        ([WHOLE, WHOLE], ValueError, "two profiles of `a` have the same cut"),
        ([WHOLE, replace(FINE, ranks=4)], ValueError, "different numbers of ranks"),
    ],
)
def test_what_is_no_profile_of_one_step_is_refused(
    profiles: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cut(profiles)
