"""Of several ranks that are stuck at once, one reports."""

import random
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from jaxcross.world import watchdog
from jaxcross.world.flight import FlightRecorder
from jaxcross.world.peers import here
from jaxcross.world.watchdog import Watchdog


class Comm:
    """Point-to-point messages between threads, as much of a communicator as the watchdog uses."""

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
            Watchdog(Comm(rank, boxes), timeout_s=0.05, flight=FlightRecorder([here()] * ranks, rank))
            for rank in range(ranks)
        ]
        reports, first, over = [], threading.Event(), threading.Event()

        def abort(text, ending, reports=reports, first=first, over=over):
            reports.append(text)
            first.set()
            over.wait(5)
            raise EndedError

        monkeypatch.setattr(watchdog, "abort_everywhere", abort)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)

        def stuck(dog, after_s, over=over):
            threading.Event().wait(after_s)
            dog.start()
            with dog.watching(job="a", step=0, segment=0, what="psum"):
                over.wait(5)

        threads = [threading.Thread(target=stuck, args=(dog, draw.choice((0, 0, 0.02, 0.04)))) for dog in dogs]
        for thread in threads:
            thread.start()
        assert first.wait(5)
        over.wait(0.2)  # who holds back does so for ten seconds
        over.set()
        for dog, thread in zip(dogs, threads, strict=True):
            thread.join()
            dog.stop()
        assert len(reports) == 1
