"""`job.every` and `job.stop_early`: which steps evaluate, where a job ends, even after a kill."""

import re
import shutil
from contextlib import nullcontext

import pytest

import jaxcross
from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import BrokenError, batches, init, make_step, same
from tests.support.evaluated_jobs import SCORES, STEPS, evaluations, lines, train
from tests.support.fakes import run_ranks

EARLY = {"mode": "max", "patience": 2}  # step 6 is the best, so it ends at 10


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_every_second_step_is_evaluated(rank):
    for number, (job, called) in enumerate(train(2, None, rank=rank)):
        assert called == ([] if rank not in (None, number) else [*SCORES])
        found = evaluations(job)
        assert [(step, values["score"]) for step, values in found] == [*SCORES.items()]
        assert found[-1][1]["w"] == job.state["w"].sum()
        assert job.step == STEPS


def test_metrics_reach_report_and_files(tmp_path):
    def work(world):
        step = make_step(world)
        job = Job(
            "a",
            lambda state, batch: (step(state, batch), {}),
            init(world, own=False),
            batches(world),
            steps=4,
        )
        job.every(2, lambda state: {"accuracy": float(state["w"][0])})
        job.every(3, lambda state: 7.5, rank=0, name="other")
        report = run([job], world=world, metrics=tmp_path)
        return report.jobs[0].metrics, float(job.state["w"][0])

    for metrics, w in run_ranks(2, work):
        assert metrics == {"eval/accuracy": w, "other": 7.5}
    written = [line for _, line in lines(tmp_path)]
    assert {"step": 3, "other": 7.5} in written
    assert [line["step"] for line in written if "eval/accuracy" in line] == [2, 4]


@pytest.mark.mostly_integration("{'after': 7}-None")
@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize(
    "stop",
    [
        {"after": 6},
        {"after": 7},
        {"fails_at": 6},
        {"fails_at": 12},
        {"after": 5, "save_every": 100},
    ],
    ids=str,
)
def test_a_resumed_job_evaluates_the_same_steps(stop, rank, tmp_path):
    """Even a failed evaluation counts: the step's state is saved, and evaluated on restart."""
    common = {"rank": rank, "metrics": tmp_path / "m"}
    train(2, tmp_path / "c", **common, **stop)
    (job, _), (other, _) = train(2, tmp_path / "c", **common, save_every=stop.get("save_every", 3))
    two = train(2, None, rank=rank, metrics=tmp_path / "two")[0][0]
    assert lines(tmp_path / "m") == lines(tmp_path / "two")
    same(job.state, two.state)
    assert (
        evaluations(job)
        == evaluations(other)
        == [e for e in evaluations(two) if e in evaluations(job)]
    )
    again, called = train(2, tmp_path / "c", **common)[0]
    assert called == [] and again.step == STEPS
    assert lines(tmp_path / "m") == lines(tmp_path / "two")


def test_an_evaluation_that_no_checkpoint_covers_counts_once(tmp_path):
    """The run is killed after making and logging an evaluation owed by an earlier run."""
    train(2, tmp_path / "c", fails_at=6, metrics=tmp_path / "m")
    shutil.copytree(tmp_path / "c", tmp_path / "kept")
    train(2, tmp_path / "c", after=1, metrics=tmp_path / "m", save_every=100)
    assert [step for step, line in lines(tmp_path / "m") if "eval/score" in line] == [2, 4, 6]
    shutil.rmtree(tmp_path / "c")
    shutil.copytree(tmp_path / "kept", tmp_path / "c")
    train(2, tmp_path / "c", metrics=tmp_path / "m")
    train(2, None, metrics=tmp_path / "whole")
    assert lines(tmp_path / "m") == lines(tmp_path / "whole")


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(
    "early", [EARLY, {"mode": "max", "patience_steps": 3}, {"mode": "min", "patience": 3}]
)
def test_a_job_stops_early_on_all_ranks(early, rank, tmp_path):
    for job, _ in train(2, None, early=early, rank=rank):
        assert (job.step, job.status, job.error) == (10, "stopped early", None)
        assert job._engine.evaluations.stop_reason.startswith(
            "`eval/score` has not been better than"
        )


def test_ranks_that_score_differently_stop_at_one_step():
    def work(world):
        step, seen = make_step(world), []
        job = Job(
            "a",
            lambda state, batch: (step(state, batch), {}),
            init(world, own=False),
            batches(world),
            steps=9,
        )
        job.every(
            1,
            lambda state: {"score": len(seen) if world.rank else -len(seen) or seen.append(0) or 0},
        )
        job.stop_early("eval/score", mode="max", patience=2)
        report = run([job], world=world)
        return job.step, report.jobs[0].how, report.jobs[0].why, str(report)

    first, *others = run_ranks(3, work)
    assert all(other[:3] == first[:3] for other in others)
    assert first[:2] == (3, "stopped early")
    assert "stopped early at 3" in first[3] and first[2] in first[3]


@pytest.mark.mostly_integration("{'fails_at': 10}")
@pytest.mark.parametrize(
    "stop", [{"after": 5}, {"after": 7}, {"after": 9}, {"fails_at": 8}, {"fails_at": 10}], ids=str
)
def test_a_resumed_job_stops_at_the_same_step(stop, tmp_path):
    whole = train(2, None, early=EARLY)
    train(2, tmp_path, early=EARLY, **stop)
    for _ in range(2):  # the second time, nothing is left to train
        for (job, _), (unkilled, _) in zip(train(2, tmp_path, early=EARLY), whole, strict=True):
            assert (
                (job.step, job.status) == (unkilled.step, unkilled.status) == (10, "stopped early")
            )
            same(job.state, unkilled.state)
    ((job, _),) = train(1, tmp_path, early={"mode": "max", "patience": 9})
    assert (job.step, job.status) == (STEPS, "ended")


def errors_of(fn, *, ranks=2, checkpoints=None):
    """Returns the error text, and the step, with which a job of this function ends on each rank."""

    def work(world):
        runner = Runner(world, checkpoints=checkpoints)
        job = runner.add("a", fn, {"world": world})
        with pytest.raises(JobError):
            runner.run()
        return f"{job.error} {job.error.__cause__}", job.step

    return run_ranks(ranks, work)


def trains(job, world, *, assigns=True, data=None):
    state, step = job.restore(init(world, own=False)), make_step(world)
    for batch in job.batches(data or batches(world), 4):
        state = step(state, batch)
        if assigns:
            job.state = state
    return state


def unassigned(job, world):
    job.every(2, lambda state: 1.0)
    trains(job, world, assigns=False)


def no_metric(job, world):
    job.every(2, lambda state: {"loss": 1.0})
    job.stop_early("eval/accuracy", mode="max", patience=1)
    trains(job, world)


def not_a_number(job, world):
    job.every(2, lambda state: {"accuracy": "good"}, rank=0)
    job.stop_early("eval/accuracy", mode="max", patience=1)
    trains(job, world)


def no_evaluation(job, world):
    job.stop_early("eval/accuracy", mode="max", patience=1)
    trains(job, world)


def unlike(job, world):
    job.every(2 + world.rank, lambda state: 1.0)
    trains(job, world)


def only_one_evaluates(job, world):
    if world.rank:
        job.every(2, lambda state: 1.0)
    trains(job, world)


def no_metrics(job, world):
    job.every(2, lambda state: "good")
    trains(job, world)


def in_the_loop(job, world):
    for _ in job.batches(batches(world), 4):
        job.every(2, lambda state: 1.0)


def without_batches(job, world):
    state, step = job.restore(init(world, own=False)), make_step(world)
    job.every(2, lambda state: 1.0)
    for _ in range(4):
        job.state = state = step(state, 1.0)


def trains_on(job, world):
    job.every(1, lambda state: 1.0)
    job.stop_early("eval", mode="max", patience=1)
    for _ in range(3):
        trains(job, world)


def communicates_alone(job, world):
    job.every(2, lambda state: next(iter(job.batches([1.0]))), rank=0)
    trains(job, world)


@pytest.mark.parametrize(
    ("fn", "text", "steps"),
    [
        (
            unassigned,
            (
                "evaluation `eval` of step 2 needs the state.* "
                "Assign `job.state = state` after each step"
            ),
            2,
        ),
        (
            no_metric,
            "no number `eval/accuracy`, which `job.stop_early` needs. It returned `eval/loss`",
            2,
        ),
        (not_a_number, "evaluation `eval` of step 2 has no number `eval/accuracy`", 2),
        (
            no_evaluation,
            "needs the metric `eval/accuracy`, but the job has no evaluation that could return it",
            0,
        ),
        (unlike, r"Rank 0 has called .*every\(2, .* rank 1 .*every\(3, ", 0),
        (only_one_evaluates, "different things on different ranks|unequally", 0),
        (no_metrics, "must return a dict of metrics by name, a number or None, got a `str`", 2),
        (in_the_loop, "`job.every` was called after the loop .* Call it before the loop", 0),
        (
            without_batches,
            "has called its next step before the evaluation `eval` of step 2 could run",
            2,
        ),
        (trains_on, "continues after step 2, where it stopped early", 2),
        (communicates_alone, "different", 2),
    ],
)
def test_a_mistake_is_an_error_on_every_rank(fn, text, steps):
    for error, step in errors_of(fn):
        assert re.search(text, error), error
        assert step == steps


def test_checkpoints_need_the_metric_of_the_best(tmp_path):
    for error, step in errors_of(
        trains, checkpoints=Checkpoints(tmp_path, best="eval/loss", mode="min")
    ):
        assert (
            "`Checkpoints(best=...)` needs the metric `eval/loss`" in error
            and "name='eval'" in error
        )
        assert step == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda job: job.every(0, len), "`n` of `job.every` in job `a` must be at least 1"),
        (
            lambda job: job.every(2, 3),
            "`fn` of `job.every` in job `a` must be a function of the state",
        ),
        (
            lambda job: job.every(2, len, rank=-1),
            "`rank` of `job.every` in job `a` must be at least 0",
        ),
        (lambda job: job.every(2, len, name="a/b"), "must be a text without a slash"),
        (
            lambda job: job.stop_early("m", mode="best", patience=1),
            "`mode` of .* must be one of 'min', 'max'",
        ),
        (
            lambda job: job.stop_early("m", mode="min"),
            "Give exactly one of `patience` and `patience_steps`",
        ),
        (
            lambda job: job.stop_early("m", mode="min", patience=0),
            "`patience` .* must be at least 1",
        ),
        (
            lambda job: job.stop_early("m", mode="min", patience=1, min_delta=-1),
            "`min_delta` .* must be at least 0",
        ),
        (
            lambda job: job.stop_early(3, mode="min", patience=1),
            "`metric` .* must be the name of a metric",
        ),
    ],
)
def test_arguments_are_checked_where_they_are_given(call, text):
    with pytest.raises((TypeError, ValueError), match=text):
        call(jaxcross.Job("a", lambda state, batch: (state, {}), 0.0, [1.0]))


def test_an_evaluation_after_the_stop_has_its_batches():
    """The first of two evaluations in a step ends the training; the second gets its own data."""

    def work(world):
        seen = []

        def fn(job):
            job.every(1, lambda state: {"score": 0.0})
            job.every(
                1,
                lambda state: float(len(seen.append(0) or list(job.batches([1.0] * 3)))),
                name="read",
            )
            job.stop_early("eval/score", mode="max", patience=2)
            return trains(job, world)

        runner = Runner(world)
        job = runner.add("a", fn)
        runner.run()
        return (
            job.step,
            job.status,
            [values["read"] for _, values in job.history if "read" in values],
        )

    assert run_ranks(2, work) == [(3, "stopped early", [3.0, 3.0, 3.0])] * 2


def test_an_owed_evaluation_takes_no_batches_of_training(tmp_path):
    """A job that failed in an evaluation repeats it before its loop, if it saves there."""

    def start(folder, fails_at):
        def work(world):
            def fn(job):
                def evaluation(state):
                    if job.step == fails_at:
                        raise BrokenError
                    return float(len(list(job.batches([1.0] * 3))))

                state, step = job.restore(init(world, own=False)), make_step(world)
                job.every(2, evaluation)
                job.save(state)
                for batch in job.batches(batches(world), 8):
                    job.state = state = step(state, batch)

            runner = Runner(world, checkpoints=Checkpoints(folder))
            job = runner.add("a", fn)
            with pytest.raises(JobError, match="BrokenError") if fails_at else nullcontext():
                runner.run()
            return job

        return run_ranks(2, work)

    start(tmp_path / "c", 4)
    for job, whole in zip(
        start(tmp_path / "c", None), start(tmp_path / "whole", None), strict=True
    ):
        assert job.step == whole.step == 8
        same(job.state, whole.state)
        assert [values["eval"] for _, values in job.history] == [3.0, 3.0, 3.0]
