"""Tests which of the jobs' waits are watched, and which ranks they are attributed to."""

from functools import partial

import pytest

from jaxcross.health.activity import Activity, RankStatus, missing_ranks
from jaxcross.interleave.local_state import Wait
from jaxcross.runtime.stall_watch import JobWaits, absent


class Watching:
    """A world that records what is being watched, and which watches were renewed."""

    rank = 0

    def __init__(self):
        self.now, self.renewed = [], []

    def monitor(self, *, job, step, segment, what, waiting_for, local):
        assert segment == -1 and local == (waiting_for is None)
        return Watch(self, (job, step, f"own {what}" if local else what))


class Watch:
    def __init__(self, world, wait):
        self.world, self.wait = world, wait

    def __enter__(self):
        self.world.now.append(self.wait)

    def __exit__(self, *_):
        self.world.now.remove(self.wait)

    def renew(self):
        self.world.renewed.append(self.wait)


@pytest.fixture
def world():
    return Watching()


def test_wait_is_watched_from_the_second_look(world):
    waits = JobWaits(world)
    waits.look({"a": Wait(4, "batch 4 of data 1")})
    assert world.now == []
    waits.look({"a": Wait(4, "batch 4 of data 1"), "b": Wait(1, "end of the job")})
    assert world.now == [("a", 4, "batch 4 of data 1")]
    waits.look({"a": Wait(4, "batch 4 of data 1"), "b": Wait(1, "end of the job")})
    assert world.now == [("a", 4, "batch 4 of data 1"), ("b", 1, "end of the job")]
    waits.look({"b": Wait(1, "end of the job")})
    assert world.now == [("b", 1, "end of the job")]
    waits.look({})
    assert world.now == []


def test_another_wait_of_the_same_job_begins_anew(world):
    waits = JobWaits(world)
    for _ in range(2):
        waits.look({"a": Wait(4, "batch 4 of data 1", own=True)})
    assert world.now == [("a", 4, "own batch 4 of data 1")]
    waits.look({"a": Wait(4, "batch 4 of data 1")})
    assert world.now == []
    waits.look({"a": Wait(4, "batch 4 of data 1")})
    assert world.now == [("a", 4, "batch 4 of data 1")]
    waits.look({"a": Wait(5, "batch 5 of data 1")})
    assert world.now == []


def status(*whats, job="a", local=False):
    made = [
        Activity(job=job, step=4, segment=-1, what=what, number=0, since_s=0.0, local=local)
        for what in whats
    ]
    return RankStatus(entered=9, waits=tuple(made))


def test_for_whom_a_wait_is():
    there, none = status("call of the step"), status()
    assert absent("a", "call of the step", {1: there, 2: there}) == {}
    assert absent("a", "call of the step", {1: there, 2: none}) == {
        2: "its job 'a' has not reached that point"
    }
    assert absent("a", "call of the step", {1: status("call of the step", job="b"), 2: there}) == {
        1: "its job 'a' has not reached that point"
    }
    assert absent("a", "batch 4 of data 1", {1: status("batch 5 of data 1"), 2: None}) == {
        1: "it waits for its batch 5 of data 1"
    }


def test_rank_waiting_locally_is_not_blamed():
    """Other ranks don't blame a rank that waits for something local to it."""
    assert absent("a", "batch 4 of data 1", {1: status("batch 4 of data 1", local=True)}) == {}
    assert absent("a", "call of the step", {1: status("evaluation", local=True)}) == {}
    assert absent("a", "call of the step", {1: status("evaluation")}) == {
        1: "it waits for its evaluation"
    }


def test_what_moves_on_stays_watched_and_begins_anew(world):
    """After a restart, a job skips the batches that it has already trained on, which may take long.

    In the meantime, the other ranks see that this rank is waiting for its data. The wait restarts
    with each skipped batch, so that it isn't taken for a stall.
    """
    waits, wait = JobWaits(world), ("a", 4, "own batch 4 of data 1")
    for moved in range(4):
        waits.look({"a": Wait(4, "batch 4 of data 1", own=True, moved=moved)})
        assert world.now == ([wait] if moved else [])
    assert world.renewed == [wait] * 2
    waits.look({"a": Wait(4, "batch 4 of data 1", own=True, moved=3)})
    assert world.renewed == [wait] * 2


def test_rank_that_just_waited_locally_is_not_blamed():
    """The rank runs several evaluations in a row, each shorter than the watchdog's time limit."""
    between = RankStatus(entered=9, waits=(), recent_local=frozenset({"a"}))
    assert absent("a", "call of the step", {1: between}) == {}
    assert absent("b", "call of the step", {1: between}) == {
        1: "its job 'b' has not reached that point"
    }


def test_a_wait_for_all_ranks_says_who_is_missing():
    there, late, busy = (
        status("report", job=""),
        status("vote", job=""),
        status("evaluation", local=True),
    )
    answers, patient = {1: there, 2: late, 3: busy}, partial(missing_ranks, excuse_local=True)
    assert patient("", "report", [1, 2, 3], answers) == {2: "it has not reached that point"}
    assert patient("", "report", [1, 3], answers) == {}
    assert missing_ranks("", "report", [1, 3], answers, excuse_local=False) == {
        3: "it has not reached that point"
    }
    assert patient("", "report", [1], answers) is None
    assert patient("a", "report", [1], answers) == {1: "it has not reached that point"}
    assert patient("", "report", [1], {1: None}) is None  # a silent rank is named as such
