"""Which waits of jobs are watched, and for whom they are."""

from contextlib import contextmanager

import pytest

from jaxcross.runtime.job_waits import JobWaits, absent
from jaxcross.world.standing import Activity, Standing


class Watching:
    """A world that notes what is watched now."""

    rank = 0

    def __init__(self):
        self.now = []

    @contextmanager
    def watching(self, *, job, step, segment, what, awaited):
        assert segment == -1 and callable(awaited)
        self.now.append((job, step, what))
        yield
        self.now.remove((job, step, what))


@pytest.fixture
def world():
    return Watching()


def test_a_wait_is_watched_from_the_second_look_to_its_end(world):
    waits = JobWaits(world)
    waits.look({"a": (4, "batch 4 of data 1", 0)})
    assert world.now == []
    waits.look({"a": (4, "batch 4 of data 1", 0), "b": (1, "end of the job", 0)})
    assert world.now == [("a", 4, "batch 4 of data 1")]
    waits.look({"a": (4, "batch 4 of data 1", 0), "b": (1, "end of the job", 0)})
    assert world.now == [("a", 4, "batch 4 of data 1"), ("b", 1, "end of the job")]
    waits.look({"b": (1, "end of the job", 0)})
    assert world.now == [("b", 1, "end of the job")]
    waits.look({})
    assert world.now == []


def test_another_wait_of_the_same_job_begins_anew(world):
    waits = JobWaits(world)
    for _ in range(2):
        waits.look({"a": (4, "own batch 4 of data 1", 0)})
    assert world.now == [("a", 4, "own batch 4 of data 1")]
    waits.look({"a": (4, "batch 4 of data 1", 0)})
    assert world.now == []
    waits.look({"a": (4, "batch 4 of data 1", 0)})
    assert world.now == [("a", 4, "batch 4 of data 1")]
    waits.look({"a": (5, "batch 5 of data 1", 0)})
    assert world.now == []


def standing(*whats, job="a"):
    made = [Activity(job=job, step=4, segment=-1, what=what, number=0, since_s=0.0) for what in whats]
    return Standing(entered=9, waits=tuple(made))


def test_for_whom_a_wait_is():
    there, none = standing("call of the step"), standing()
    assert absent("a", "call of the step", 0, {1: there, 2: there}) == {}
    assert absent("a", "call of the step", 0, {1: there, 2: none}) == {2: "its job 'a' has not come so far"}
    assert absent("a", "call of the step", 0, {1: standing("call of the step", job="b"), 2: there}) == {
        1: "its job 'a' has not come so far"
    }
    assert absent("a", "batch 4 of data 1", 0, {1: standing("batch 5 of data 1"), 2: None}) == {
        1: "it waits for its batch 5 of data 1"
    }


def test_what_is_a_ranks_own_affair_is_its_own_to_report():
    assert absent("a", "own batch 4 of data 1", 0, {1: standing()}) == {0: "own batch 4 of data 1 is its own affair"}
    assert absent("a", "batch 4 of data 1", 0, {1: standing("own batch 4 of data 1")}) == {}
    assert absent("a", "call of the step", 0, {1: standing("own evaluation")}) == {}


def test_what_moves_on_begins_anew(world):
    waits = JobWaits(world)
    for _ in range(2):
        waits.look({"a": (4, "own batch 4 of data 1", 0)})
    assert world.now == [("a", 4, "own batch 4 of data 1")]
    waits.look({"a": (4, "own batch 4 of data 1", 1)})
    assert world.now == []
