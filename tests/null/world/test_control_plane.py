"""Tests the control plane's agreements, with threads for ranks."""

import threading

import numpy as np
import pytest

from jaxcross.world.control_plane import all_equal, any_rank, gather


class Threads:
    """The control planes of ranks that are threads of this process."""

    def __init__(self, size):
        self.size, self._given, self._barrier = (
            size,
            [None] * size,
            threading.Barrier(size, timeout=20),
        )

    def exchange(self, rank, value):
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class Rank:
    def __init__(self, threads, rank):
        self.rank, self.size, self._threads = rank, threads.size, threads

    def allreduce_min(self, values):
        return np.min(np.stack(self._threads.exchange(self.rank, values)), axis=0)

    def allgather_text(self, text):
        return self._threads.exchange(self.rank, text)


def on_ranks(size, work):
    threads, results = Threads(size), [None] * size

    def run(rank):
        results[rank] = work(Rank(threads, rank))

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_gather_returns_values_by_rank(size):
    found = on_ranks(
        size, lambda control: gather(control, {"rank": control.rank, "pair": (1, None)})
    )
    assert found == [[{"rank": rank, "pair": [1, None]} for rank in range(size)]] * size


@pytest.mark.parametrize(
    ("numbers", "equal"), [((5, 5, 5), True), ((5, 5, 4), False), ((0, 2**62 - 1, 0), False)]
)
def test_all_equal_compares_numbers(numbers, equal):
    assert on_ranks(3, lambda control: all_equal(control, numbers[control.rank])) == [equal] * 3


@pytest.mark.parametrize(
    ("flags", "some"), [(("", "", "text"), True), ((0, None, False), False), ((1, 1, 1), True)]
)
def test_any_rank_finds_a_true_flag(flags, some):
    assert on_ranks(3, lambda control: any_rank(control, flags[control.rank])) == [some] * 3
