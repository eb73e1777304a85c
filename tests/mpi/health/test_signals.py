"""A signal to one rank, or to the launcher, ends all ranks with the signal's exit code."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import faults

from jaxcross.report.event_files import read_event_files
from tests.support.fault_scripts import HURT, START, WAIT


@pytest.fixture
def mpirun(mpirun):
    """Starts real processes, because these tests are about starts, exits and signals."""
    return partial(mpirun, warm=False)


pytestmark = pytest.mark.integration


def test_stop_outside_a_run_ends_all_with_its_code(mpirun):
    code = START.format("") + HURT.format("TERM") + WAIT
    done = mpirun(2, code)
    assert "jaxcross: rank 1 received SIGTERM; all 2 ranks end." in done.stderr
    assert "because rank 1 received SIGTERM" in done.stderr
    assert done.returncode == 143


@pytest.mark.exhaustive
def test_stop_reaches_a_rank_blocked_in_c(mpirun):
    """The rank's main thread never returns from C."""
    code = START.format("") + (
        "if world.rank == 1:\n    import ctypes\n    mutex = (ctypes.c_char * 64)()\n"
        "    lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n    "
        "lock(mutex), lock(mutex)\n" + WAIT
    )
    done = mpirun(2, code)
    assert "while its main thread was busy in C" in done.stderr
    assert done.returncode == 143


WARNED = """
import os, signal, sys, time, jaxcross
world = jaxcross.initialize()
from jax import lax

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
step = jaxcross.crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def work(job):
    w = job.restore(0.0)
    while True:
        w = step(w, 1.0)
        if job.step == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGUSR1)  # by way of the launcher, too

runner = jaxcross.Runner(world)
job = runner.add("a", work)
try:
    runner.run()
except BaseException as error:
    what = f"{type(error).__name__} {error} after step {job.step}, {job.status}"
    print(f"rank {world.rank}: {what}", flush=True)
    steps = set(world.control.allgather_text(str(job.step)))
    print("steps agree" if len(steps) == 1 and job.step >= 3 else f"steps {steps}", flush=True)
"""


def test_other_signals_handler_stops_all_then_raises(mpirun):
    """The handler's exception is raised after all ranks have stopped."""
    done = mpirun(2, WARNED).check()
    assert "rank 1: SystemExit 7 after step " in done.stdout
    assert "rank 0: KeyboardInterrupt  after step " in done.stdout
    assert done.stdout.count("steps agree") == 2


@pytest.mark.parametrize(
    ("number", "words", "code"), [("SIGTERM", "terminated", 143), ("SIGINT", "interrupted", 130)]
)
def test_launcher_forwards_a_stop_and_cleans_up(tmp_path, number, words, code):
    """Only the launcher gets the signal. It forwards the signal and leaves nothing behind."""
    source = (
        "import time, jaxcross\nworld = jaxcross.initialize()\n"
        "def wait(job):\n    job.run_on_all_ranks('all', lambda _: None)\n    print('running', "
        "flush=True)\n    try:\n"
        "        while not job.run_on_all_ranks('turn', lambda _: None): pass\n"
        "    finally:\n        time.sleep(2)\n        print('saved', flush=True)\n"
        "runner = jaxcross.Runner(world)\nrunner.add('a', wait)\nrunner.run()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(source)
    line = [
        sys.executable,
        "-m",
        "jaxcross.cli",
        "launch",
        "-n",
        "2",
        "--events",
        str(tmp_path / "events"),
        str(script),
    ]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        while "running" not in process.stdout.readline():  # two ranks' output, perhaps on one line
            assert process.poll() is None
        process.send_signal(getattr(signal, number))
        output = process.stdout.read()
        assert process.wait(60) == code, output
    said = output.replace("Nothing was saved", "")  # two ranks' output may be on one line
    assert said.count("saved") == 2, "Open MPI's own patience ends after a second"
    assert "post-mortem" not in output
    records = read_event_files(tmp_path / "events")
    assert [record.exit_kind for record in records] == [words] * 2
    assert not any(faults.lives(record.pid) for record in records)
