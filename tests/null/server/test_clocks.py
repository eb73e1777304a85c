"""Tests the stale-synchronous rule: which workers may continue, whatever the order of events."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.server.clocks import Clocks


def test_with_staleness_0_all_workers_advance_together():
    clocks = Clocks(3, 0)
    for rank in (2, 0):
        clocks.push(rank)
        assert clocks.release() == []
    assert clocks.behind(2) == [1]
    clocks.push(1)
    assert clocks.release() == [0, 1, 2]
    assert clocks.now == (1, 1, 1)


def test_worker_waits_for_the_slowest_beyond_the_bound():
    """Within the bound, it doesn't wait."""
    clocks = Clocks(2, 2)
    for _ in range(2):
        clocks.push(0)
        assert clocks.release() == [0]
    clocks.push(0)
    assert clocks.release() == []
    assert clocks.behind(0) == [1]
    clocks.push(1)
    assert clocks.release() == [0, 1]


def test_without_a_bound_nobody_waits_but_at_the_end():
    clocks = Clocks(2, math.inf)
    for _ in range(9):
        clocks.push(0)
        assert clocks.release() == [0]
    clocks.finish(0)
    assert clocks.release() == []
    assert clocks.behind(0) == [1]
    clocks.finish(1)
    assert clocks.release() == [0, 1]


def test_nobody_waits_for_a_worker_that_has_finished():
    clocks = Clocks(2, 0)
    clocks.push(0)
    clocks.finish(1)
    assert clocks.release() == [0]


@pytest.mark.parametrize("staleness", [0, 1, 3, math.inf])
@given(
    choices=st.lists(st.integers(0, 3), max_size=60),
    lengths=st.lists(st.integers(0, 6), min_size=4, max_size=4),
)
def test_the_bound_holds_and_everybody_ends(staleness, choices, lengths):
    clocks, able, left, ended = Clocks(4, staleness), {0, 1, 2, 3}, list(lengths), set()
    for choice in [*choices, *[0] * 60]:
        if not able:
            break
        rank = sorted(able)[choice % len(able)]
        able.discard(rank)
        if left[rank]:
            left[rank] -= 1
            clocks.push(rank)
        else:
            clocks.finish(rank)
            ended.add(rank)
        at_work = [clock for clock in clocks.now if clock < math.inf]
        assert not at_work or max(at_work) - min(at_work) <= staleness + 1
        able.update(free := clocks.release())
        if ended & set(free):
            assert free == [0, 1, 2, 3] and ended == {0, 1, 2, 3}
            return
        able -= ended
    raise AssertionError(f"nobody can go on at {clocks.now}")
