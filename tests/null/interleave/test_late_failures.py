"""Tests computations that fail after their step was committed.

The failing rank lacks the step's results, and reports that.
"""

import pytest

from jaxcross.interleave import messages as m
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import RoundRobin
from jaxcross.interleave.step_graph import StepGraph
from tests.support.fed_interleaver import feed, vote

LOCAL = StepGraph(kinds=("compute",), needs=((),))
CARRIED = StepGraph(
    kinds=("compute", "collective", "compute"), needs=((), (), (0, 1)), after_commit=frozenset({2})
)
COMPARED = m.CompareTexts(
    0,
    "failed\nin step 1, after the commit, so this rank lacks the step's results: the update failed",
)


def committed_call():
    """Returns an interleaver whose job has called a carried step, and the step's commit vote."""
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted())
    vote(one, feed(one, m.StepCalled(0, CARRIED)))
    feed(one, m.SegmentDispatched(0, 1, 0))
    return one, feed(one, m.ExchangeDone(0, 1))


def test_failure_during_the_commit_vote_is_after_the_commit():
    one, commit = committed_call()
    feed(one, m.SegmentFailed(0, 1, 0, "in step 1", "the update failed"))
    out = vote(one, commit)
    assert one.step(0) == 1
    assert COMPARED in vote(one, out)


def test_failure_during_the_next_call_is_after_the_commit():
    """A call returns as soon as its segments have been dispatched, so they may fail later."""
    one, commit = committed_call()
    vote(one, commit)
    out = feed(one, m.SegmentCompleted(0, 1, 0), m.SegmentDispatched(0, 1, 2))
    assert m.StepReturned(0, 1) in out
    out = feed(
        one, m.StepCalled(0, CARRIED), m.SegmentFailed(0, 1, 2, "in step 1", "the update failed")
    )
    while COMPARED not in out:
        if any(isinstance(each, m.RunExchange) for each in out):
            out = feed(one, m.ExchangeDone(0, 1))
        else:
            out = vote(one, out)
    assert one.step(0) == 1


@pytest.mark.parametrize("dispatched", [False, True])
def test_failure_after_another_one_is_reported_too(dispatched):
    """The thread that prepares batches fails first. The update that's under way continues, then
    fails.
    """
    one, commit = committed_call()
    assert m.Dispatch(0, 1, 1, 2) in vote(one, commit)
    feed(one, m.SegmentCompleted(0, 1, 0))
    if dispatched:
        assert m.StepReturned(0, 1) in feed(one, m.SegmentDispatched(0, 1, 2))
        assert vote(one, feed(one, m.JobRaised(0, "after batch 3: no such file."))) == []
    else:
        # A vote changes nothing before the update has been dispatched, so the rank backs off first.
        assert feed(one, m.JobRaised(0, "after batch 3: no such file.")) == []
        assert vote(one, feed(one, m.BackoffElapsed())) == [m.Backoff(1)]
    out = feed(one, m.SegmentFailed(0, 1, 2, "in step 1", "the update failed"))
    lost = "in step 1, after the commit, so this rank lacks the step's results: the update failed"
    compared = m.CompareTexts(0, f"failed\nafter batch 3: no such file; then {lost}")
    assert compared in (out if dispatched else vote(one, out))


def test_a_call_without_a_commit_does_not_hide_a_later_failure():
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted(), m.StepCalled(0, LOCAL), m.SegmentDispatched(0, 1, 0))
    vote(one, feed(one, m.StepCalled(0, CARRIED)))
    commit = feed(one, m.SegmentDispatched(0, 2, 0), m.ExchangeDone(0, 1))
    feed(one, m.SegmentFailed(0, 1, 0, "in a call after step 0", "no memory", False))
    out = vote(one, commit)
    assert not any(isinstance(each, m.CompareTexts) for each in out)
    out = feed(
        one, m.SegmentCompleted(0, 2, 0), m.SegmentFailed(0, 2, 2, "in step 1", "the update failed")
    )
    lost = "in step 1, after the commit, so this rank lacks the step's results: the update failed"
    compared = m.CompareTexts(0, f"failed\nin a call after step 0: no memory; then {lost}")
    assert compared in vote(one, out)


def test_failure_without_a_commit_says_nothing_of_it():
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted())
    feed(one, m.StepCalled(0, LOCAL), m.SegmentDispatched(0, 1, 0))
    out = feed(one, m.SegmentFailed(0, 1, 0, "in a call after step 0", "the update failed", False))
    assert m.CompareTexts(0, "failed\nin a call after step 0: the update failed") in vote(one, out)
