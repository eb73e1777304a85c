"""Tests that a failing job leaves with a complete state.

If a call may already have overwritten the state, it runs to completion.
"""

import pytest

from jaxcross.interleave import messages as m
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest, tally
from tests.support.fed_interleaver import failed_elsewhere, feed, vote

LOCAL = StepGraph(kinds=("compute",), needs=((),))
LONG = StepGraph(kinds=("compute", "compute"), needs=((), (0,)))
UPDATE = StepGraph(
    kinds=("compute", "collective", "compute"), needs=((), (0,), (1,)), after_commit=frozenset({2})
)


def has(instructions, kind):
    return any(isinstance(each, kind) for each in instructions)


def calls(graph):
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted())
    return one, feed(one, m.StepCalled(0, graph))


def test_a_failure_elsewhere_waits_for_a_call_without_exchanges():
    one, out = calls(LONG)
    assert has(out, m.Dispatch)
    out = feed(one, failed_elsewhere(feed(one, m.BackoffElapsed())))
    assert not has(out, m.CompareTexts)
    out = feed(one, m.SegmentDispatched(0, 1, 0), m.SegmentDispatched(0, 1, 1))
    assert has(out, m.StepReturned) and not has(out, m.CompareTexts)
    assert has(feed(one, m.SegmentCompleted(0, 1, 0), m.SegmentCompleted(0, 1, 1)), m.CompareTexts)
    # The next call doesn't begin any more.
    out = feed(one, m.StepCalled(0, LOCAL))
    assert not has(out, m.Dispatch)
    out = feed(one, m.TextsCompared(0, ("failed\nthe job failed", "")))
    assert m.Raised(0) in out


def test_a_call_that_breaks_is_not_waited_for():
    one, out = calls(LONG)
    out = feed(one, failed_elsewhere(feed(one, m.BackoffElapsed())))
    assert not has(out, m.CompareTexts)
    assert has(
        feed(one, m.SegmentFailed(0, 1, 0, "in step 1", "the job failed", False)), m.CompareTexts
    )


def test_a_call_that_broke_returns_nothing():
    """Its last segment was already on its way to the device."""
    one, _ = calls(LONG)
    feed(one, m.SegmentDispatched(0, 1, 0))
    out = feed(
        one,
        m.SegmentFailed(0, 1, 0, "in step 1", "the job failed", False),
        m.SegmentDispatched(0, 1, 1),
    )
    assert not has(out, m.StepReturned)


@pytest.mark.parametrize("graph", [LOCAL, UPDATE])
def test_failing_data_waits_for_the_call_under_way(graph):
    """The thread that prepares batches fails while the job's own thread is in a call."""
    one, out = calls(graph)
    if graph is UPDATE:
        vote(one, out)
        vote(one, feed(one, m.SegmentDispatched(0, 1, 0), m.ExchangeDone(0, 1)))
    out = feed(one, m.JobRaised(0, "after batch 3: the job failed"))
    while not has(out, m.CastVote | m.CompareTexts):
        out = feed(one, m.BackoffElapsed())
    out = vote(one, out) if not has(out, m.CompareTexts) else out
    assert not has(out, m.CompareTexts)
    out = feed(one, m.SegmentDispatched(0, 1, len(graph.kinds) - 1))
    assert has(out, m.StepReturned)


def test_a_call_that_has_not_begun_is_left():
    """A call may not have begun because its job is paused. After a failure, it's dropped."""
    one, out = calls(UPDATE)
    out = feed(one, failed_elsewhere(out))
    assert has(out, m.CompareTexts)
    assert m.Raised(0) in feed(one, m.TextsCompared(0, ("failed\nthe job failed", "")))


@pytest.mark.parametrize("policy", [RoundRobin(), Sequential(), Weighted((9, 1))])
def test_a_call_ends_though_another_job_is_never_idle(policy):
    """Job 1 is in a call when job 0 is resumed, which then calls one step without exchanges after
    the other.
    """
    one = Interleaver(2, policy, depth=1)
    vote(one, feed(one, m.JobRequested(0, "a", JobRequest.PAUSE), m.RunStarted()))
    assert m.Dispatch(1, 1, 0, 0) in feed(one, m.StepCalled(1, LONG))
    vote(one, feed(one, m.JobRequested(0, "a", JobRequest.RESUME)))
    vote(
        one, feed(one, m.JobRaised(1, "the job failed"), m.StepCalled(0, LOCAL), m.BackoffElapsed())
    )
    out = feed(one, m.SegmentDispatched(1, 1, 0), m.SegmentCompleted(1, 1, 0, 10))
    for call in range(1, 100):
        if m.Dispatch(1, 1, 0, 1) in out:
            break
        assert has(out, m.Dispatch)
        feed(one, m.SegmentDispatched(0, call, 0), m.StepCalled(0, LOCAL))
        out = feed(one, m.SegmentCompleted(0, call, 0, 10))
    assert m.Dispatch(1, 1, 0, 1) in out
    assert has(feed(one, m.SegmentDispatched(1, 1, 1), m.SegmentCompleted(1, 1, 1)), m.CompareTexts)


def test_ranks_that_made_unequal_local_steps_do_not_end_alike():
    ranks = [Interleaver(1, RoundRobin()) for _ in range(2)]
    local = StepGraph(kinds=("compute",), needs=((),), local_step=True)
    ballots = []
    for rank, one in enumerate(ranks):
        feed(one, m.RunStarted())
        for call in range(1, 3 + rank):
            feed(
                one,
                m.StepCalled(0, local),
                m.SegmentDispatched(0, call, 0),
                m.SegmentCompleted(0, call, 0),
            )
        out = feed(one, m.JobReturned(0))
        ballots.append(next(i.ballot for i in out if isinstance(i, m.CastVote)))
    for rank, one in enumerate(ranks):
        assert m.CompareTexts(0, f"end\nended after step {2 + rank}") in feed(
            one, m.VoteDone(tally(ballots))
        )
