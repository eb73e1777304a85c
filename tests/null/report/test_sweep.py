"""Tests a sweep's table: trials are in order, the best is marked, and failures have a reason."""

import pytest

from jaxcross.report.sweep_result import SweepResult, SweepTrial

ROWS = [
    (0, {"lr": 0.1}, "finished", 30, 0.91),
    (1, {"lr": 0.2, "width": 64}, "pruned", 10, 0.95),
    (2, {"lr": 0.123456}, "finished", 30, 0.9312),
    (3, {"lr": 0.4}, "failed", 4, None),
    (4, {"lr": 0.5}, "finished", 30, float("nan")),
    (5, {"lr": 0.6}, "pruned", 20, 0.2),
    (6, {"lr": 0.7}, "finished", 20, 0.9312),
]


def result(mode="max", rows=ROWS):
    trials = tuple(
        SweepTrial(
            number=number,
            name=f"{number}",
            params=params,
            status=status,
            step=step,
            value=value,
            error="the trial failed\nin line 3" if status == "failed" else "",
            values=() if value is None else ((step // 2, 0.1), (step, value)),
        )
        for number, params, status, step, value in rows
    )
    best = {"max": 2, "min": 0}[mode]
    return SweepResult(
        metric="accuracy", mode=mode, trials=trials, best=trials[best] if len(rows) > 2 else None
    )


def test_finished_come_first_then_who_came_farthest():
    assert [trial.number for trial in result().ranked] == [2, 6, 0, 4, 5, 1, 3]
    assert [trial.number for trial in result("min").ranked] == [0, 2, 6, 4, 5, 1, 3]


def test_table_marks_the_best_and_says_why_one_failed():
    lines = str(result()).splitlines()
    assert lines[0] == "Sweep of 7 trials by accuracy (max): 4 finished, 2 pruned, 1 failed"
    (marked,) = [line for line in lines if "*" in line]
    assert [cell.strip() for cell in marked.split("│")[1:-1]] == [
        "*",
        "2",
        "0.1235",
        "-",
        "0.9312",
        "30",
        "finished",
    ]
    assert "Best: lr 0.1235, with accuracy 0.9312 after 30 steps." in lines
    assert lines[-1] == "Trial `3` failed: the trial failed"


def test_nothing_is_best_where_none_finished():
    found = result(rows=ROWS[1:2])
    assert "No trial finished with a accuracy." not in str(found)
    assert "No trial has finished with a number as `accuracy`." in str(found)


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert result().to_plot(tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert result(rows=ROWS[3:4]).to_plot(tmp_path / "empty.png").stat().st_size > 1000
