"""Tests that the simulator itself detects what it's supposed to detect."""

import pytest

from jaxcross.errors import InternalError
from jaxcross.interleave.policy import RoundRobin
from jaxcross.interleave.simulator import Await, Call, Simulation, Think
from jaxcross.interleave.step_graph import StepGraph

PLAIN = StepGraph(
    kinds=("compute", "collective", "compute"),
    needs=((), (0,), (0, 1)),
    after_commit=frozenset({2}),
)


def loop(steps, seconds=(1.0, 0.0, 0.5)):
    for _ in range(steps):
        yield Call(PLAIN, seconds)


def test_one_job_alone_takes_the_sum_of_its_parts():
    (result,) = Simulation([[loop(4)]], policy=RoundRobin(), exchange_s=lambda *slot: 2.0).run()
    assert result.steps == [4]
    assert result.end_s == pytest.approx(4 * (1.0 + 2.0 + 0.5))
    spans = [(s.kind, s.start_ns / 1e9, s.end_ns / 1e9) for s in result.spans[:3]]
    assert spans == [("compute", 0.0, 1.0), ("collective", 1.0, 3.0), ("compute", 3.0, 3.5)]
    assert [s.number for s in result.spans[:4]] == [1, 1, 1, 2]  # every call is a step


def test_two_jobs_hide_each_others_exchanges():
    (result,) = Simulation(
        [[loop(50), loop(50)]], policy=RoundRobin(), exchange_s=lambda *slot: 1.5
    ).run()
    # Without overlap it would take 300 s.
    assert result.end_s == pytest.approx(50 * 3.0, rel=0.05)


def test_ranks_wait_for_the_slowest():
    fast, slow = Simulation([[loop(3)], [loop(3, (4.0, 0.0, 0.0))]], policy=RoundRobin()).run()
    assert fast.slots == slow.slots
    assert fast.end_s == slow.end_s == pytest.approx(3 * (4.0 + 1.0), abs=0.6)


def test_a_job_awaits_the_end_of_one_job():
    """The end of any other job doesn't wake it."""

    def waits():
        yield Await(2)
        yield Call(PLAIN, (1.0, 0.0, 0.5))

    (result,) = Simulation([[waits(), loop(1), loop(3)]], policy=RoundRobin()).run()
    awaited = max(span.end_ns for span in result.spans if span.job == "2")
    assert min(span.start_ns for span in result.spans if span.job == "0") >= awaited
    assert result.steps == [1, 1, 3]


def test_a_segment_fails_when_its_script_says():
    def fails(when):
        yield Call(PLAIN, (1.0, 0.0, 0.5), {0: when})

    for when, where in (("dispatch", "at dispatch"), ("complete", "on the device")):
        (result,) = Simulation([[fails(when)]], policy=RoundRobin()).run()
        assert result.finished == {0: ("failed", (f"failed\n{where}: failed",))}


def test_a_job_that_never_returns_is_noticed():
    def stuck():
        while True:
            yield Think(1.0)

    with pytest.raises(InternalError, match=r"^ranks \[0, 1\] still run at "):
        Simulation([[stuck()], [loop(1)]], policy=RoundRobin()).run(events=500)


def test_ranks_meeting_in_different_slots_are_detected():
    simulation = Simulation([[loop(2)], [loop(2)]], policy=RoundRobin())
    simulation._ranks[1].interleaver.shared.commit = 0  # as if only this rank had made an exchange
    with pytest.raises((InternalError, AssertionError)):
        simulation.run()
