"""Tests the joint start: no job makes its first step before all have called theirs, and none waits
forever.
"""

from dataclasses import replace

import pytest

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.joint_start import JointStart
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.interleave.shared_order import SharedState
from jaxcross.interleave.simulator import Add, Await, Fail, Simulation, Sync, Think
from jaxcross.interleave.vote import AtStart, JobRequest
from tests.model.explore import explore
from tests.model.model_case import Case
from tests.support.model_scripts import (
    BETWEEN,
    EXHAUSTIVE,
    LOCAL,
    PLAIN,
    SHORT,
    alike,
    ends,
    request,
    step,
)


def together(*jobs, ranks=1, **options):
    return alike(ranks, *jobs, together=True, **options)


ONE, TWO = (step(SHORT),), (step(SHORT), step(SHORT))


@pytest.mark.mostly_integration(
    "case5-expected5",
    "case7-expected7",
    "case8-expected8",
    "case16-expected16",
    "case18-expected18",
)
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (together(ONE, ONE), {"1 ended, 1 ended"}),
        (together(ONE, (Sync("restore"), Sync("agree"), step(SHORT))), {"1 ended, 1 ended"}),
        (together(ONE, (step(LOCAL), step(SHORT))), {"1 ended, 1 ended"}),
        (together(ONE, (step(BETWEEN),)), {"1 ended, 1 ended"}),
        pytest.param(
            together(ONE, (step(BETWEEN), step(SHORT))), {"1 ended, 2 ended"}, marks=EXHAUSTIVE
        ),
        # A job that ends without a step, one that never exchanges, and one that raises.
        (together(ONE, ()), {"1 ended, 0 ended"}),
        (together(ONE, (step(LOCAL), step(LOCAL))), {"1 ended, 0 ended"}),
        (together(ONE, (Sync("restore"), Fail("the job failed"))), {"1 ended, 0 failed"}),
        # A job that waits for another one, which begins once the waiting job is excused.
        (together((Await(1), step(SHORT)), ONE), {"1 ended, 1 ended"}),
        pytest.param(
            together((Await(1),), (step(LOCAL), Await(2)), ONE),
            {"0 ended, 0 ended, 1 ended"},
            marks=EXHAUSTIVE,
        ),
        pytest.param(together(ONE, TWO, slow=(1,)), {"1 ended, 2 ended"}, marks=EXHAUSTIVE),
        # In these cases, a job is paused before its first step and resumed later, or a job that
        # waits for the joint start adds another job.
        pytest.param(
            together(
                (Await(1),), ONE, outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)),)
            ),
            {"0 ended, 1 ended"},
            marks=EXHAUSTIVE,
        ),
        pytest.param(
            together(ONE, ONE, outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)),)),
            {"1 ended, 1 ended"},
            marks=EXHAUSTIVE,
        ),
        pytest.param(
            together((Add("new", ONE), step(SHORT)), (Await(0),)),
            {"1 ended, 0 ended, 1 ended"},
            marks=EXHAUSTIVE,
        ),
        pytest.param(
            together((Add("new", ()), step(SHORT)), ONE),
            {"1 ended, 1 ended, 0 ended"},
            marks=EXHAUSTIVE,
        ),
        # Another policy, and two ranks.
        (together(ONE, ONE, policy=Weighted((3.0, 1.0))), {"1 ended, 1 ended"}),
        (together((Await(1), *ONE), ONE, policy=Weighted((3.0, 1.0))), {"1 ended, 1 ended"}),
        (together(ONE, ONE, policy=Sequential(), ranks=2), {"1 ended, 1 ended"}),
        (together(ONE, (), ranks=2), {"1 ended, 0 ended"}),
        (together((Await(1),), ONE, ranks=2), {"0 ended, 1 ended"}),
        pytest.param(together(ONE, ONE, ranks=2), {"1 ended, 1 ended"}, marks=EXHAUSTIVE),
        pytest.param(
            together(ONE, ONE, ranks=2, slow=(1,)), {"1 ended, 1 ended"}, marks=EXHAUSTIVE
        ),
        pytest.param(
            together(ONE, (Await(0),), ONE, ranks=1),
            {"1 ended, 0 ended, 1 ended"},
            marks=EXHAUSTIVE,
        ),
    ],
)
def test_in_every_order_all_jobs_begin(case, expected):
    """In every order of events, all jobs begin and end, and do so identically on all ranks."""
    assert {", ".join(f"{steps} {how}" for steps, how in end) for end in ends(case)} == expected


@pytest.mark.mostly_integration("bad2-good2-0 failed, 1 ended")
@pytest.mark.parametrize(
    ("bad", "good", "expected"),
    [
        ((Fail("the job failed"),), ONE, "0 failed, 1 ended"),
        ((step(SHORT, s0="dispatch"),), ONE, "0 failed, 1 ended"),
        ((), ONE, "0 failed, 1 ended"),
        ((Sync("other"), step(SHORT)), ONE, "0 failed, 1 ended"),
    ],
)
def test_a_fault_of_one_rank_lets_the_other_job_begin(bad, good, expected):
    """The other job begins even if the first job fails on one rank or acts differently there."""
    case = Case(scripts=((bad, ONE), (good, ONE)), together=True)
    assert {", ".join(f"{steps} {how}" for steps, how in end) for end in ends(case)} == {expected}


@pytest.mark.integration
def test_an_interrupt_stops_jobs_that_are_held_back():
    found = ends(together(ONE, (Sync("restore"), *ONE), outside=((m.StopRequested(),),)))
    assert ((0, "stopped"), (0, "stopped")) in found
    assert {how for end in found for _, how in end} == {"stopped", "ended"}


# Planted bugs.


class Impatient(SharedState):
    def may_begin(self, job, *, is_step):
        return not self.jobs[job].held


class BeginsAlone(Interleaver):
    """Bug: a job's first segments are dispatched as soon as the job calls its step."""

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self.shared = Impatient(jobs, policy)

    def check(self):
        pass


class NeverExcuses(Interleaver):
    """Bug: no job is ever excused."""

    def _apply(self, event):
        if not isinstance(event, m.StartExcused):
            super()._apply(event)


class Forgetful(Interleaver):
    """Bug: a job without an exchange isn't released when the joint start ends."""

    def _note_ready(self, job):
        if (
            self.shared.start
            or self._jobs[job].call is None
            or self._jobs[job].call.graph is not BETWEEN
        ):
            super()._note_ready(job)

    def check(self):
        pass


@pytest.mark.parametrize(
    ("wrong", "case", "message"),
    [
        (
            BeginsAlone,
            together(ONE, ONE),
            r"it is of a step, and jobs \{1\} have not called theirs",
        ),
        (NeverExcuses, together((Await(1),), ONE), "ranks keep meeting without progress"),
        (Forgetful, together(ONE, (step(BETWEEN),)), "ranks keep meeting|a rank stands still"),
    ],
)
def test_a_wrong_joint_start_is_found_out(wrong, case, message):
    with pytest.raises(InternalError, match=message):
        explore(replace(case, make=wrong))


# On a virtual clock.


def simulated(*jobs, ranks=2, **options):
    options = {"policy": RoundRobin(), "together": True, **options}
    return Simulation([[iter_script(job) for job in jobs] for _ in range(ranks)], **options).run()


def iter_script(actions):
    yield from actions


def begins(result, job):
    return min(span.start_ns for span in result.spans if span.job == str(job)) / 1e9


@pytest.mark.parametrize(("start", "first"), [(True, 30.0), (False, 1.0)])
def test_the_slow_compiler_is_waited_for(start, first):
    for rank in simulated((Think(1), step(PLAIN)), (Think(30), step(PLAIN)), together=start):
        assert begins(rank, 0) == pytest.approx(first, abs=0.1)
        assert begins(rank, 1) == pytest.approx(30.0, abs=0.1)


def test_votes_are_paced_while_jobs_are_held_back():
    """While one job compiles, ranks vote about twenty times per second rather than continuously."""
    (result, _) = simulated(ONE, ONE, (Think(10), *ONE), backoff_s=lambda level: 0.05)
    assert 100 < sum(slot == ("vote",) for slot in result.slots) < 300


def test_an_excused_job_does_not_keep_the_others():
    (result, _) = simulated((Await(1), *ONE), TWO, (Think(9), *ONE), excuse_s=20.0)
    assert begins(result, 1) == begins(result, 2) == pytest.approx(20.0, abs=0.1)
    assert result.steps == [1, 2, 1]


def test_of_two_excuses_the_known_one_counts():
    """If one rank knows why a job hasn't called its first step, the job doesn't count as late.

    A job that was late and then calls its first step counts as present.
    """
    known, late, here = AtStart.EXCUSED, AtStart.LATE, AtStart.HERE
    start = JointStart()
    start.begin(range(4))
    assert known == min(known, late) and late == min(late, here, AtStart.COMING)
    assert start.apply({0: known, 1: late, 2: AtStart.COMING, 3: here}) == [
        (0, "excused"),
        (1, "late"),
        (3, "here"),
    ]
    assert start.awaited(range(4)) == (2,)
    assert start.apply({0: late, 1: known, 2: late, 3: late}) == [(2, "late")]
    assert start.apply(dict.fromkeys(range(4), here)) == [(0, "here"), (1, "here"), (2, "here")]
