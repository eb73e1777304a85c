"""Collective calls: if a rank fails or communicates less often, all ranks raise, none waits."""

import numpy as np
import pytest

from jaxcross.errors import JobError
from jaxcross.runtime.collective_call import run_collectively
from tests.support.fakes import run_ranks


def outcomes(ranks, work):
    """Returns the outcome of each rank's `work(control, rank)`."""

    def rank_work(world):
        try:
            return run_collectively(lambda control: work(control, world.rank), world.control)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            # All ranks are at the same point again: otherwise this would hang, or mix up texts.
            assert world.control.allgather_text(str(world.rank)) == [str(n) for n in range(ranks)]

    return run_ranks(ranks, rank_work)


def talks(control, times=1):
    return [control.allgather_text(str(n))[-1] for n in range(times)]


def test_ranks_talk_as_often_as_they_like():
    def work(control, rank):
        low = control.allreduce_min(np.array([rank, -rank]))
        return [*talks(control, 3), *map(int, low)]

    assert outcomes(3, work) == [["0", "1", "2", 0, -2]] * 3


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_failure_of_one_rank_is_one_of_all(after):
    def work(control, rank):
        talks(control, after)
        if rank == 1:
            raise ZeroDivisionError("here")
        talks(control, 2)

    first, second, third = outcomes(3, work)
    assert second == "ZeroDivisionError: here"
    assert first == third
    assert first.startswith("JobError: A function that all ranks run together fails on all of them")
    assert first.endswith("because rank 1 failed: ZeroDivisionError: here")


def test_failure_raises_on_ranks_that_are_done():
    def work(control, rank):
        if rank == 1:
            raise OSError("disk")
        return "done"

    assert "rank 1 failed: OSError: disk" in outcomes(2, work)[0]


def test_failures_of_all_ranks_are_their_own():
    def work(control, rank):
        raise ValueError(rank)

    assert outcomes(3, work) == ["ValueError: 0", "ValueError: 1", "ValueError: 2"]


def test_ranks_that_communicate_unequally_often_raise():
    first, second = outcomes(2, lambda control, rank: talks(control, 1 + rank))
    assert "rank 0 has returned" in first and "rank 1 calls `allgather_text`" in second


def test_ranks_that_communicate_differently_raise():
    first, second = outcomes(2, lambda control, rank: control.allreduce_min(np.zeros(1 + rank)))
    assert "rank 0 calls `allreduce_min` with 1 values" in first
    assert "rank 1 calls `allreduce_min` with 2 values" in second


@pytest.mark.parametrize(
    "says", [lambda c: c.allreduce_min(np.array("x")), lambda c: c.allgather_text(3)]
)
def test_what_cannot_be_said_is_a_failure(says):
    first, second = outcomes(2, lambda control, rank: says(control) if rank else talks(control, 2))
    assert "rank 1 failed: " in first and second.split(":")[0] in ("ValueError", "TypeError")


def test_work_that_catches_a_peer_failure_cannot_continue():
    """Work that catches another rank's error can't continue."""

    def work(control, rank):
        if rank == 1:
            raise ValueError("no")
        for _ in range(3):
            with pytest.raises(JobError):
                talks(control)
        return "all is well"

    first, second = outcomes(2, work)
    assert "rank 1 failed: ValueError: no" in first and second == "ValueError: no"
