"""Interrupts wait while a run is in progress, wherever its main thread is.

A forked child inherits none of that.
"""

import os
import signal
import subprocess
import sys

import pytest

from jaxcross.health import signals
from jaxcross.health.abort import Terminated
from jaxcross.health.signals import defer_signals


@pytest.fixture
def terminated():
    def handle(number, frame):
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    yield
    signal.signal(signal.SIGTERM, before)


def test_deferred_signals_stay_ordered_then_raise(terminated, monkeypatch):
    """Signals are stored in order; afterwards, they're raised directly again."""
    now_s, asked = [0.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now_s[0])
    with defer_signals() as kept:
        for number in (signal.SIGINT, signal.SIGTERM):
            for after_s in (1.0, 0.1):  # and again right away
                now_s[0] += after_s
                os.kill(os.getpid(), number)
            asked.append(kept.popleft())
            assert not kept
    assert [type(error) for error in asked] == [KeyboardInterrupt, Terminated]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_unclaimed_signal_lets_a_later_one_raise(terminated, monkeypatch):
    """If a stored signal isn't handled, a later one is raised."""
    now_s = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now_s[0])
    with defer_signals() as kept:
        os.kill(os.getpid(), signal.SIGTERM)
        now_s[0] = 0.2
        os.kill(os.getpid(), signal.SIGINT)  # part of the same stop
        now_s[0] = 4.0
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    assert len(kept) == 1


def test_any_handler_that_raises_is_held_back():
    def handle(number, frame):
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with defer_signals() as kept:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert [type(error) for error in kept] == [SystemExit]
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # changed by a job, so it isn't undone
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handler_that_raises_nothing_is_still_called():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        with defer_signals() as kept:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM] and not kept


FORK = """
import os, select, signal
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import this_process
from jaxcross.health.signals import SigtermHandler, defer_signals
SigtermHandler(FlightRecorder([this_process()], 0)).install()
for number in (signal.SIGTERM, signal.SIGINT):
    with defer_signals() as kept:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, b"!")  # a signal that comes while a process forks may be lost
                while True: select.select((), (), (), 0.05)
            except KeyboardInterrupt: os._exit(7)
        os.read(reader, 1)
        os.kill(child, number)
        print(os.waitpid(child, 0)[1], len(kept))
"""


def test_a_forked_child_ends_by_them():
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [f"{int(signal.SIGTERM)} 0", f"{7 << 8} 0"]


SOON = """
import os, signal, threading, jaxcross
world = jaxcross.initialize()
def at_once(job):
    os.kill(os.getpid(), signal.{name})  # the main thread has hardly begun to wait
    while True: job.run_on_all_ranks("turn", lambda _: None)
runner = jaxcross.Runner(world)
job = runner.add("a", at_once)
try: runner.run()
except BaseException as error: print(type(error).__name__, job.status, job.error)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "raised"), [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "SystemExit")]
)
def test_signal_during_run_start_stops_cleanly(name, raised):
    line = [sys.executable, "-c", SOON.format(name=name)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"{raised} stopped None\n", done.stdout + done.stderr
