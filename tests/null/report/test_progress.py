"""Tests the progress of a run: its rate, lines, table, and the file that other processes read."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from jaxcross.report.progress import (
    PROGRESS_FILE,
    JobProgress,
    LatestMetric,
    RunProgress,
    StepRate,
    doing_text,
    metric_of,
    metric_text,
    read_progress,
)
from jaxcross.report.progress_text import duration, job_line, run_lines, run_table, state_text

RUN = RunProgress(
    run="node 12 345",
    ranks=2,
    at_s=1e9,
    run_s=13.4,
    jobs=(
        JobProgress(name="a", step=40, steps=100, steps_per_s=3.2, metric="loss 0.532"),
        JobProgress(name="b", doing="compiling", doing_s=12.3),
    ),
)


def drawn(run, width=80, most_jobs=10, title="2 ranks, 13 s"):
    out = io.StringIO()
    Console(file=out, width=width).print(
        run_table(run, width=width, most_jobs=most_jobs, title=title)
    )
    return out.getvalue()


def test_a_line_has_what_a_person_asks_for():
    assert run_lines(RUN) == [
        "[jaxcross 13 s] a: step 40/100, 3.20 steps/s, loss 0.532, 18 s left",
        "[jaxcross 13 s] b: compiling, 12 s",
    ]


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (JobProgress(name="a"), "a: before its first step"),
        (JobProgress(name="a", steps=9), "a: step 0/9, before its first step"),
        (JobProgress(name="a", step=3), "a: step 3"),
        (JobProgress(name="a", step=3, doing="computing", doing_s=1.9), "a: step 3"),
        (
            JobProgress(name="a", step=3, doing="computing", doing_s=61),
            "a: step 3, computing, 1 min 01 s",
        ),
        (
            JobProgress(name="a", step=3, doing="compiling", doing_s=0.1),
            "a: step 3, compiling, 0 s",
        ),
        (JobProgress(name="a", step=3, doing="paused"), "a: step 3, paused"),
        (
            JobProgress(name="a", step=3, steps=3, steps_per_s=2.0, status="ended"),
            "a: step 3/3, ended",
        ),
        (
            JobProgress(name="a", step=3, steps=9, steps_per_s=2.0, status="failed"),
            "a: step 3/9, failed",
        ),
    ],
)
def test_lines_of_a_job(job, line):
    assert job_line(job) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 05 min"),
        (3e5, "3 d 11 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_many_jobs_share_a_line_those_that_run_first():
    jobs = [JobProgress(name=f"j{n}", step=n, status="ended" if n < 20 else "") for n in range(30)]
    lines = run_lines(replace(RUN, jobs=tuple(jobs)))
    assert [line.split()[3] for line in lines[:-1]] == [f"j{n}:" for n in range(20, 28)]
    assert lines[-1] == "[jaxcross 13 s] 22 more jobs: 20 ended, 2 running"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(width):
    long = JobProgress(
        name="a name as long as sweeps make them, lr=0.1",
        step=123456,
        steps=1000000,
        steps_per_s=0.123,
        metric="eval/accuracy 0.123",
        doing="waiting for other ranks' data",
        doing_s=7300,
    )
    text = drawn(replace(RUN, jobs=(*RUN.jobs, long)), width)
    assert max(map(len, text.splitlines())) <= width
    title, *rows = text.splitlines()
    assert title.strip() == "2 ranks, 13 s"
    assert len(rows) == 4, text
    assert "40/100" in rows[1] and ("3.20" in rows[1]) == (width >= 80)
    # Numbers are never truncated.
    assert "123456/1000000" in rows[3] and ("0.123" in rows[3]) == (width >= 80)
    assert rows[2].split() == ["b", "0", "compiling,", "12", "s"]


def test_the_table_shows_names_as_they_are():
    assert "[red]a" in drawn(replace(RUN, jobs=(JobProgress(name="[red]a"),)))


def test_a_table_of_many_jobs_has_few_rows():
    jobs = tuple(JobProgress(name=f"j{n}", step=1) for n in range(30))
    text = drawn(replace(RUN, jobs=jobs), most_jobs=5)
    assert len(text.splitlines()) == 8 and "25 more jobs: 25 running" in text


def test_the_pace_leaves_out_the_first_step_and_old_times():
    pace = StepRate()
    assert [pace.look(now, steps) for now, steps in ((0, 0), (5, 1), (6, 1))] == [None, None, None]
    assert pace.look(7, 2) == 0.5  # one step in two seconds, ignoring the 5 s of the first step
    assert pace.look(9, 6) == 1.25
    assert pace.look(19, 26) == 2.0  # 20 steps in the last 10 s
    assert pace.look(19.5, 26) == 2.0
    assert pace.look(29, 26) == 1.0  # a stall lowers it


def test_a_slow_job_has_a_pace_too():
    pace = StepRate()
    assert [pace.look(now, now // 30) for now in range(121)][-1] == pytest.approx(1 / 30)


def test_one_metric_is_shown():
    assert metric_text({"accuracy": 0.5, "loss": 0.25}) == "loss 0.250"
    assert metric_text({"eval": {"accuracy": 0.5}, "name": "x"}) == "eval/accuracy 0.500"
    assert metric_text({"n": 10**400}) == "n inf" and metric_text({"n": -(10**400)}) == "n -inf"
    assert (
        metric_text({}) == metric_text(None) == metric_text({"name": "x", "many": [1.0, 2.0]}) == ""
    )


def test_an_evaluation_does_not_replace_the_loss():
    history = [(1, {"loss": 0.5}), (2, {"loss": 0.25}), (2, {"eval": {"accuracy": 0.5}})]
    assert metric_of(history) == "loss 0.250"
    assert metric_of(history[2:]) == "eval/accuracy 0.500"
    assert metric_of([]) == ""


def test_text_for_what_a_job_does():
    assert doing_text("compile", local=False) == "compiling"
    assert doing_text("batch 3 of data 1", local=True) == "waiting for data"
    assert doing_text("batch 3 of data 1", local=False) == "waiting for other ranks' data"
    assert doing_text("call of the step", local=False) == "waiting for other ranks"
    assert doing_text("restore", local=False) == "restore, with all ranks"
    assert doing_text("evaluation", local=True) == "evaluation"


def test_an_ended_job_waits_for_nothing():
    assert (
        state_text(JobProgress(name="a", status="stopped", doing="computing", doing_s=9))
        == "stopped"
    )


def test_the_file_comes_back_as_it_was(tmp_path):
    (tmp_path / PROGRESS_FILE).write_text(RUN.to_json())
    assert read_progress(tmp_path) == RUN


def test_no_run_is_no_error(tmp_path):
    assert read_progress(tmp_path) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: text.replace('"jaxcross": 1', '"jaxcross": 2'),
        lambda text: text.replace('"step": 40', '"step": null'),
        lambda text: text.replace("13.4", "NaN"),
        lambda text: text.replace('"jobs": [', '"jobs": [3, '),
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_file_is_a_clear_error(tmp_path, damage):
    text = damage(RUN.to_json())
    assert text != RUN.to_json()
    (tmp_path / PROGRESS_FILE).write_text(text)
    with pytest.raises(
        ValueError, match=r"progress\.json` is not the progress of a run, so it is damaged or"
    ):
        read_progress(tmp_path)


def test_texts_of_the_file_cannot_move_the_cursor(tmp_path):
    fields = json.loads(RUN.to_json())
    fields["jobs"][0]["name"] = "a\x1b[2J"
    (tmp_path / PROGRESS_FILE).write_text(json.dumps(fields))
    run = read_progress(tmp_path)
    assert run is not None and run.jobs[0].name == "a [2J"


class LoggedMeanwhile(list[tuple[int, object]]):
    """A job's history. Each time an item is read, the job then logs or drops something."""

    def __init__(self, *changes):
        super().__init__([(1, {"loss": 1.0})])
        self.changes = list(changes)

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if self.changes:
            self.changes.pop(0)(self)
        return found


def test_metric_logged_during_a_look_is_in_the_next():
    """No entry is lost: if the job logs something during a look, the next look finds it."""
    latest, history = (
        LatestMetric(),
        LoggedMeanwhile(lambda logged: logged.append((2, {"loss": 2.0}))),
    )
    assert [latest.look(history, "loss") for _ in range(2)] == ["loss 1.00", "loss 2.00"]


def test_metric_logged_after_a_drop_is_seen():
    """A repeated evaluation drops what it had logged before, which makes the history shorter."""
    latest, history = LatestMetric(), LoggedMeanwhile(list[tuple[int, object]].clear)
    assert latest.look(history, "loss") == "loss 1.00"
    history.append((1, {"loss": 3.0}))
    assert latest.look(history, "loss") == "loss 3.00"
