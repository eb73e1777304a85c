"""Job progress on rank 0: its lines, when they're due, and the file for other processes."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxcross import Runner
from jaxcross.health.activity import Activity
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import this_process
from jaxcross.jobs.prefetch import number_of_batches
from jaxcross.jobs.progress_reporter import ProgressReporter, interval_of
from jaxcross.report.progress import read_progress
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step


def make_job(name="a", *, step=0, steps=None, status=None, history=(), made=None) -> Any:
    return SimpleNamespace(
        name=name,
        step=step,
        status=status,
        history=list(history),
        paused=False,
        steps_made=step if made is None else made,
        planned_steps=steps,
        metrics=SimpleNamespace(observer=None),
    )


def reporter(jobs, activities=(), *, progress=None, rank=0, environ=None):
    flight: Any = SimpleNamespace(
        run="x", current=lambda: tuple(activities), replace_file=lambda *_: None
    )
    return ProgressReporter(
        lambda: jobs, flight=flight, rank=rank, ranks=2, progress=progress, environ=environ or {}
    )


def due(interval, until, every=1.0):
    return [now * every for now in range(int(until / every)) if interval.due(now * every)]


def test_lines_come_after_3_s_then_every_10_s_then_a_minute():
    times = due(interval_of(None, {}), 3000)
    assert times[:5] == [3, 13, 23, 33, 43]
    assert [later - now for now, later in zip(times[-3:], times[-2:], strict=False)] == [60, 60]
    assert times == due(interval_of(True, {}), 3000)


def test_a_fixed_interval_and_none():
    assert due(interval_of(2, {}), 7, 0.5) == [2, 4, 6]
    assert due(interval_of(60, {}), 130) == [3, 63, 123]
    assert due(interval_of(False, {}), 3000) == []


def test_the_environment_overrules_the_script():
    assert due(interval_of(2, {"JAXCROSS_PROGRESS": "0"}), 100) == []
    assert due(interval_of(False, {"JAXCROSS_PROGRESS": "20"}), 30) == [3, 23]
    assert due(interval_of(None, {"JAXCROSS_PROGRESS": ""}), 10) == [3]
    for text in ("yes", "-1", "nan", "inf"):
        with pytest.raises(
            ValueError, match=r"`JAXCROSS_PROGRESS` in the environment must be seconds"
        ):
            interval_of(None, {"JAXCROSS_PROGRESS": text})


def test_a_line_says_what_a_job_waits_for(capsys):
    jobs = [make_job(step=1, steps=9), make_job("b")]
    compiling = Activity(job="b", step=0, segment=-1, what="compile", number=0, since_s=4.0)
    vote = Activity(job="", step=0, segment=-1, what="vote", number=7, since_s=4.0)
    wait = Activity(
        job="a", step=2, segment=-1, what="batch 2 of data 1", number=0, since_s=5.0, local=True
    )
    shown = reporter(jobs, (vote, wait, compiling))
    for now_s in (0.0, 2.0, 16.0):
        shown.look(now_s)
    assert capsys.readouterr().err.splitlines() == [
        "[jaxcross 16 s] a: step 1/9, waiting for data, 11 s",
        "[jaxcross 16 s] b: compiling, 12 s",
    ]


def test_a_sweeps_metric_is_shown_instead_of_the_loss(capsys):
    job = make_job(step=1, history=[(1, {"loss": 2.0})])
    job.metrics.observer = SimpleNamespace(metric="eval/accuracy")
    shown = reporter([job])
    shown.look(5.0)
    assert "loss 2.00" in capsys.readouterr().err, "it is not logged yet"
    job.history += [(2, {"eval": {"accuracy": 0.5}}), *((n, {"loss": 1.0}) for n in range(3, 30))]
    shown.look(50.0)
    shown.look(100.0)
    assert capsys.readouterr().err.count("eval/accuracy 0.500") == 2


def test_what_computes_is_no_wait(capsys):
    wait = Activity(job="a", step=2, segment=-1, what="call of the step", number=0, since_s=1.0)
    compute = Activity(job="a", step=2, segment=0, what="compute", number=0, since_s=1.0)
    reporter([make_job(step=1)], (wait, compute)).look(9.0)
    assert capsys.readouterr().err == "[jaxcross 9 s] a: step 1, computing, 8 s\n"


def test_end_is_printed_only_after_progress_lines(capsys):
    job = make_job(
        step=3, steps=3, history=[(2, {"loss": 0.5}), (3, {"loss": 0.25})], status="ended"
    )
    short, long = reporter([job]), reporter([job])
    short.look(1.0)
    short.look(2.0, over=True)
    assert capsys.readouterr().err == ""
    long.look(4.0)
    long.look(4.5, over=True)
    assert (
        capsys.readouterr().err.splitlines()[-1] == "[jaxcross 4 s] a: step 3/3, loss 0.250, ended"
    )


def test_a_resumed_job_has_the_pace_of_this_run(capsys):
    job = make_job(step=500, steps=1000, made=0)
    shown = reporter([job], progress=1)
    for now_s in (0, 1, 2, 3):
        job.step, job.steps_made = 500 + 2 * now_s, 2 * now_s
        shown.look(float(now_s))
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "[jaxcross 3 s] a: step 506/1000, 2.00 steps/s, 4 min 07 s left"
    )


def test_a_closed_log_ends_no_training(monkeypatch):
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr("sys.stderr", stream)
        reporter([make_job()]).look(5.0)


def test_the_file_tells_other_processes(tmp_path):
    flight = FlightRecorder([this_process()], 0)
    shown = ProgressReporter(
        lambda: [make_job(step=2, steps=4)],
        flight=flight,
        rank=0,
        ranks=1,
        progress=False,
        environ={},
    )
    shown.look(1.0)
    assert read_progress(tmp_path) is None
    flight.record_to(tmp_path)
    shown.look(2.0, over=True)
    run = read_progress(tmp_path)
    assert run is not None and (run.jobs[0].name, run.jobs[0].steps, run.over, run.shown) == (
        "a",
        4,
        True,
        False,
    )
    assert not list(tmp_path.glob("*.new"))


def test_a_runner_writes_how_far_its_jobs_are(tmp_path):
    """Only rank 0 writes the file, which holds each job's last step and how it ended."""

    def work(world):
        def fn(job, step):
            for batch in job.batches(np.ones((3, 1))):
                list(job.batches([0.0] * 7))  # an evaluation during training
                step(0.0, batch)

        runner = Runner(world, events=tmp_path / str(world.rank))
        runner.add("a", fn, {"step": make_step(world)})
        runner.run()
        return read_progress(tmp_path / str(world.rank))

    run, other = run_ranks(2, work)
    assert other is None
    assert (run.ranks, run.over, run.shown) == (2, True, True)
    assert [(job.name, job.step, job.steps, job.status) for job in run.jobs] == [
        ("a", 3, 3, "ended")
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxcross-progress"]


def test_how_many_batches_a_loop_has():
    assert number_of_batches([1, 2, 3], None) == number_of_batches([1, 2, 3], 5) == 3
    assert number_of_batches([1, 2, 3], 2) == number_of_batches(iter([1, 2, 3]), 2) == 2
    assert number_of_batches(iter([1, 2, 3]), None) is None

    class Endless(list):
        def __len__(self):
            raise NotImplementedError

    assert number_of_batches(Endless(), None) is None
