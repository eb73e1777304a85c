"""SIGTERM interrupts the main thread once for all that arrive together, and no loader's worker."""

import signal
import subprocess
import sys

START = """
import os, signal
from jaxcross.health.abort import Terminated
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import this_process
from jaxcross.health.signals import SigtermHandler
termination = SigtermHandler(FlightRecorder([this_process()], 0))
"""


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_interrupts_the_main_thread_once():
    assert run(
        "termination.install()\n"
        "try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "except Terminated as error: print(isinstance(error, KeyboardInterrupt))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('again', termination.overdue())"
    ) == "True\nagain False\n"  # fmt: skip


def test_a_process_that_is_forked_ends_by_it_as_ever():
    assert run(
        "termination.install()\n"
        "child = os.fork()\n"
        "if child == 0: signal.pause()\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.WTERMSIG(os.waitpid(child, 0)[1]), termination.overdue(), termination._came_s)\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    ) == f"{int(signal.SIGTERM)} False 0.0\nset()\n"  # fmt: skip


def test_a_handler_of_the_user_stays():
    assert run(
        "signal.signal(signal.SIGTERM, lambda *_: print('mine'))\ntermination.install()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(termination.overdue())"
    ) == "mine\nFalse\n"  # fmt: skip


def test_handled_signal_is_never_taken_for_another():
    """A handled signal isn't mistaken for another one, however late the check comes."""
    assert run(
        "import time\ntermination.install()\n"
        "try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "except Terminated: pass\n"
        "termination._handled_s -= 10\n"
        "print(termination.overdue(), termination._came_s)"
    ) == "False 0.0\n"  # fmt: skip
