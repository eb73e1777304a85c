"""What a rank records about itself, read back as if after its end."""

import json
import logging
import os
import threading
from functools import partial

import pytest

from jaxcross.health import flight_recorder as flight_module
from jaxcross.health.activity import Activity
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import this_process
from jaxcross.report.event_files import read_event_files
from tests.support.interleavings import WatchedLock, interrupted


@pytest.fixture
def flight(tmp_path):
    recorder = FlightRecorder([this_process()], 0)
    recorder.record_to(tmp_path / "events")
    return recorder


def compute(step, segment=0):
    return Activity.now("compute", job="a", step=step, segment=segment)


def test_what_is_under_way_is_in_the_file_at_once(flight, tmp_path):
    token = flight.begin(compute(1))
    flight.end(token)
    flight.begin(Activity.now("exchange", job='"b"\n', step=2, segment=1, number=7))
    (record,) = read_event_files(tmp_path / "events")
    assert str(record.where) == "job '\"b\" ', step 2, segment 1 (exchange)", (
        "read as text of one line"
    )
    assert (record.entered, str(record.done), record.exit_kind) == (
        7,
        "job 'a', step 1, segment 0 (compute)",
        "",
    )
    assert (record.rank, record.size, record.pid, record.unread) == (0, 1, os.getpid(), 0)


def test_folder_is_fixed_when_script_changes_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_module, "LIMIT_BYTES", 3000)
    monkeypatch.chdir(tmp_path)
    recorder = FlightRecorder([this_process()], 0)
    recorder.record_to("events")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for step in range(500):
        recorder.end(recorder.begin(compute(step)))
    (record,) = read_event_files(tmp_path / "events")
    assert str(record.done) == "job 'a', step 499, segment 0 (compute)"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_newest_checkpoints_outlive_a_change_of_file(flight, tmp_path, monkeypatch):
    """A launcher looks for them, however many steps have been made since."""
    monkeypatch.setattr(flight_module, "LIMIT_BYTES", 3000)
    for step in (10, 20):
        flight.checkpoint(f"{step:012d}-00000000000000aa", job="a", any_ranks=step == 20)
    for step in range(500):
        flight.end(flight.begin(compute(step)))
    (record,) = read_event_files(tmp_path / "events")
    assert {job: (part.step, part.any_ranks) for job, part in record.saved.items()} == {
        "a": (20, True)
    }


def test_checkpoint_with_a_strange_name_is_none(flight, tmp_path):
    flight.checkpoint("../../etc", job="a", any_ranks=True)
    (record,) = read_event_files(tmp_path / "events")
    assert record.saved == {}


def test_two_bounded_files_hold_current_activities(flight, tmp_path, monkeypatch):
    monkeypatch.setattr(flight_module, "LIMIT_BYTES", 3000)
    flight.begin(Activity.now("vote", number=1))
    for step in range(500):
        flight.end(flight.begin(compute(step)))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "events").iterdir()}
    assert set(sizes) == {"rank-0.jsonl", "rank-0.old.jsonl"}
    assert all(size < 3500 for size in sizes.values())
    (record,) = read_event_files(tmp_path / "events")
    assert [b.what for b in record.under_way.values()] == ["vote"]
    assert record.done is not None and record.done.step == 499
    assert record.unread == 0


def test_activity_during_file_rotation_is_recorded(flight, tmp_path, monkeypatch):
    monkeypatch.setattr(flight_module, "LIMIT_BYTES", 3000)
    tokens, replace = [flight.begin(Activity.now("vote", number=1))], os.replace

    def slow(*paths):
        """Lets other threads continue in the meantime."""
        if len(tokens) == 1:
            flight.end(tokens[0])
            tokens.append(flight.begin(compute(7)))
            flight.end(tokens[1])
            tokens.append(flight.begin(Activity.now("exchange", job="a", step=8, number=2)))
        replace(*paths)

    monkeypatch.setattr(os, "replace", slow)
    while len(tokens) == 1:
        flight.end(flight.begin(compute(6)))
    (record,) = read_event_files(tmp_path / "events")
    assert [(token, begun.what) for token, begun in record.under_way.items()] == [
        (tokens[2], "exchange")
    ]
    assert (record.entered, record.unread) == (2, 0)


def test_threads_that_fill_a_file_change_it_once(tmp_path, monkeypatch):
    """Another thread may fill and rotate the file at any point of a write.

    Rotating twice would lose the history.
    """
    monkeypatch.setattr(flight_module, "LIMIT_BYTES", 3000)
    inside, at = True, 0
    while inside:
        at += 1
        flight, folder = FlightRecorder([this_process()], 0), tmp_path / str(at)
        flight.record_to(folder)
        flight.note("history" + "x" * 1500)
        mine, theirs = (partial(flight.note, word + "x" * 1300) for word in ("mine", "theirs"))
        _, inside = interrupted(mine, at, theirs, module=flight_module)
        text = "".join(path.read_text() for path in folder.iterdir())
        words = ["history", "mine", *["theirs"] * inside]
        assert [word for word in words if word not in text] == [], f"before bytecode {at}"
        assert (folder / "rank-0.old.jsonl").exists()
    assert at > 100


def test_another_folder_waits_for_a_change_of_file(flight, tmp_path, monkeypatch):
    """A new runner may switch to another folder while a thread rotates the file."""
    monkeypatch.setattr(flight_module, "LIMIT_BYTES", 3000)
    replace, lock = os.replace, WatchedLock()
    monkeypatch.setattr(flight, "_rotating", lock)

    def record():
        flight.record_to(tmp_path / "other")
        lock.awaited.set()

    thread = threading.Thread(target=record)

    def interrupted_replace(*paths):
        if not thread.ident:
            thread.start()
            assert lock.awaited.wait(60)
        replace(*paths)

    monkeypatch.setattr(os, "replace", interrupted_replace)
    while not thread.ident:
        flight.note("before" + "x" * 500)
    thread.join()
    flight.note("after")
    assert {path.name for path in (tmp_path / "events").iterdir()} == {
        "rank-0.jsonl",
        "rank-0.old.jsonl",
    }
    (other,) = (tmp_path / "other").iterdir()
    assert other.name == "rank-0.jsonl" and "after" in other.read_text()


def test_disk_failure_ends_only_the_recording(flight, caplog):
    os.close(flight._file)
    with caplog.at_level(logging.WARNING):
        token = flight.begin(compute(1))
        flight.end(token)
    (message,) = caplog.messages
    assert message.startswith(f"rank 0 no longer records its events in `{flight._path.parent}`, ")
    assert flight.describe() == "outside of any step, after job 'a', step 1, segment 0 (compute)"


def test_where_a_rank_is():
    flight = FlightRecorder([this_process()], 0)
    assert flight.describe() == "outside of any step"
    token = flight.begin(compute(1))
    vote = flight.begin(Activity.now("vote", number=3))
    assert flight.describe() == "in vote, alongside job 'a', step 1, segment 0 (compute)"
    flight.end(token)
    assert flight.describe() == "in vote, after job 'a', step 1, segment 0 (compute)"
    flight.end(vote)
    with flight.during("checkpoint", job="a", step=1):
        assert flight.describe() == "in job 'a', step 1 (checkpoint)"


def test_first_exit_record_counts_and_names_activity(flight, tmp_path):
    """The first exit record is the valid one, and names the activity that raised."""
    with pytest.raises(ValueError, match="x"), flight.during("compile", job="a", step=1):
        raise ValueError("x")
    where = flight.record_exit("failed", "with x" * 10_000, script_raised=True)
    assert where == "in job 'a', step 1 (compile)"
    flight.record_exit("left", "its script ended")
    (record,) = read_event_files(tmp_path / "events")
    assert (record.exit_kind, record.script_raised, record.place, record.unread) == (
        "failed",
        True,
        "in job 'a', step 1 (compile)",
        0,
    )


def test_notes_and_beats_are_lines(flight, tmp_path):
    flight.beat()
    flight.note("done: ended", job="a", step=3)
    lines = [
        json.loads(line) for line in (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()
    ]
    assert [set(line) for line in lines[1:]] == [{"beat", "at"}, {"note", "job", "step", "at"}]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        FlightRecorder([this_process()], 0).record_to(tmp_path / "file" / "events")


def test_what_an_earlier_run_left_makes_room(tmp_path):
    for _ in range(2):
        FlightRecorder([this_process()], 0).record_to(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.jsonl", "rank-0.old.jsonl"]
