"""Tests that TensorBoard's event files hold what jobs logged, with one folder per job."""

from __future__ import annotations

import atexit
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jaxcross.report import TensorBoard, tensorboard
from tests.support.interleavings import interrupted


def points(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yields the scalars from a folder's event files.

    A record is a length, the length's checksum, an event, and the event's checksum.
    """
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.*")):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def test_event_files_hold_the_numbers(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    for step in (1, 2):
        sink.metrics(
            job="a/b",
            step=step,
            values={"loss": 0.5 / step, "eval": {"accuracy": 0.25}, "w": [1, 2]},
        )
        sink.note(job="a/b", kind="status", step=step, value="paused")  # it resumes afterwards
    sink.metrics(job="other", step=7, values={"loss": 3.0})
    for job in ("a/b", "unknown"):
        sink.note(job=job, kind="done", step=2)
    found = [
        ("loss", 1, 0.5),
        ("eval/accuracy", 1, 0.25),
        ("loss", 2, 0.25),
        ("eval/accuracy", 2, 0.25),
    ]
    assert list(points(tmp_path / "a%2Fb")) == found
    sink.close()  # a job that failed
    assert list(points(tmp_path / "other")) == [("loss", 7, 3.0)]


class Writer:
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_job_may_end_while_the_process_does(tmp_path: Path) -> None:
    """A thread left over from a broken run may report its job's end at any point of `close`."""
    inside, at = True, 0
    while inside:
        at += 1
        sink, writers = TensorBoard(tmp_path), [Writer(), Writer()]
        sink._writers.update(a=writers[0], b=writers[1])
        noted = partial(sink.note, job="a", kind="closed")
        _, inside = interrupted(sink.close, at, noted, module=tensorboard)
        assert [writer.closed for writer in writers] == [1, 1], f"before bytecode {at}"
        atexit.unregister(sink.close)
    assert at > 20
