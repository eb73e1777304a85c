"""An MPI call that doesn't return is found by a thread that makes no MPI calls."""

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from jaxcross.health.timed_comm import TimedComm


class Comm:
    """A communicator whose messages to rank 3 are never delivered."""

    def __init__(self):
        self.over = threading.Event()

    def isend(self, value, dest, tag):
        if dest == 3:
            self.over.wait(60)
        return (value, dest, tag)

    def recv(self, source, tag):
        raise ValueError("torn")


def test_rank_that_does_not_receive_is_reported():
    comm, stuck = Comm(), SimpleQueue()
    guarded = TimedComm(comm, limit_s=0.05, on_stuck=stuck.put)
    guarded.start()
    assert guarded.isend("a", dest=1, tag=7) == ("a", 1, 7)
    thread = threading.Thread(target=guarded.isend, args=("b", 3, 7))
    thread.start()
    assert stuck.get(timeout=60) == 3
    comm.over.set()
    thread.join()
    guarded.stop()
    assert stuck.empty()


def test_calls_that_return_or_raise_are_forgotten():
    guarded = TimedComm(Comm(), limit_s=60, on_stuck=lambda rank: None)
    guarded.isend("a", dest=1, tag=7)
    with pytest.raises(ValueError, match="torn"):
        guarded.recv(source=1, tag=7)
    assert guarded._calls == {}


class EndsMeanwhile(dict):
    """The calls in progress. Call 7 returns just after the turn in which it exceeds the limit."""

    turn = 0

    def copy(self):
        found = dict(self)
        self.turn += 1
        if self.turn == 12:
            del self[7]
        return found


@pytest.mark.parametrize(("calls", "stuck"), [({7: 1}, []), ({7: 1, 8: 3}, [3])])
def test_call_that_returns_at_its_limit_is_not_stuck(calls, stuck):
    """A run must not be aborted for a call that has returned."""
    found, turns = [], iter([False] * 12 + [True])
    guarded = TimedComm(Comm(), limit_s=10, on_stuck=found.append)
    guarded._calls = EndsMeanwhile(calls)
    guarded._stop = SimpleNamespace(wait=lambda seconds: next(turns))
    guarded._watch()
    assert found == stuck
    assert guarded._calls.turn == 12
