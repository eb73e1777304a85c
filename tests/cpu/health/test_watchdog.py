"""If several ranks are stuck at once, only one reports."""

import random
import re
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from jaxcross.health import activity, watchdog
from jaxcross.health.activity import RankStatus
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import this_process
from jaxcross.health.watchdog import Watchdog


class Comm:
    """Point-to-point messages between threads: as much of a communicator as the watchdog uses."""

    def __init__(self, rank, boxes):
        self.rank, self.boxes, self.kept = rank, boxes, []

    def Ibarrier(self):  # noqa: N802
        return SimpleNamespace(Test=lambda: True)

    def Get_rank(self):  # noqa: N802
        return self.rank

    def Get_size(self):  # noqa: N802
        return len(self.boxes)

    def isend(self, value, dest, tag):
        self.boxes[dest].put((self.rank, tag, value))

    send = isend

    def iprobe(self, source, tag, status):
        while not self.boxes[self.rank].empty():
            self.kept.append(self.boxes[self.rank].get())
        found = next((sender for sender, its_tag, _ in self.kept if its_tag == tag), None)
        if found is not None:
            status.Set_source(found)
        return found is not None

    def improbe(self, source, tag, status):
        if not self.iprobe(source, tag, status):
            return None
        return SimpleNamespace(recv=lambda: self.recv(status.Get_source(), tag))

    def recv(self, source, tag):
        message = next(m for m in self.kept if m[:2] == (source, tag))
        self.kept.remove(message)
        return message[2]


class EndedError(Exception):
    pass


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_reports(ranks, monkeypatch):
    draw = random.Random(ranks)
    for _ in range(6):
        boxes = [SimpleQueue() for _ in range(ranks)]
        dogs = [
            Watchdog(
                Comm(rank, boxes),
                timeout_s=0.05,
                flight=FlightRecorder([this_process()] * ranks, rank),
            )
            for rank in range(ranks)
        ]
        reports, first, over = [], threading.Event(), threading.Event()

        def abort(text, reason, notify, reports=reports, first=first, over=over):
            reports.append(text)
            first.set()
            over.wait(60)
            raise EndedError

        monkeypatch.setattr(watchdog, "abort_everywhere", abort)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)

        def stuck(dog, after_s, over=over):
            threading.Event().wait(after_s)
            # In this order, because a rank that starts to wait forgets who asked before.
            with dog.monitor(job="a", step=0, segment=0, what="psum"):
                dog.start()
                over.wait(60)

        threads = [
            threading.Thread(target=stuck, args=(dog, draw.choice((0, 0, 0.02, 0.04))))
            for dog in dogs
        ]
        for thread in threads:
            thread.start()
        assert first.wait(60)
        over.wait(0.2)  # a rank that holds back does so for ten seconds
        over.set()
        for dog, thread in zip(dogs, threads, strict=True):
            thread.join()
            dog.stop()
        assert len(reports) == 1


@pytest.mark.parametrize(
    ("rank", "other", "asks", "holds_back"),
    [
        (1, None, True, True),  # the other asked at the same moment, and is busy reporting
        (0, None, True, True),
        (0, None, False, False),  # the other rank is lost
        (1, RankStatus(entered=1, waits=(), asking=True), True, True),
        (0, RankStatus(entered=1, waits=(), asking=True), True, False),
        (
            1,
            RankStatus(entered=1, waits=(), asking=False),
            True,
            False,
        ),  # its wait ended before it reported
    ],
)
def test_report_is_left_to_another_rank_that_asks(
    rank, other, asks, holds_back, monkeypatch, clock
):
    """A rank leaves the report to a lower rank that asks, or any that asked and is silent now."""
    monkeypatch.setattr(watchdog, "_HOLD_S", 0)
    monkeypatch.setattr(watchdog, "abort_everywhere", lambda *_: None)
    dog = Watchdog(
        Comm(rank, [SimpleQueue(), SimpleQueue()]),
        timeout_s=0.01,
        flight=FlightRecorder([this_process()] * 2, rank),
    )
    questions = []

    def ask(question, ranks):
        questions.append(question)
        if asks:
            dog._asked.add(1 - rank)
        return {1 - rank: other}

    dog._ask = ask
    with dog.monitor(job="a", step=3, segment=0, what="psum"):
        clock[0] += 0.5
        dog._look_at_waits()
    assert questions.count("status") == 1 + holds_back  # after holding back, it asks again


@pytest.mark.parametrize(
    "awaited", [{}, {0: "its data has not given it"}, {1: "its job has not reached that point"}]
)
def test_a_wait_that_says_for_whom_it_is(awaited, monkeypatch):
    """With no rank to wait for, the wait continues, since its cause is watched elsewhere."""
    boxes = [SimpleQueue() for _ in range(2)]
    dogs = [
        Watchdog(
            Comm(rank, boxes), timeout_s=0.05, flight=FlightRecorder([this_process()] * 2, rank)
        )
        for rank in range(2)
    ]
    asked, reports, over = threading.Semaphore(0), [], threading.Event()

    def awaited_ranks(answers):
        assert set(answers) <= {1}
        if answers:
            asked.release()
        return awaited

    def abort(text, reason, notify):
        reports.append((text, reason.lost))
        over.set()
        raise EndedError

    monkeypatch.setattr(watchdog, "abort_everywhere", abort)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    for dog in dogs:
        dog.start()
    with dogs[0].monitor(
        job="a", step=4, segment=-1, what="batch 4", local=0 in awaited, waiting_for=awaited_ranks
    ):
        assert asked.acquire(timeout=60)
        if awaited:
            assert over.wait(60)
        else:
            assert asked.acquire(timeout=60)  # and again a while later
    for dog in dogs:
        dog.stop()
    assert [lost for _, lost in reports] == ([tuple(awaited)] if awaited else [])
    for rank, why in awaited.items():
        assert (
            f"rank {rank} {'is late itself' if rank == 0 else 'has not arrived'}: {why}"
            in reports[0][0]
        )


@pytest.fixture
def clock(monkeypatch):
    """Replaces the watchdog's clock, in seconds, with one that a test moves."""
    now_s = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_time_while_stopped_does_not_count_as_waiting(clock):
    """Time during which the process was stopped doesn't count as waiting."""
    dog = Watchdog(
        Comm(0, [SimpleQueue(), SimpleQueue()]),
        timeout_s=5,
        flight=FlightRecorder([this_process()] * 2, 0),
    )
    found = []
    dog._investigate = lambda token: found.append(dog._waits[token][0].job)

    def look():
        dog._leave_out_stops()
        dog._look_at_waits()

    with dog.monitor(job="a", step=3, segment=1, what="psum"):
        clock[0] += 100  # a batch system suspends the job for that long
        look()
        for _ in range(15):
            clock[0] += 0.25
            look()
        assert found == []
        for _ in range(2):
            clock[0] += 0.25
            look()
    assert found == ["a"]


@pytest.mark.parametrize("heartbeat", [None, SimpleNamespace(poll=lambda: None, exited=dict)])
def test_wait_blaming_nobody_leaves_rank_to_heartbeats(heartbeat, monkeypatch):
    """An evaluation may hold the GIL for longer than a question waits for an answer."""
    reports = []
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.05)
    monkeypatch.setattr(
        watchdog, "abort_everywhere", lambda text, reason, notify: reports.append(reason.lost)
    )
    dog = Watchdog(
        Comm(0, [SimpleQueue(), SimpleQueue()]),
        timeout_s=0.01,
        flight=FlightRecorder([this_process()] * 2, 0),
    )
    dog._heartbeat = heartbeat
    with dog.monitor(
        job="a", step=3, segment=-1, what="evaluation", local=True, waiting_for=lambda _: {}
    ):
        threading.Event().wait(0.05)
        dog._look_at_waits()
    assert reports == ([] if heartbeat else [(1,)])


def test_time_stopped_while_asking_is_no_wait(clock, monkeypatch):
    """If the process is stopped while it asks, that time doesn't count as waiting."""
    dog = Watchdog(
        Comm(0, [SimpleQueue(), SimpleQueue()]),
        timeout_s=5,
        flight=FlightRecorder([this_process()] * 2, 0),
    )
    turns = iter([100.0])
    dog._stop = SimpleNamespace(
        wait=lambda s: clock.__setitem__(0, clock[0] + next(turns, s)), is_set=lambda: False
    )
    reports = []
    monkeypatch.setattr(
        watchdog, "abort_everywhere", lambda text, reason, notify: reports.append(text)
    )
    with dog.monitor(job="a", step=3, segment=1, what="psum"):
        clock[0] += 0.5
        with dog.monitor(job="b", step=3, segment=1, what="psum"):
            for _ in range(10):
                clock[0] += 0.49
                dog._leave_out_stops()
            clock[0] += 0.49
            dog._look_at_waits()  # a has waited 5.9 s; asks, and is stopped for 100 s meanwhile
    assert len(reports) == 1
    (said,) = re.findall(r"rank 0 has waited (\d+) s in job 'a'", reports[0])
    assert int(said) in range(
        6, 16
    )  # plus 3 s for each of two questions, and the most a stop may count


def test_local_wait_may_be_late_for_one_more_timeout(clock):
    dog = Watchdog(
        Comm(0, [SimpleQueue(), SimpleQueue()]),
        timeout_s=0.2,
        flight=FlightRecorder([this_process()] * 2, 0),
    )
    with dog.monitor(job="a", step=3, segment=-1, what="evaluation", local=True):
        assert (
            dog._status().may_be_late("a")
            and not dog._status().may_be_late("b")
            and dog._status().entered == 0
        )
        ((_, awaited),) = dog._waits.values()
        assert awaited({1: None}) == {0: "its own evaluation takes this long"}
    with dog.monitor(job="b", step=3, segment=1, what="psum"):
        assert dog._status().may_be_late("a") and not dog._status().may_be_late("b")
    clock[0] += 0.25
    assert not dog._status().may_be_late()


def test_a_wait_that_moves_on_begins_anew(clock):
    dog = Watchdog(
        Comm(0, [SimpleQueue(), SimpleQueue()]),
        timeout_s=0.2,
        flight=FlightRecorder([this_process()] * 2, 0),
    )
    watch = dog.monitor(job="a", step=3, segment=-1, what="checkpoint", local=True)
    with watch:
        (token,) = dog._waits
        clock[0] += 0.25
        assert dog._lasts(token)
        watch.renew()
        assert not dog._lasts(token)
    watch.renew()  # the wait has ended, so this is a no-op
