"""Which waits of jobs are watched, and for whom they are."""

from functools import partial

import pytest

from jaxcross.health.activity import Activity, RankStatus, missing
from jaxcross.interleave.local_state import Wait
from jaxcross.runtime.stall_watch import JobWaits, absent


class Watching:
    """A world that notes what is watched now, and what was renewed."""

    rank = 0

    def __init__(self):
        self.now, self.renewed = [], []

    def watching(self, *, job, step, segment, what, awaited, own):
        assert segment == -1 and own == (awaited is None)
        return Watch(self, (job, step, f"own {what}" if own else what))


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


def test_a_wait_is_watched_from_the_second_look_to_its_end(world):
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


def standing(*whats, job="a", own=False):
    made = [Activity(job=job, step=4, segment=-1, what=what, number=0, since_s=0.0, own=own) for what in whats]
    return RankStatus(entered=9, waits=tuple(made))


def test_for_whom_a_wait_is():
    there, none = standing("call of the step"), standing()
    assert absent("a", "call of the step", {1: there, 2: there}) == {}
    assert absent("a", "call of the step", {1: there, 2: none}) == {2: "its job 'a' has not come so far"}
    assert absent("a", "call of the step", {1: standing("call of the step", job="b"), 2: there}) == {
        1: "its job 'a' has not come so far"
    }
    assert absent("a", "batch 4 of data 1", {1: standing("batch 5 of data 1"), 2: None}) == {
        1: "it waits for its batch 5 of data 1"
    }


def test_who_waits_for_what_is_its_own_affair_is_not_blamed_by_others():
    assert absent("a", "batch 4 of data 1", {1: standing("batch 4 of data 1", own=True)}) == {}
    assert absent("a", "call of the step", {1: standing("evaluation", own=True)}) == {}
    assert absent("a", "call of the step", {1: standing("evaluation")}) == {1: "it waits for its evaluation"}


def test_what_moves_on_stays_watched_and_begins_anew(world):
    """A restart drops batch after batch: the others see all the while that this rank waits for its data."""
    waits, wait = JobWaits(world), ("a", 4, "own batch 4 of data 1")
    for moved in range(4):
        waits.look({"a": Wait(4, "batch 4 of data 1", own=True, moved=moved)})
        assert world.now == ([wait] if moved else [])
    assert world.renewed == [wait] * 2
    waits.look({"a": Wait(4, "batch 4 of data 1", own=True, moved=3)})
    assert world.renewed == [wait] * 2


def test_who_waited_for_what_is_its_own_affair_a_short_while_ago_is_not_blamed_either():
    """Evaluations one after the other, each shorter than the watchdog's time."""
    between = RankStatus(entered=9, waits=(), lately=frozenset({"a"}))
    assert absent("a", "call of the step", {1: between}) == {}
    assert absent("b", "call of the step", {1: between}) == {1: "its job 'b' has not come so far"}


def test_a_wait_for_all_ranks_says_who_is_missing():
    there, late, busy = standing("report", job=""), standing("vote", job=""), standing("evaluation", own=True)
    answers, patient = {1: there, 2: late, 3: busy}, partial(missing, patient=True)
    assert patient("", "report", [1, 2, 3], answers) == {2: "it has not come so far"}
    assert patient("", "report", [1, 3], answers) == {}
    assert missing("", "report", [1, 3], answers, patient=False) == {3: "it has not come so far"}
    assert patient("", "report", [1], answers) is None
    assert patient("a", "report", [1], answers) == {1: "it has not come so far"}
    assert patient("", "report", [1], {1: None}) is None  # who does not answer is named as such
