"""Tests what the launcher reads from a run's event files if the previous run's are still there."""

import json
import time

import pytest

from jaxcross.commands import restart_loop
from jaxcross.commands.restart_loop import RunFiles, latest_run


def write(folder, run, rank, at_s, *events):
    header = {
        "jaxcross": 1,
        "run": run,
        "rank": rank,
        "size": 2,
        "host": "h",
        "pid": 100 + rank,
        "time": at_s,
        "at": 0,
    }
    lines = [header, *({**event, "at": 0} for event in events)]
    (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


REPORTED = {"exit": "reported", "text": "rank 1 is gone", "lost": [1], "activity": ""}


@pytest.fixture
def files(tmp_path):
    """Returns a run's files in a folder where the previous run has just lost a rank."""
    write(tmp_path, "first", 0, time.time(), REPORTED)
    assert latest_run(tmp_path) == "first"
    return RunFiles(events=tmp_path, earlier=latest_run(tmp_path), hosts=("a", "b"), ranks=2)


def test_folder_without_files_has_no_run(tmp_path):
    assert latest_run(tmp_path) == latest_run(tmp_path / "none") == ""


def test_files_of_the_run_before_say_nothing(files, monkeypatch):
    """Ranks may take a long time to start. Until they have, the previous run's reports must not end
    the new run.
    """
    monkeypatch.setattr(restart_loop, "SPEAK_S", -60.0)
    monkeypatch.setattr(
        restart_loop, "signal_ranks", lambda _, pids, __: pytest.fail(f"{pids}") if pids else None
    )
    assert files.read() == [] and not files.is_stuck() and not files.signal(15)


def test_lost_rank_that_is_long_reported_is_stuck(files):
    write(files.events, "second", 0, time.time(), REPORTED)
    assert not files.is_stuck()
    write(files.events, "second", 0, time.time() - restart_loop.SPEAK_S - 1, REPORTED)
    (files.events / "rank-1.jsonl").unlink(missing_ok=True)
    assert files.is_stuck()


def test_ranks_are_signalled_on_their_hosts(files, monkeypatch):
    sent = []
    monkeypatch.setattr(
        restart_loop, "signal_ranks", lambda number, pids, agent: sent.append((number, pids))
    )
    for rank in (0, 1):
        write(files.events, "second", rank, time.time())
    assert files.signal(15)
    assert sent == [(15, {"a": [100], "b": [101]})]
