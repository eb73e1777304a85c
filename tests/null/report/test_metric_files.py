"""Tests files of metrics: what a line holds, what a restart keeps, and who owns a folder."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxcross.report.metric_files import MetricFiles, as_logged


def written(folder: Path, job: str = "a") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / f"{job}.jsonl").read_text().splitlines()]
    assert all(isinstance(line.pop("time"), float) for line in lines)
    return lines


def table(folder: Path, job: str = "a") -> list[dict[str, str]]:
    with (folder / f"{job}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def logged(
    folder: Path, *values: object, continued: Path | None = None, begin: int | None = None
) -> None:
    """Logs these values, one per step, starting after step `begin`."""
    files = MetricFiles(folder, continued)
    files.claim()
    if begin is not None:
        files.begin("a", begin)
    for step, value in enumerate(values, (begin or 0) + 1):
        files.metrics(job="a", step=step, values=value)
    files.close()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"loss": 0.5, "n": 3, "ok": True}, {"loss": 0.5, "n": 3, "ok": True}),
        ({"eval": {"accuracy": 0.5}, "loss": 1.0}, {"eval/accuracy": 0.5, "loss": 1.0}),
        ({"step": 7, "time": 8.0}, {"step_": 7, "time_": 8.0}),
        (0.25, {"value": 0.25}),
        (
            {"w": np.arange(2.0), "pair": (1, {"x": 2})},
            {"w": [0.0, 1.0], "pair/0": 1, "pair/1/x": 2},
        ),
        ({"a/b": 1, "a": {"b": 2}}, {"a/b": 1, "a/b_": 2}),
        ({"loss": float("nan"), "top": float("-inf")}, {"loss": "nan", "top": "-inf"}),
    ],
    ids=["flat", "nested", "own keys", "number", "arrays", "one name twice", "not finite"],
)
def test_a_line_of_a_step(values: object, line: dict[str, Any], tmp_path: Path) -> None:
    logged(tmp_path, values)
    assert written(tmp_path) == [{"step": 1, **line}]
    assert table(tmp_path) == [
        {k: str(v) for k, v in {"step": 1, **line}.items() if not isinstance(v, list)}
    ]


def test_a_new_metric_gets_a_column(tmp_path: Path) -> None:
    logged(tmp_path, {"loss": 2.0}, {"loss": 1.0, "accuracy": 0.5}, {"loss": 0.5})
    assert table(tmp_path) == [
        {"step": "1", "loss": "2.0", "accuracy": ""},
        {"step": "2", "loss": "1.0", "accuracy": "0.5"},
        {"step": "3", "loss": "0.5", "accuracy": ""},
    ]


def test_a_restart_drops_later_steps_and_half_a_line(tmp_path: Path) -> None:
    """The run had logged more than its checkpoint holds, and was killed while it wrote a line."""
    folder, checkpoints = tmp_path / "metrics", tmp_path / "checkpoints"
    logged(folder, *({"loss": float(n)} for n in range(5)), continued=checkpoints)
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    logged(folder, {"loss": 30.0}, continued=checkpoints, begin=3)
    assert [(line["step"], line["loss"]) for line in written(folder)] == [
        (1, 0.0),
        (2, 1.0),
        (3, 2.0),
        (4, 30.0),
    ]
    assert [row["step"] for row in table(folder)] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("first", [None, Path("/one")], ids=["no checkpoints", "other checkpoints"])
def test_another_run_cannot_have_the_folder(first: Path | None, tmp_path: Path) -> None:
    logged(tmp_path, {"loss": 1.0}, continued=first)
    for continued in (None, Path("/two")):
        with pytest.raises(ValueError, match="has the metrics of another run"):
            MetricFiles(tmp_path, continued).claim()
    assert written(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_lines_of_a_run_whose_checkpoints_are_gone_stay(tmp_path: Path) -> None:
    """The new run begins at step 0, in the folder of a run that had come further."""
    folder, checkpoints = tmp_path / "metrics", tmp_path / "checkpoints"
    for n in range(3):
        logged(folder, {"loss": float(n)}, continued=checkpoints, begin=0)
    assert written(folder) == [{"step": 1, "loss": 2.0}]
    aside = [json.loads((folder / f"a.jsonl.old-{n}").read_text())["loss"] for n in (1, 2)]
    assert aside == [0.0, 1.0]


def test_what_is_logged_before_the_state_is_restored(tmp_path: Path) -> None:
    """A line that's logged before the job restores its state is held back.

    Until the state is restored, we don't know at which step to truncate the files of the previous
    run. If the job resumes, the files already contain this line, so it's dropped.
    """
    for begin, losses in ((0, [(0, 9.0), (1, 1.0)]), (1, [(0, 9.0), (1, 1.0), (2, 2.0)])):
        files = MetricFiles(tmp_path / "metrics", tmp_path / "checkpoints")
        files.claim()
        files.metrics(job="a", step=0, values={"loss": 9.0})
        files.begin("a", begin)
        files.metrics(job="a", step=begin + 1, values={"loss": begin + 1.0})
        files.close()
        assert [(line["step"], line["loss"]) for line in written(tmp_path / "metrics")] == losses


def test_a_job_that_restores_nothing_is_written_at_the_end(tmp_path: Path) -> None:
    logged(tmp_path / "metrics", {"loss": 1.0}, continued=tmp_path / "checkpoints")
    assert written(tmp_path / "metrics") == [{"step": 1, "loss": 1.0}]


def test_a_late_line_is_no_error(tmp_path: Path) -> None:
    """A thread left over from a broken run may still log."""
    files = MetricFiles(tmp_path)
    files.claim()
    files.close()
    files.metrics(job="a", step=1, values={"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_kill_before_the_folder_was_claimed(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    logged(tmp_path, {"loss": 1.0})
    assert written(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="holds other files"):
        MetricFiles(tmp_path).claim()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_name_is_no_path(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path)
    files.claim()
    files.metrics(job="../b/lr=0.1", step=1, values={"loss": 1.0})
    files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "..%2Fb%2Flr%3D0.1.csv",
        "..%2Fb%2Flr%3D0.1.jsonl",
        "run.json",
    ]


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = MetricFiles(tmp_path / "metrics")
    files.claim()
    (tmp_path / "metrics" / "a.csv.new").mkdir()  # opening the file fails
    for step in (1, 2, 3):
        files.metrics(job="a", step=step, values={"loss": 1.0})
        files.metrics(job="b", step=step, values={"loss": 1.0})
    files.close()
    assert [r.getMessage()[:40] for r in caplog.records] == [
        "Metrics of job `a` are no longer written"
    ]
    assert len(written(tmp_path / "metrics", "b")) == 3


def test_a_line_is_read_as_it_was_logged(tmp_path):
    """Except for nested metrics, whose names are joined by slashes."""
    files = MetricFiles(tmp_path, tmp_path / "checkpoints")
    files.claim()
    files.begin("a", 0)
    files.metrics(
        job="a",
        step=1,
        values={"loss": math.inf, "step": 3, "eval": {"top": [0.5, math.nan]}, "word": "x"},
    )
    files.close()
    again = MetricFiles(tmp_path, tmp_path / "checkpoints")
    again.claim()
    (line,) = again.begin("a", 1)
    again.close()
    step, values = as_logged(line)
    assert step == 1
    half, nan = values.pop("eval/top")
    assert half == 0.5 and math.isnan(nan)
    assert values == {"loss": math.inf, "step": 3, "word": "x"}


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="open files are counted by way of /proc"
)
@pytest.mark.parametrize("kind", ["done", "closed"])
@pytest.mark.parametrize("restores", [True, False])
def test_files_of_a_finished_job_are_closed(restores: bool, kind: str, tmp_path: Path) -> None:
    """Otherwise, a sweep of 600 trials would need more open files than a process may have."""
    files = MetricFiles(tmp_path / "m", tmp_path / "checkpoints")
    files.claim()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for job in "abc":
        if restores:
            files.begin(job, 0)
        files.metrics(job=job, step=1, values={"loss": 0.5})
        files.metrics(job=job, step=2, values={"accuracy": 0.25})
        files.note(job=job, kind=kind)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    files.close()
    for job in "abc":
        assert written(tmp_path / "m", job) == [
            {"step": 1, "loss": 0.5},
            {"step": 2, "accuracy": 0.25},
        ]
        assert table(tmp_path / "m", job)[1] == {"step": "2", "loss": "", "accuracy": "0.25"}


def test_two_runs_at_once_need_two_folders(tmp_path):
    """Even if both resume from the same checkpoints."""
    first, second = (MetricFiles(tmp_path, tmp_path / "checkpoints") for _ in range(2))
    first.claim()
    holder = rf"process {os.getpid()} on host `{os.uname().nodename}` \(started 2[\d: -]+\)"
    with pytest.raises(
        ValueError, match=rf"`{tmp_path}` is in use: {holder} writes its metrics there\. Wait until"
    ):
        second.claim()
    first.close()
    second.claim()
    second.close()


@pytest.mark.parametrize(
    ("values", "stays"),
    [
        ({"eval": {"loss": 0.5}}, False),
        ({"eval": 0.5}, False),
        ({"loss": 1.0, "eval/best": 0.5}, True),
        ({"/loss": 1.0}, True),
        ({"evaluation": 0.5}, True),
    ],
    ids=["its own", "a number", "of the loop, too", "a slash", "another name"],
)
def test_only_lines_of_the_evaluation_go(values: object, stays: bool, tmp_path: Path) -> None:
    logged(tmp_path / "m", values, continued=tmp_path / "c", begin=0)
    files = MetricFiles(tmp_path / "m", tmp_path / "c")
    files.claim()
    assert len(files.begin("a", 1)) == 1
    assert len(files.begin("a", 1, without="eval")) == stays
    files.close()
