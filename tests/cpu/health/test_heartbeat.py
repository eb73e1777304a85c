"""Which rank is silent, whose process is gone, and how it's reported.

Ranks are threads, or processes that do nothing.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.health import heartbeat
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.heartbeat import BeatTimer, Heartbeat, LostPeer, neighbours
from jaxcross.health.process import ProcessId, process_state, this_process


@given(st.integers(2, 100).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size))))
def test_the_ring(rank_and_size):
    rank, size = rank_and_size
    around = neighbours(rank, size)
    assert rank not in around and len(around) == min(2, size - 1)
    assert all(rank in neighbours(other, size) for other in around)


def test_silence_is_counted_by_ticks():
    timer = BeatTimer([1, 3], heartbeat_timeout_s=3, tick_s=2)
    assert timer.tick(1) == timer.tick(1) == timer.tick(1) == []
    timer.on_beat(3, "in vote")
    assert timer.tick(1) == [1]
    assert (timer.seconds, timer.activities) == ({1: 4, 3: 1}, {1: "", 3: "in vote"})


def test_who_was_asleep_itself_blames_nobody():
    timer = BeatTimer([1], heartbeat_timeout_s=30, tick_s=2)
    assert timer.tick(3600) == []
    assert timer.seconds == {1: 2}


def test_who_has_left_beats_on():
    timer = BeatTimer([1], heartbeat_timeout_s=3, tick_s=2)
    timer.on_exit(1, 7)
    assert timer.exited == {1: 7}
    assert timer.tick(2) == []
    timer.on_beat(1, "outside of any step")
    assert timer.tick(2) == []
    assert timer.tick(2) == [1]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("gone", (
            "rank 2 is gone: its process 7 on host `h` ended without a word (killed, crashed, out "
            "of memory)."
        )),
        ("stopped", (
            "rank 2 is silent for 31 s: its process 7 on host `h` is stopped (by SIGSTOP or a "
            "debugger)."
        )),
        ("running", (
            "rank 2 is silent for 31 s: its process 7 on host `h` is running, but its "
            "interpreter is blocked"
        )),
        ("unknown", (
            "rank 2 is silent for 31 s: its process 7 on host `h`, that host, or the link to it "
            "does"
        )),
    ],
)  # fmt: skip
def test_what_is_said(found, text):
    place = ProcessId(host="h", machine="m", pid=7, started=1)
    said = str(LostPeer(rank=2, process=place, found=found, since_beat_s=31, activity="in vote"))
    assert said.startswith(text)
    assert "Its last heartbeat was 31 s ago, in vote." in said
    assert ("initialize(heartbeat_timeout_s=...)" in said) == (found != "gone")


@pytest.fixture
def child():
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"], stdout=-1
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def place_of(process):
    own = this_process()
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ProcessId(host=own.host, machine=own.machine, pid=process.pid, started=started)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_the_kernel_says(child):
    own, other = this_process(), place_of(child)
    assert process_state(own, own) == process_state(other, own) == "running"
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert process_state(other, own) == "stopped"
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(other, own) == "gone", "dead, though nobody has asked for its exit code"
    child.wait()
    assert process_state(other, own) == "gone"


def test_what_cannot_be_known():
    own = this_process()
    reused = ProcessId(host=own.host, machine=own.machine, pid=own.pid, started=own.started + 1)
    assert process_state(reused, own) == "gone"
    for elsewhere in (
        {"host": "other"},
        {"machine": "another container"},
        {"machine": ""},
        {"started": -1},
    ):
        facts = {
            "host": own.host,
            "machine": own.machine,
            "pid": own.pid,
            "started": own.started,
        } | elsewhere
        assert process_state(ProcessId(**facts), own) == "unknown"


class Comm:
    """As much of a communicator as heartbeats need, between objects in one thread."""

    def __init__(self, rank, boxes):
        self.rank, self.boxes, self.kept, self.arrives = rank, boxes, [], True

    def Get_rank(self):  # noqa: N802
        return self.rank

    def isend(self, value, dest, tag):
        if self.arrives:
            self.boxes[dest].put((self.rank, value))
        return self

    def test(self, request):
        return self.arrives

    def iprobe(self, source, tag, status):
        while not self.boxes[self.rank].empty():
            self.kept.append(self.boxes[self.rank].get())
        if self.kept:
            status.Set_source(self.kept[0][0])
        return bool(self.kept)

    def recv(self, source, tag):
        return self.kept.pop(0)[1]


@pytest.fixture
def ring(monkeypatch):
    """Returns a factory of heartbeats on a fake clock, one per given process."""

    def make(places, heartbeat_timeout_s=10.0):
        now = [0.0]
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
        boxes = [SimpleQueue() for _ in places]
        comms = [Comm(rank, boxes) for rank in range(len(places))]
        beats = [
            Heartbeat(
                comm,
                heartbeat_timeout_s=heartbeat_timeout_s,
                flight=FlightRecorder(places, comm.rank),
                processes=places,
            )
            for comm in comms
        ]

        def turn(*ranks):
            now[0] += 1.0
            return {rank: loss for rank in ranks if (loss := beats[rank].poll()) is not None}

        return comms, beats, turn

    return make


def test_silent_rank_is_found_by_both_neighbours(ring):
    _, _, turn = ring([ProcessId(host=f"h{n}", machine="m", pid=n, started=1) for n in range(4)])
    for _ in range(30):
        assert turn(0, 1, 2, 3) == {}
    found = [turn(0, 1, 3) for _ in range(12)]
    assert found[:9] == [{}] * 9
    losses = [loss for turns in found for loss in turns.values()]
    assert {(loss.rank, loss.found, loss.activity) for loss in losses} == {
        (2, "unknown", "outside of any step")
    }
    assert {rank for turns in found for rank in turns} == {1, 3}


def test_dead_process_is_found_at_the_second_check(ring):
    own = this_process()
    dead = ProcessId(host=own.host, machine=own.machine, pid=own.pid, started=own.started + 1)
    _, _, turn = ring([own, dead])
    assert turn(0) == {}
    assert turn(0)[0].found == "gone"


def test_a_rank_says_good_bye_and_beats_on(ring):
    _, beats, turn = ring(
        [ProcessId(host=f"h{n}", machine="m", pid=n, started=1) for n in range(2)]
    )
    beats[1].announce_exit(5)
    assert turn(0) == {}
    assert beats[0].exited() == {1: 5}
    for _ in range(20):
        assert turn(0, 1) == {}
    assert any(turn(0) for _ in range(12))


def test_heartbeats_do_not_pile_up_for_a_stuck_rank(ring):
    comms, _, turn = ring(
        [ProcessId(host=f"h{n}", machine="m", pid=n, started=1) for n in range(3)]
    )
    comms[0].arrives = False
    sent = []
    comms[0].isend = lambda value, dest, tag: sent.append(dest) or comms[0]
    for _ in range(5):
        turn(0)
    assert sent == [1, 2]
