"""Progress of real ranks: under `mpirun`, in the table of `jaxcross launch`, in `jaxcross top`."""

import os
import pty
import re
import select
import subprocess
import sys

import pytest

START = """
import itertools, os, sys, threading, jaxcross
world = jaxcross.initialize()
from jax import lax

step = jaxcross.crossover(lambda w, x: (w + lax.pmean(x, "batch"), {"loss": x}), axes="batch")
pause = threading.Event()

def until(over):
    # The loop of all ranks ends with rank 0's data.
    for n in itertools.count():
        if world.rank == 0 and (over() or n == 2000):
            return
        pause.wait(0.02)
        yield 1.0
"""

LINES = (
    START
    + """
class Log:
    def __init__(self):
        self.text = ""
    def write(self, text):
        self.text += text
    def flush(self):
        pass

log = sys.stderr = Log()
for progress in (0.1, False):
    log.text = ""
    os.environ["JAXCROSS_PROGRESS"] = ""
    folder = sys.argv[1] + str(progress)
    def over():
        try:
            file = open(folder + "/progress.json").read()
        except OSError:
            return False
        return '"step": 2' in file and (not progress or "step 2" in log.text)
    jobs = [jaxcross.Job(name, step, 0.0, until(over)) for name in "ab"]
    jaxcross.run(jobs, progress=progress, events=folder)
    lines = [line for line in log.text.splitlines() if "jaxcross" in line]
    print("rank", world.rank, progress, lines[-2:], flush=True)
"""
)


@pytest.mark.integration
def test_rank_0_prints_lines_unless_it_is_to_be_silent(mpirun, tmp_path):
    done = mpirun(2, LINES, str(tmp_path / "events-")).check()
    line = r"'\[jaxcross \d+ s\] {}: step \d+, .*ended'"
    assert re.search(rf"rank 0 0\.1 \[{line.format('a')}, {line.format('b')}\]", done.stdout), (
        done.stdout
    )
    for silent in ("rank 1 0.1 []", "rank 0 False []", "rank 1 False []"):
        assert silent in done.stdout


LAUNCHED = (
    START
    + """
batches = until(lambda: os.path.exists(sys.argv[1]))
jaxcross.run([jaxcross.Job("lr-0.1", step, 0.0, batches)], progress=PROGRESS)
if world.rank == 0:
    print("the script's own line")
"""
)


class Terminal:
    """`jaxcross launch` on its own terminal. `text` is its output so far, without colours."""

    def __init__(self, tmp_path, progress, *arguments):
        script, self.stop = tmp_path / "train.py", tmp_path / "stop"
        script.write_text(LAUNCHED.replace("PROGRESS", progress))
        self.left = tmp_path / "left"
        self.left.mkdir()
        self._here, there = pty.openpty()
        environ = {
            **os.environ,
            "JAXCROSS_PROGRESS": "",
            "TERM": "xterm",
            "TMPDIR": str(self.left),
            "COLUMNS": "120",
        }
        line = [
            sys.executable,
            "-m",
            "jaxcross.cli",
            "launch",
            "-n",
            "2",
            *arguments,
            str(script),
            str(self.stop),
        ]
        self.process = subprocess.Popen(
            line, env=environ, stdin=subprocess.DEVNULL, stdout=there, stderr=there
        )
        os.close(there)
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        os.close(self._here)

    def read(self, until=None):
        """Reads until a text appears, or to the end."""
        while until is None or until not in self.text:
            assert select.select([self._here], [], [], 120)[0], (
                f"nothing comes any more: {self.text}"
            )
            try:
                part = os.read(self._here, 65536)
            except OSError:  # the other side has closed the terminal
                part = b""
            if not part:
                assert until is None, self.text
                break
            self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part.decode())
        return self.text

    def end(self):
        self.stop.touch()
        self.read()
        return self.process.wait(60)


def top(folder):
    line = [sys.executable, "-m", "jaxcross.cli", "top", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.integration
def test_launch_draws_a_table_that_top_shows_elsewhere(tmp_path):
    events = tmp_path / "events"
    with Terminal(tmp_path, "None", "--events", str(events)) as terminal:
        terminal.read("steps/s")
        title, _, row = top(events)
        assert title.startswith("2 ranks, ") and "ended" not in title and row.startswith("lr-0.1")
        assert terminal.end() == 0
    assert "2 ranks start, " in terminal.text and "the script's own line" in terminal.text
    assert "[jaxcross " not in terminal.text, "rank 0 prints no lines in addition to the table"
    title, _, row = top(events)
    assert "the run ended after" in title and title.strip().endswith("the processes have ended")
    assert row.split()[-1] == "ended"


@pytest.mark.integration
@pytest.mark.parametrize("progress", ["None", "False"])
def test_launch_leaves_nothing_behind(tmp_path, progress):
    with Terminal(tmp_path, progress) as terminal:
        if progress == "None":
            terminal.read("steps/s")
        assert terminal.end() == 0
    assert ("steps/s" in terminal.text) == (progress == "None")
    assert "the script's own line" in terminal.text
    assert not list(terminal.left.glob("jaxcross*"))
