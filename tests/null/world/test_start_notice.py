"""Tests a log's lines before any job begins: that the ranks are starting, and that they joined."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from jaxcross.commands import live_table
from jaxcross.health.activity import Activity
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import this_process
from jaxcross.world import start_notice
from jaxcross.world.start_notice import StartNotice, no_progress_wanted


@pytest.mark.parametrize(
    ("value", "silent"), [("", False), ("0", True), ("0.0", True), ("5", False), ("x", False)]
)
def test_zero_seconds_silence_the_start(value, silent):
    assert no_progress_wanted({"JAXCROSS_PROGRESS": value}) == silent
    assert not no_progress_wanted({})


def test_a_notice_comes_ever_more_rarely_until_work_begins(capsys, monkeypatch):
    waits = []

    class Begun:
        def wait(self, seconds):
            waits.append(round(seconds))
            return len(waits) == 4

    monkeypatch.setattr(start_notice, "time", SimpleNamespace(monotonic=lambda: float(sum(waits))))
    StartNotice(2, Begun())._watch()
    assert waits == [5, 5, 10, 20]
    assert capsys.readouterr().err.splitlines() == [
        f"[jaxcross] 2 ranks have joined; no job has begun, {seconds} s" for seconds in (5, 10, 20)
    ]


def test_one_rank_is_no_plural(capsys, monkeypatch):
    StartNotice(1, threading.Event()).notify(5.0)
    assert capsys.readouterr().err == "[jaxcross] 1 rank has joined; no job has begun, 5 s\n"
    monkeypatch.setattr("sys.stderr", None)
    StartNotice(1, threading.Event()).notify(5.0)


def test_a_jobs_first_activity_is_work_a_vote_is_none():
    flight = FlightRecorder([this_process()], 0)
    flight.begin(Activity.now("vote", number=1))
    assert not flight.work_begun.is_set()
    flight.begin(Activity.now("compile", job="a"))
    assert flight.work_begun.is_set()


class Turns:
    """An event that is set after this many waits."""

    def __init__(self, turns):
        self._left = turns

    def wait(self, _):
        self._left -= 1
        return self._left < 0

    def set(self):
        pass


def lines_of_a_launch(capsys, monkeypatch, events, *, environ=None):
    """Returns what `jaxcross launch` logs in two turns before its ranks have joined."""
    threads = set(threading.enumerate())
    monkeypatch.setattr(
        live_table, "threading", SimpleNamespace(Event=lambda: Turns(2), Thread=threading.Thread)
    )
    with live_table.start_lines(events, 2, environ or {}):
        for thread in set(threading.enumerate()) - threads:
            thread.join()
    return capsys.readouterr().err.splitlines()


def test_log_shows_that_ranks_start(capsys, monkeypatch, tmp_path):
    assert lines_of_a_launch(capsys, monkeypatch, tmp_path) == [
        "[jaxcross] 2 ranks start, 5 s",
        "[jaxcross] 2 ranks start, 10 s",
    ]


@pytest.mark.parametrize(("age_s", "lines"), [(0, 0), (60, 2)])
def test_ranks_that_have_joined_start_no_more(capsys, monkeypatch, tmp_path, age_s, lines):
    """Files of an earlier run in the same folder don't count."""
    file = tmp_path / "rank-0.jsonl"
    file.touch()
    os.utime(file, (time.time() - age_s,) * 2)
    assert len(lines_of_a_launch(capsys, monkeypatch, tmp_path)) == lines


def test_a_silent_launch_prints_nothing(capsys, monkeypatch, tmp_path):
    assert (
        lines_of_a_launch(capsys, monkeypatch, tmp_path, environ={"JAXCROSS_PROGRESS": "0"}) == []
    )
