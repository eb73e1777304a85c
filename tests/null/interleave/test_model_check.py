"""Explores small cases in every order of events, and tests the states that the model checker
compares.
"""

import threading

import pytest

from jaxcross.interleave import messages as m
from jaxcross.interleave.policy import Sequential
from jaxcross.interleave.simulator import Add, Fail, Sync, Think
from jaxcross.interleave.vote import JobRequest
from tests.model.explore import explore
from tests.model.model_case import Case
from tests.model.model_rank import RankModel
from tests.model.model_state import clone, name
from tests.support.model_scripts import (
    BETWEEN,
    EVALUATE,
    EXHAUSTIVE,
    LOCAL,
    PLAIN,
    SHORT,
    TRAIN,
    TWICE,
    alike,
    ends,
    fed,
    loops,
    request,
    step,
    unlike,
)


@pytest.mark.mostly_integration("case0-steps0", "case6-steps6", "case12-steps12")
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (alike(1, (step(PLAIN),)), [1]),
        (alike(3, (step(PLAIN), step(PLAIN))), [2]),
        (alike(2, (step(TWICE), Think(0), step(LOCAL), step(TWICE))), [2]),
        (alike(2, (Sync("restore"), step(PLAIN), Sync("save"))), [1]),
        (alike(2, (step(BETWEEN), step(SHORT), step(BETWEEN))), [3]),
        pytest.param(alike(2, fed(1, PLAIN)), [1], marks=EXHAUSTIVE),
        (unlike(fed(1), fed(0)), [0]),
        pytest.param(alike(2, loops(0, 1)), [0], marks=EXHAUSTIVE),  # the next case starts with it
        (alike(2, loops(0, 1, 0)), [0]),
        (alike(1, loops(0, 1, 2, 0)), [0]),
        pytest.param(alike(2, loops(0, 1, 2, 0)), [0], marks=EXHAUSTIVE),
        pytest.param(alike(2, (*loops(0, 1, 2, 0), step(SHORT))), [1], marks=EXHAUSTIVE),
        (alike(2, (step(SHORT),), (step(SHORT),), policy=Sequential()), [1, 1]),
        (alike(1, (step(SHORT),), (step(SHORT),), depth=1), [1, 1]),
        pytest.param(alike(1, (step(LOCAL),), (step(SHORT),)), [0, 1], marks=EXHAUSTIVE),
        pytest.param(unlike(fed(2, SHORT), fed(1, SHORT)), [1], marks=EXHAUSTIVE),
        pytest.param(alike(2, (step(SHORT),), (step(SHORT),)), [1, 1], marks=EXHAUSTIVE),
    ],
)
def test_in_every_order_all_ranks_make_all_steps(case, steps):
    assert ends(case) == {tuple((n, "ended") for n in steps)}


@pytest.mark.mostly_integration(
    "bad0-good0-steps0", "bad2-good2-steps2", "bad8-good8-steps8", "bad14-good14-steps14"
)
@pytest.mark.parametrize(
    ("bad", "good", "steps"),
    [
        ((step(PLAIN, s0="dispatch"),), (step(PLAIN),), {0}),
        ((step(PLAIN, s0="complete"),), (step(PLAIN),), {0}),
        ((step(TWICE, s2="complete"),), (step(TWICE),), {0}),
        ((step(PLAIN, s2="dispatch"), step(PLAIN)), (step(PLAIN), step(PLAIN)), {1}),
        # After the commit, the other rank may make one more step before it learns of the failure.
        ((step(PLAIN, s2="complete"), step(PLAIN)), (step(PLAIN), step(PLAIN)), {1, 2}),
        (
            (step(SHORT), step(LOCAL, s0="complete"), step(SHORT)),
            (step(SHORT), step(LOCAL), step(SHORT)),
            {1, 2},
        ),
        ((step(PLAIN), Fail("the job failed")), (step(PLAIN), step(PLAIN)), {1}),
        (
            (step(SHORT), step(BETWEEN), Fail("the job failed")),
            (step(SHORT), step(BETWEEN), step(BETWEEN), step(SHORT)),
            {1},
        ),
        ((step(SHORT), Fail("the job failed")), (step(SHORT), step(LOCAL), step(LOCAL)), {1}),
        ((step(PLAIN),), (step(PLAIN), step(PLAIN)), {1}),
        ((step(PLAIN), Sync("save")), (step(PLAIN), step(PLAIN)), {1}),
        ((step(PLAIN), step(SHORT)), (step(PLAIN), step(PLAIN)), {1}),
        # The same exchanges, at different calls of a step that only exchanges now and then.
        ((step(BETWEEN), step(SHORT)), (step(SHORT), step(BETWEEN)), {0}),
        ((step(SHORT), step(BETWEEN), step(SHORT)), (step(SHORT), step(SHORT), step(BETWEEN)), {1}),
        # The same exchanges of two functions, in a different order.
        ((step(TRAIN), step(EVALUATE)), (step(EVALUATE), step(TRAIN)), {0}),
        (
            (step(TRAIN), step(EVALUATE), step(TRAIN)),
            (step(TRAIN), step(TRAIN), step(EVALUATE)),
            {1},
        ),
        ((step(TRAIN), step(TRAIN)), (step(TRAIN), step(LOCAL), step(EVALUATE), step(TRAIN)), {1}),
    ],
)
def test_in_any_order_a_fault_ends_the_job_on_all(bad, good, steps):
    assert ends(unlike(bad, good)) == {((n, "failed"),) for n in steps}


@pytest.mark.mostly_integration("bad0-good0-end0", "bad1-good1-end1", "bad7-good7-end7")
@pytest.mark.parametrize(
    ("bad", "good", "end"),
    [
        ((step(PLAIN, s0="dispatch"),), (step(PLAIN),), (0, "failed")),
        ((step(PLAIN, s0="complete"),), (step(PLAIN),), (0, "failed")),
        ((step(PLAIN, s2="dispatch"),), (step(PLAIN),), (1, "failed")),
        ((step(PLAIN, s2="complete"),), (step(PLAIN),), (1, "failed")),
        ((step(PLAIN), Fail("the job failed")), (step(PLAIN), step(PLAIN)), (1, "failed")),
        ((step(PLAIN),), (step(PLAIN), step(PLAIN)), (1, "failed")),
        ((step(PLAIN, s1="skip"),), (step(PLAIN),), (1, "ended")),
        ((step(PLAIN, s1="eject"),), (step(PLAIN),), (0, "ejected")),
    ],
)
def test_in_any_order_two_other_ranks_hear_of_a_fault(bad, good, end):
    assert ends(unlike(bad, good, good)) == {(end,)}


@pytest.mark.mostly_integration("script1-steps1")
@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ((step(PLAIN),), {0, 1}),
        ((step(LOCAL), step(LOCAL)), {0}),
        ((step(SHORT), step(LOCAL)), {0, 1}),
    ],
)
def test_data_that_fails_at_any_moment_ends_the_job(script, steps):
    """The thread that prepares a job's data fails on one rank, while the job is in any of its
    calls.
    """
    found = ends(alike(2, script, outside=((m.JobRaised(0, "the job failed"),), ())))
    assert found == {((n, "failed"),) for n in steps} | {
        ((sum(s.graph != LOCAL for s in script), "ended"),)
    }


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=EXHAUSTIVE)])
def test_in_every_order_the_other_job_does_not_notice(ranks):
    others = [((), (step(SHORT),))] * (ranks - 1)
    found = ends(Case(scripts=(((Fail("the job failed"),), (step(SHORT),)), *others)))
    assert found == {((0, "failed"), (1, "ended"))}


@pytest.mark.integration
def test_interrupt_stops_all_ranks_at_one_step():
    """The interrupt may come at any moment."""
    stopped = {((n, "stopped"),) for n in (0, 1)}
    assert ends(alike(2, (step(SHORT),) * 2, outside=((m.StopRequested(),), ()))) == {
        *stopped,
        ((2, "ended"),),
    }


@pytest.mark.mostly_integration("case9-expected9", "case11-expected11", "case12-expected12")
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # Someone requests a stop or a pause at any moment.
        (
            alike(2, (step(SHORT),) * 2, outside=((request(JobRequest.STOP),), ())),
            {"0 stopped", "1 stopped", "2 ended"},
        ),
        (
            alike(
                1,
                (step(SHORT),),
                outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)),),
            ),
            {"1 ended"},
        ),
        (
            alike(3, (step(SHORT),) * 2, outside=((request(JobRequest.STOP),), (), ())),
            {"0 stopped", "1 stopped", "2 ended"},
        ),
        (
            alike(
                3,
                (step(SHORT),),
                outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)), (), ()),
            ),
            {"1 ended"},
        ),
        # A stop is requested during a pause, when ranks may be at different steps of the job.
        (
            alike(
                2,
                (step(LOCAL), step(SHORT)),
                outside=(
                    (
                        request(JobRequest.PAUSE),
                        request(JobRequest.RESUME),
                        request(JobRequest.STOP),
                    ),
                    (),
                ),
            ),
            {"0 stopped", "1 ended"},
        ),
        # If a job adds another job, the new one always joins, because the run can't end before the
        # job that adds it. If a thread outside of the run adds a job, the run may already have
        # ended.
        (alike(2, (Add("new", ()), step(SHORT))), {"1 ended, 0 ended"}),
        pytest.param(
            alike(1, (Add("new", (step(SHORT),)), step(SHORT))),
            {"1 ended, 1 ended"},
            marks=EXHAUSTIVE,
        ),
        pytest.param(
            alike(2, (step(SHORT),), outside=((Add("new", ()),),) * 2),
            {"1 ended", "1 ended, 0 ended"},
            marks=EXHAUSTIVE,
        ),
        (
            alike(
                2, (step(SHORT),), outside=((m.TextSubmitted("new"),), ()), submitted=(("new", ()),)
            ),
            {"1 ended", "1 ended, 0 ended"},
        ),
        # A job that is added on one rank only never joins, and no rank waits for it.
        (unlike((Add("new", ()), step(SHORT)), (step(SHORT),)), {"1 ended"}),
        # One rank finds non-finite values in an exchange.
        (unlike((step(PLAIN, s1="skip"),), (step(PLAIN),)), {"1 ended"}),
        (unlike((step(PLAIN, s1="eject"),), (step(PLAIN),)), {"0 ejected"}),
        (unlike((step(TWICE, s1="raise"),), (step(TWICE, s3="eject"),)), {"0 failed"}),
    ],
)
def test_in_every_order_jobs_join_rest_and_leave_alike(case, expected):
    assert {", ".join(f"{steps} {how}" for steps, how in end) for end in ends(case)} == expected


def test_what_was_found_is_counted():
    found = explore(alike(2, (step(SHORT),)))
    assert found.moves > found.states > found.meetings > 10
    assert found.joint_states > found.states
    with pytest.raises(MemoryError, match="more than 20 states of a rank"):
        explore(alike(2, (step(SHORT),)), limit=20)


# States as values.


def test_copies_are_independent_and_names_match_states():
    model = RankModel(alike(1, fed(1), (step(TWICE),)), 0)
    for _ in range(30):
        if model.arrival is not None:
            break
        before, copy = model.name(), model.copy()
        assert copy.name() == before
        for move in model.moves():
            other = model.copy()
            other.take(move)
            assert other.name() != before
        assert model.name() == before, "a copy's moves have changed the original"
        model.take(model.moves()[-1])


def test_a_state_holds_nothing_that_cannot_be_copied():
    assert name({1, 2}) == name({2, 1}) != name({1, 3})
    assert name({1: [1], 2: (2.0,)}) == name({2: (2.0,), 1: [1]})
    assert name({"a": 1, "b": 2}) != name({"b": 2, "a": 1}), (
        "ranks tell each other names in their order"
    )
    with pytest.raises(TypeError, match="`_thread.lock` has no place in a state"):
        clone([threading.Lock()])
