"""Tests the jobs' rates while all of them are running."""

import pytest

from jaxcross.interleave.policy import RoundRobin, Weighted
from jaxcross.plan.twin import step_rates
from jaxcross.step.profile import Profile


def test_a_job_alone_goes_at_its_own_rate() -> None:
    job = Profile.whole("a", compute_s=0.1, exchange_s=0.1)
    assert step_rates([job], policy=RoundRobin(), until_s=2.0, vote_s=0.0) == pytest.approx((5.0,))


def test_unlike_jobs_go_in_lock_step_by_turns() -> None:
    """The large job never ends, so the small one can't speed up at the end."""
    jobs = [
        Profile.whole(name, compute_s=s, exchange_s=s)
        for name, s in (("large", 1.0), ("small", 0.01))
    ]
    large, small = step_rates(jobs, policy=RoundRobin(), until_s=20.0, vote_s=0.0)
    assert small == pytest.approx(large, rel=0.3)
    assert large > 0.4


def test_a_job_that_makes_no_steps_has_no_rate() -> None:
    job = Profile.whole("a", compute_s=1.0, exchange_s=1.0)
    assert step_rates([job], policy=RoundRobin(), until_s=1.0) == (0.0,)
    assert step_rates([job], policy=RoundRobin(), until_s=3.0) == (0.0,)


def test_each_job_needs_a_share() -> None:
    jobs = [Profile.whole(name, compute_s=1.0, exchange_s=1.0) for name in "ab"]
    with pytest.raises(ValueError, match="1 shares, but there are 2 jobs"):
        step_rates(jobs, policy=Weighted((1.0,)), until_s=1.0)
