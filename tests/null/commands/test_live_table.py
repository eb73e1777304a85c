"""Tests that a process's output appears above the table of `jaxcross launch`, line by line."""

import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from jaxcross.commands import live_table
from jaxcross.commands.live_table import LaunchTable
from jaxcross.report.progress import PROGRESS_FILE, JobProgress, RunProgress


def launched(code, events, *, ranks=2):
    """Returns what the terminal receives while a process runs that prints."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=80)
    with LaunchTable(console, events, ranks) as table:
        line = [sys.executable, "-c", f"import sys\nwrite = sys.stdout.buffer.write\n{code}"]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with process:
            table.follow(process)
            assert process.wait(60) == 0
            for pump in table._pumps:
                pump.join(60)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())  # without control sequences


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('a\\nb', file=sys.stderr)", "a\nb\n"),
        ("print('x' * 100)", "x" * 100 + "\n"),
        ("write('é\\n'.encode()[:1]); sys.stdout.flush(); write('é\\n'.encode()[1:])", "é\n"),
        ("write(b'\\xff no text\\n')", "\ufffd no text\n"),
        ("write(b'1%\\r2%\\rdone\\n')", "done\n"),
        ("write(b'no end of line')", "no end of line\n"),
        ("write(b'[red]a[/red] :smile:\\n')", "[red]a[/red] :smile:\n"),
        ("write(b'a\\n\\nb'); sys.stdout.flush(); write(b'\\n')", "a\n\nb\n"),
    ],
)
def test_lines_of_ranks_pass(tmp_path, code, text):
    assert text in re.sub(
        r"2 ranks start, \d+ s\n?", "", launched(code, tmp_path).replace("\r", "")
    )


def test_the_start_is_shown_before_any_rank(tmp_path):
    assert "2 ranks start, 0 s" in launched("", tmp_path / "none")


def test_ranks_that_joined_are_counted(tmp_path):
    (tmp_path / "rank-0.jsonl").write_text("")
    assert "1 of 4 ranks joined; no job has begun, 0 s" in launched("", tmp_path, ranks=4)


@pytest.mark.parametrize("shown", [True, False])
def test_the_table_of_the_run_is_drawn_unless_it_is_silent(tmp_path, shown):
    header = (
        '{"jaxcross": 1, "run": "h 1 1", "rank": 0, "size": 2, "host": "h", "pid": 1, "time": 9e9, '
        '"at": 0}\n'
    )
    (tmp_path / "rank-0.jsonl").write_text(header)
    jobs = (JobProgress(name="lr-0.1", step=3, steps=9, steps_per_s=2.0),)
    run = RunProgress(run="h 1 1", ranks=2, at_s=9e9, run_s=13.0, jobs=jobs, shown=shown)
    (tmp_path / PROGRESS_FILE).write_text(run.to_json())
    printed = launched("", tmp_path)
    assert ("lr-0.1" in printed) == ("steps/s" in printed) == shown
    assert ("13 s after the start of the run, which did not finish" in printed) == shown


def test_a_run_before_this_launch_is_not_shown(tmp_path):
    run = RunProgress(run="h 1 1", ranks=2, at_s=1e9, run_s=13.0, jobs=(JobProgress(name="old"),))
    (tmp_path / PROGRESS_FILE).write_text(run.to_json())
    assert "old" not in launched("", tmp_path)


def test_nothing_is_drawn_without_a_terminal_or_against_the_users_will(monkeypatch):
    assert live_table.terminal({}) is None  # under pytest
    monkeypatch.setattr(live_table, "_is_terminal", lambda _: True)
    for value in ("0", "30"):
        assert live_table.terminal({"JAXCROSS_PROGRESS": value}) is None


class Window(io.StringIO):
    """A terminal whose window may be closed."""

    encoding = "utf-8"
    is_closed = False

    def isatty(self):
        return True

    def fileno(self):
        return 2

    def write(self, text):
        if self.is_closed:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.integration
def test_a_closed_window_does_not_hold_the_ranks_up(monkeypatch, tmp_path):
    """Output that nobody can read is dropped. Otherwise the pipe would fill up, and a rank would
    block in `print` forever.
    """
    window = Window()
    monkeypatch.setattr(sys, "stderr", window)
    monkeypatch.setattr(live_table, "_is_terminal", lambda stream: stream is window)
    monkeypatch.setenv("TERM", "xterm")
    console = live_table.terminal({})
    assert console is not None
    with LaunchTable(console, tmp_path, 2) as table:
        window.is_closed = True
        line = [sys.executable, "-c", "for n in range(1 << 14): print('a line of a rank', n)"]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
            table.follow(process)
            try:
                assert process.wait(60) == 0
            finally:
                process.kill()
            for pump in table._pumps:
                pump.join(60)
    assert "2 ranks start" in window.getvalue()


@pytest.mark.parametrize("bar", [b"a\n\r1%\r2%", b"[0] 1%\r[1] 2%\r", b"2%"])
def test_latest_update_of_a_progress_bar_is_shown(tmp_path, bar):
    """Whether it begins or, as with `--tag`, ends with a carriage return."""
    shown = []

    class Partial(dict):
        def __setitem__(self, name, text):
            shown.append(text)

    table = LaunchTable(Console(file=io.StringIO()), tmp_path, 2)
    table._partial = Partial()
    read, write = os.pipe()
    os.write(write, bar)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        table._pump("stdout", stream)
    assert shown[0].endswith("2%") and "1%" not in shown[0] and shown[1:] == [""]
