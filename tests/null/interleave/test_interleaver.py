"""Tests the interleaver as a state machine, with plain synchronous calls and no simulator."""

import pytest

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.local_state import Wait
from jaxcross.interleave.policy import RoundRobin, Sequential
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest, tally
from tests.support.fed_interleaver import failed_elsewhere, feed, vote

PLAIN = StepGraph(
    kinds=("compute", "collective", "compute"),
    needs=((), (0,), (0, 1)),
    after_commit=frozenset({2}),
)
LOCAL = StepGraph(kinds=("compute",), needs=((),))


def kinds(instructions):
    return [type(i).__name__ for i in instructions]


def test_one_step_in_full():
    one = Interleaver(1, RoundRobin())
    assert feed(one, m.RunStarted()) == [m.StartJob(0), m.Backoff(0)]
    out = feed(one, m.StepCalled(0, PLAIN))
    # The first compute segment needs no agreement, so it starts at the call, in parallel with the
    # vote.
    assert out[0] == m.Dispatch(0, 1, 1, 0)
    assert vote(one, out) == []
    assert feed(one, m.SegmentDispatched(0, 1, 0)) == [m.RunExchange(0, 1, 1, 1, False)]
    assert feed(one, m.SegmentCompleted(0, 1, 0)) == []
    out = feed(one, m.ExchangeDone(0, 1))
    # The commit vote. Segment 2 overwrites the state, so it has to wait for the vote.
    assert kinds(out) == ["CastVote"]
    assert vote(one, out) == [m.Dispatch(0, 1, 1, 2), m.Backoff(0)]
    assert one.step(0) == 1
    assert feed(one, m.SegmentDispatched(0, 1, 2)) == [m.StepReturned(0, 1)]
    # The job votes for its end only when nothing of it can still fail on the device.
    assert feed(one, m.JobReturned(0)) == []
    out = vote(one, feed(one, m.SegmentCompleted(0, 1, 2)))
    assert out == [m.JobFinished(0, "ended", 1), m.Finish()]
    assert one.finished


def test_depth_bounds_the_segments_on_the_device():
    one = Interleaver(3, RoundRobin(), depth=2)
    feed(one, m.RunStarted())
    out = feed(one, *(m.StepCalled(job, LOCAL) for job in range(3)))
    assert [i.job for i in out if isinstance(i, m.Dispatch)] == [0, 1]
    assert [i.job for i in feed(one, m.SegmentCompleted(0, 1, 0)) if isinstance(i, m.Dispatch)] == [
        2
    ]


def test_work_without_exchanges_counts_as_a_turn():
    one = Interleaver(2, RoundRobin(), depth=1)
    feed(one, m.RunStarted())
    order = []
    pending = feed(one, m.StepCalled(0, LOCAL), m.StepCalled(1, LOCAL))
    for _ in range(6):
        d = next(i for i in pending if isinstance(i, m.Dispatch))
        order.append(d.job)
        key = (d.job, d.call, d.segment)
        out = feed(one, m.SegmentDispatched(*key))
        assert m.StepReturned(d.job, 0) in out
        pending = feed(one, m.StepCalled(d.job, LOCAL), m.SegmentCompleted(*key))
    assert order == [0, 1, 0, 1, 0, 1]


def test_sequential_starts_second_job_after_the_first():
    one = Interleaver(2, Sequential())
    assert feed(one, m.RunStarted())[0] == m.StartJob(0)
    out = vote(one, feed(one, m.JobReturned(0)))
    assert out[:2] == [m.JobFinished(0, "ended", 0), m.StartJob(1)]
    assert vote(one, feed(one, m.JobReturned(1))) == [m.JobFinished(1, "ended", 0), m.Finish()]


def test_failure_in_a_step_sends_zeros_without_commit():
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted())
    vote(one, feed(one, m.StepCalled(0, PLAIN)))
    out = feed(one, m.SegmentFailed(0, 1, 0, "here", "the segment failed"))
    assert out == [m.RunExchange(0, 1, 1, 1, True)]
    out = vote(one, feed(one, m.ExchangeDone(0, 1)))
    assert out == [m.CompareTexts(0, "failed\nhere: the segment failed")]
    assert one.step(0) == 0
    out = feed(one, m.TextsCompared(0, ("failed\nhere: the segment failed",)))
    assert out == [
        m.JobFinished(0, "failed", 0, ("failed\nhere: the segment failed",)),
        m.Raised(0),
        m.Finish(),
    ]


def test_a_call_after_the_job_failed_raises_at_once():
    one = Interleaver(2, RoundRobin())
    feed(one, m.RunStarted())
    out = feed(one, m.SegmentFailed(0, 9, 0, "here", "late"))
    out = vote(one, out)
    feed(one, m.TextsCompared(0, ("failed\nhere: late",)))
    assert m.Raised(0) in feed(one, m.StepCalled(0, PLAIN))


def test_stop_ends_waiting_jobs_after_committed_steps():
    """A stop ends a job where it waits, but never withholds a committed step from it."""
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted())
    vote(one, feed(one, m.StepCalled(0, PLAIN)))
    feed(one, m.SegmentDispatched(0, 1, 0), m.SegmentCompleted(0, 1, 0), m.StopRequested())
    # The vote that commits the step is also the one in which the ranks learn of the stop. The
    # step's inputs have been donated, so the job must still receive the step's outputs before it's
    # stopped.
    out = vote(one, feed(one, m.ExchangeDone(0, 1)))
    assert "JobFinished" not in kinds(out)
    assert m.Dispatch(0, 1, 1, 2) in out
    assert feed(one, m.SegmentDispatched(0, 1, 2)) == [m.StepReturned(0, 1)]
    # Until the job calls again and is stopped, the lane backs off rather than spinning.
    out = vote(one, feed(one, m.BackoffElapsed()))
    assert kinds(out) == ["Backoff"]
    out = vote(one, feed(one, m.StepCalled(0, PLAIN)))
    assert m.JobFinished(0, "stopped", 1) in out
    assert m.Raised(0) in out


def test_stop_reaches_a_job_with_nothing_else_to_report():
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted(), m.BatchWanted(0, 0, 0))
    # This vote reports that the job waits, but changes nothing.
    out = vote(one, feed(one, m.BackoffElapsed()))
    assert kinds(out) == ["Backoff"]
    out = vote(one, feed(one, m.StopRequested()))
    assert [m.JobFinished(0, "stopped", 0), m.Raised(0)] == out[:2]
    assert one.finished


def test_new_loop_ends_those_not_read_beside_it():
    one = Interleaver(1, RoundRobin())
    mine, shared = one._jobs[0], one.shared.jobs[0]
    feed(one, m.RunStarted())
    for stream, still_open, known in [
        (0, (), {0}),
        (1, (0,), {0, 1}),
        (2, (0,), {0, 1, 2}),
        (3, (0, 2), {0, 2, 3}),
    ]:
        prepared = (m.BatchPrepared(0, stream, 2), m.StreamEnded(0, stream, 2))
        out = feed(one, m.StreamBegun(0, still_open), *prepared, m.BatchWanted(0, stream, 0))
        assert m.BatchGranted(0, True) in vote(one, out)
        # Once stream 2 begins, the job won't read from stream 1 again. The ballots still mention
        # stream 1 until the job requests its first batch from stream 2.
        assert mine.prepared.keys() == mine.limits.keys() == shared.streams.keys() == known
    # The job can still read open streams to their end. A loop that has ended may have a thread that
    # prepared another batch, so late events from such a thread must be ignored.
    assert m.BatchGranted(0, True) in feed(one, m.BatchPrepared(0, 1, 2), m.BatchWanted(0, 0, 1))
    assert m.BatchGranted(0, False) in feed(one, m.BatchWanted(0, 0, 2))
    feed(one, m.StreamBegun(0, (3,)))
    assert mine.prepared.keys() == shared.streams.keys() == {0, 3}


def test_stop_prevents_later_jobs_from_starting():
    one = Interleaver(3, Sequential())
    assert [i.job for i in feed(one, m.RunStarted()) if isinstance(i, m.StartJob)] == [0]
    out = vote(one, feed(one, m.BatchWanted(0, 0, 0), m.StopRequested()))
    assert [(i.job, i.status) for i in out if isinstance(i, m.JobFinished)] == [
        (0, "stopped"),
        (1, "stopped"),
        (2, "stopped"),
    ]
    assert not any(isinstance(i, m.StartJob) for i in out)
    assert one.finished


def test_step_graph_rejects_a_commit_cycle():
    """An exchange must not wait for its own step's commit."""
    with pytest.raises(
        ValueError, match="exchange segment 1 waits for the commit, but the commit waits"
    ):
        StepGraph(kinds=("compute", "collective"), needs=((), (0,)), after_commit=frozenset({0}))
    with pytest.raises(ValueError, match="segment 0 needs"):
        StepGraph(kinds=("compute",), needs=((1,),))


def test_reports_out_of_turn_are_internal_errors():
    one = Interleaver(1, RoundRobin())
    with pytest.raises(
        InternalError,
        match="the end of a slot `exchange` of job 0, but its current slot is None",
    ):
        one.handle(m.ExchangeDone(0, 1))
    two = Interleaver(2, RoundRobin())
    feed(two, m.RunStarted())
    out = vote(two, vote(two, feed(two, *(m.StepCalled(job, PLAIN) for job in range(2)))))
    out += feed(two, *(m.SegmentDispatched(job, 1, 0) for job in range(2)))
    assert out == [m.RunExchange(0, 1, 1, 1, False)]
    assert vote(two, feed(two, m.ExchangeDone(0, 1)))[-1] == m.RunExchange(1, 1, 1, 1, False)
    with pytest.raises(
        InternalError, match=r"of job 0, but its current slot is Slot\(kind='exchange', job=1"
    ):
        two.handle(m.ExchangeDone(0, 1))
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 2"):
        Interleaver(0, RoundRobin())


def test_a_job_joins_with_the_wish_that_came_before_it():
    one = Interleaver(1, RoundRobin())
    out = feed(
        one,
        m.RunStarted(),
        m.JobAdded("b"),
        m.JobRequested(-1, "b", JobRequest.STOP),
        m.JobRequested(-1, "b", JobRequest.PAUSE),
    )
    assert kinds(out) == ["StartJob", "Backoff", "CastVote"]
    assert vote(one, out) == [m.GatherAnnouncements()]
    out = feed(one, m.AnnouncementsGathered((one.announcement(),)))
    assert out[:2] == [m.JobJoined(1, "b"), m.StartJob(1)]
    out = vote(one, feed(one, m.StepCalled(1, PLAIN), m.BackoffElapsed()))
    # A stop is final, whatever is requested later.
    assert out[:2] == [
        m.JobFinished(1, "stopped", 0, stop_requested=True),
        m.Raised(1),
    ]


def test_late_events_of_a_job_that_left_are_harmless():
    one = Interleaver(2, RoundRobin(), depth=1)
    feed(one, m.RunStarted())
    out = feed(
        one,
        failed_elsewhere(feed(one, m.StepCalled(0, PLAIN), m.SegmentDispatched(0, 1, 0)), jobs=2),
    )
    assert out == [m.CompareTexts(0, "step\ncalled step 1\n")]
    feed(one, m.TextsCompared(0, ("failed\nthe segment failed",)))
    assert feed(one, m.SegmentDispatched(0, 1, 0), m.BatchPrepared(0, 0, 3), m.JobReturned(0)) == []
    out = feed(one, m.StepCalled(1, PLAIN))
    # The other job still has a segment on the device.
    assert not any(isinstance(i, m.Dispatch) for i in out)
    assert m.Dispatch(1, 1, 1, 0) in feed(one, m.SegmentCompleted(0, 1, 0, 5))
    with pytest.raises(InternalError, match="but there is no job 0"):
        one.handle(m.ExchangeDone(0, 1))


def test_paused_job_does_not_dispatch_its_next_step():
    one = Interleaver(1, RoundRobin())
    out = vote(one, feed(one, m.RunStarted(), m.JobRequested(0, "", JobRequest.PAUSE)))
    assert m.JobPaused(0, True) in out
    assert not any(isinstance(i, m.Dispatch) for i in feed(one, m.StepCalled(0, PLAIN)))
    vote(one, feed(one, m.BackoffElapsed()))
    out = vote(one, feed(one, m.JobRequested(0, "", JobRequest.RESUME)))
    assert out[:2] == [m.JobPaused(0, False), m.Dispatch(0, 1, 1, 0)]


@pytest.mark.parametrize("stop", [m.JobRequested(0, "", JobRequest.STOP), m.StopRequested()])
def test_paused_job_in_a_local_step_can_be_stopped(stop):
    """The local step runs to completion first, because a job only stops where it waits for all
    ranks.
    """
    one = Interleaver(1, RoundRobin())
    vote(one, feed(one, m.RunStarted(), m.JobRequested(0, "", JobRequest.PAUSE)))
    assert not any(isinstance(i, m.Dispatch) for i in feed(one, m.StepCalled(0, LOCAL)))
    vote(one, feed(one, m.BackoffElapsed()))
    out = vote(one, feed(one, stop))
    assert m.Dispatch(0, 1, 0, 0) in out
    assert m.StepReturned(0, 0) in feed(one, m.SegmentDispatched(0, 1, 0))
    feed(one, m.SegmentCompleted(0, 1, 0))
    calls = feed(one, m.StepCalled(0, PLAIN))
    assert not any(isinstance(i, m.RunExchange) for i in calls)
    out = vote(one, calls if "CastVote" in kinds(calls) else feed(one, m.BackoffElapsed()))
    assert (
        m.JobFinished(0, "stopped", 0, stop_requested=not isinstance(stop, m.StopRequested)) in out
    )


def test_pending_waits_tell_local_from_shared():
    """A job waits either for other ranks or for something local to its own rank."""
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted())
    assert one.pending_waits() == {}  # it is in its own code
    feed(one, m.BatchWanted(0, 0, 0))
    assert one.pending_waits() == {0: Wait(1, "batch 1 of data 1", own=True)}
    feed(one, m.BatchDropped(0), m.BatchDropped(0))
    assert one.pending_waits() == {0: Wait(1, "batch 1 of data 1", own=True, moved=2)}
    out = feed(one, m.BatchPrepared(0, 0, 1))
    assert one.pending_waits() == {0: Wait(1, "batch 1 of data 1")}  # ready here only
    assert m.BatchGranted(0, True) in vote(one, out)
    out = feed(one, m.StepCalled(0, PLAIN))
    assert one.pending_waits() == {0: Wait(1, "call of the step", moved=1)}
    vote(one, out)
    assert one.pending_waits() == {}  # an exchange comes next, which has its own watch
    feed(one, m.SegmentDispatched(0, 1, 0), m.SegmentCompleted(0, 1, 0))
    vote(one, feed(one, m.ExchangeDone(0, 1)))
    assert one.pending_waits() == {0: Wait(1, "end of the step", own=True, moved=1)}
    feed(one, m.SegmentDispatched(0, 1, 2), m.SegmentCompleted(0, 1, 2))
    assert one.pending_waits() == {}
    out = feed(one, m.SyncWanted(0, "owners agree\nand more"))
    assert one.pending_waits() == {0: Wait(2, "owners agree", moved=1)}
    feed(one, m.JobRaised(0, "no more"))
    assert one.pending_waits() == {0: Wait(2, "other ranks, to leave")}


def test_ranks_compare_the_labels_but_show_the_texts():
    """Rank 1 has another text, which is allowed, and then another label, which isn't."""
    ranks = [Interleaver(1, RoundRobin()) for _ in range(2)]
    for rank in ranks:
        feed(rank, m.RunStarted())

    def sync(*events):
        ballots = [
            next(i.ballot for i in feed(rank, event) if isinstance(i, m.CastVote))
            for rank, event in zip(ranks, events, strict=True)
        ]
        return [feed(rank, m.VoteDone(tally(ballots))) for rank in ranks]

    mine, _ = sync(m.SyncWanted(0, "same", "at a.py:1"), m.SyncWanted(0, "same", "at b.py:1"))
    assert mine == [m.RunSync(0, 0)]
    for rank in ranks:
        feed(rank, m.SyncDone(0))
    mine, theirs = sync(m.SyncWanted(0, "one", "at a.py:2"), m.SyncWanted(0, "two"))
    assert mine == [m.CompareTexts(0, "sync\nat a.py:2")]
    assert theirs == [m.CompareTexts(0, "sync\ntwo")]


def test_end_of_a_job_may_wait_while_others_advance():
    """A job's end may be delayed by anything that still makes progress."""
    here, there = ranks = [Interleaver(2, RoundRobin()) for _ in range(2)]
    last = [feed(here, m.RunStarted(), m.JobReturned(0)), feed(there, m.RunStarted())]
    before = here.pending_waits()[0]
    assert before.what == "end of the job"
    for n, rank in enumerate(ranks):
        last[n] += feed(rank, m.StepCalled(1, PLAIN))
    for _ in range(2):  # the first vote changes nothing, the second admits job 1
        assert here.pending_waits()[0] == before
        ballots = [
            next(
                i.ballot
                for i in [*out, *feed(rank, m.BackoffElapsed())]
                if isinstance(i, m.CastVote)
            )
            for rank, out in zip(ranks, last, strict=True)
        ]
        last = [feed(rank, m.VoteDone(tally(ballots))) for rank in ranks]
    assert here.pending_waits()[0].moved > before.moved
    assert there.pending_waits() == {}


def test_who_is_held_is_not_awaited():
    for policy, requests in (
        (Sequential(), ()),
        (RoundRobin(), (m.JobRequested(1, "b", JobRequest.PAUSE),)),
    ):
        one = Interleaver(2, policy)
        out = feed(one, m.RunStarted(), *requests)
        if requests:
            out = vote(one, out)
        feed(one, m.StepCalled(1, PLAIN))
        assert one.pending_waits() == {}


def test_failure_after_local_calls_is_at_the_last_step():
    """Ranks may differ in how often they call steps without exchanges, whether or not those count
    as steps.
    """
    local = StepGraph(kinds=("compute",), needs=((),), local_step=True)
    one = Interleaver(1, RoundRobin())
    feed(one, m.RunStarted())
    vote(one, feed(one, m.StepCalled(0, PLAIN)))
    feed(one, m.SegmentDispatched(0, 1, 0), m.SegmentCompleted(0, 1, 0))
    vote(one, feed(one, m.ExchangeDone(0, 1)))
    feed(one, m.SegmentDispatched(0, 1, 2), m.SegmentCompleted(0, 1, 2))
    for call, counts, step in ((2, False, 1), (3, True, 2), (4, False, 2)):
        feed(one, m.StepCalled(0, local, counts))
        feed(one, m.SegmentDispatched(0, call, 0), m.SegmentCompleted(0, call, 0))
        assert one.step(0) == step
    assert m.CompareTexts(0, "failed\nthe segment failed") in vote(
        one, feed(one, m.JobRaised(0, "the segment failed"))
    )
    out = feed(one, m.TextsCompared(0, ("failed\nthe segment failed",)))
    (finished,) = (i for i in out if isinstance(i, m.JobFinished))
    assert (finished.status, finished.step) == ("failed", 1)
