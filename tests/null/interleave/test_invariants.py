"""Tests each rule of the compute lane: a state that breaks one rule is refused with that rule's
text.
"""

from collections import deque

import pytest

from jaxcross.errors import InternalError
from jaxcross.interleave.compute_queue import ComputeQueue
from jaxcross.interleave.interleaver import check_lanes
from jaxcross.interleave.local_state import LocalCall, LocalJob
from jaxcross.interleave.policy import RoundRobin
from jaxcross.interleave.shared_order import SharedState
from jaxcross.interleave.step_graph import StepGraph

GRAPH = StepGraph(
    kinds=("compute", "collective", "compute"),
    needs=((), (0,), (1,)),
    after_commit=frozenset({2}),
    nbytes=(0, 8, 0),
)


class State:
    """The state of two jobs: the first segment of job 0 fills the lane, job 1 isn't in a step."""

    def __init__(self):
        self.shared = SharedState(2, RoundRobin())
        self.compute = ComputeQueue(2, RoundRobin(), depth=1)
        self.call = LocalCall(1, GRAPH)
        self.jobs = {0: LocalJob(call=self.call, is_waiting=True), 1: LocalJob()}
        self.call.issue(0)
        self.call.dispatched.add(0)
        self.compute.on_device.add((0, 1, 0))

    def check(self):
        check_lanes(self.compute, self.jobs, self.shared)


def two_on_the_lane(state):
    state.compute.on_device.add((1, 1, 0))


def a_job_less(state):
    del state.jobs[1]


def one_row_for_both(state):
    state.shared.jobs[1].row = 0


def exchanges_of_no_step(state):
    state.shared.jobs[0].remaining = deque([1])


def exchanges_of_no_call(state):
    state.shared.jobs[1].remaining = deque([1])


def a_thread_that_runs(state):
    state.jobs[0].is_waiting = False


def dispatched_too_early(state):
    state.call.dispatched.add(2)


def issued_and_ready(state):
    state.call._ready_before.append(0)


def too_early_for_the_others(state):
    state.shared.start_together()


def too_early_for_the_commit(state):
    state.call.exchanged.add(1)
    state.call.issued.add(2)


def too_early_for_its_needs(state):
    state.call.committed = True
    state.call.issued.add(2)


def an_idle_lane(state):
    state.compute.on_device.clear()
    state.jobs[1] = LocalJob(call=LocalCall(1, GRAPH), is_waiting=True)


@pytest.mark.parametrize(
    ("breaks", "rule"),
    [
        (two_on_the_lane, "2 segments are on the compute lane, whose depth is 1"),
        (a_job_less, r"the jobs are \[0\] here, but \[0, 1\] on all ranks"),
        (one_row_for_both, r"the jobs' rows \[0, 0\] must be different, and at most 2 rows"),
        (exchanges_of_no_step, "job 0 has exchanges left, but no admitted step"),
        (exchanges_of_no_call, "job 1 has exchanges left, but no admitted step"),
        (a_thread_that_runs, "job 0 has a call, but its thread is not waiting"),
        (dispatched_too_early, r"job 0: segments \{.*\} were dispatched, but never issued"),
        (issued_and_ready, "job 0: segment . is both issued and ready"),
        (too_early_for_the_others, r"job 0: segments \{0\} ran before the joint start"),
        (too_early_for_the_commit, r"job 0: segments \{2\} ran before the commit"),
        (too_early_for_its_needs, r"job 0: segment 2 ran before all of \(.*\), which it needs"),
        (an_idle_lane, "job 1 has a ready segment, although the compute lane is not full"),
    ],
)
def test_a_broken_rule_is_named(breaks, rule):
    state = State()
    state.check()
    breaks(state)
    with pytest.raises(InternalError, match=f"^interleaver: {rule}. This is a bug in jaxcross"):
        state.check()


def test_needs_of_a_failed_job_do_not_count():
    state = State()
    too_early_for_its_needs(state)
    state.jobs[0].fail("on this rank")
    state.check()
