"""A sweep's metric: where it may come from, when its absence ends the sweep, when it's on disk."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxcross.checkpoint.folders import Folders
from jaxcross.errors import JobError
from jaxcross.sweeps import Grid
from jaxcross.sweeps.run_sweep import sweep
from jaxcross.sweeps.trial import TrialObserver
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step


def training(world, *, begun=None, evaluate: Any = None, late=False, logs="loss", steps=6):
    """Returns a `train` that adds `lr` at each step and logs it.

    The function evaluates every two steps, and logs the metric at its end.
    """
    step = make_step(world)

    def train(job, lr):
        if begun is not None:
            begun.append((world.rank, job))
        if evaluate is not None:
            job.every(2, lambda state: evaluate(job.step, state))
        state = job.restore(0.0)
        for batch in job.batches([float(lr)] * steps):
            state = job.state = step(state, batch)
            job.log({logs: state})
            if job.step == 4:
                job.save(state)
        if late:
            job.log({"score": state})
        return state

    return train


def on_ranks(ranks, lr, *, metric="score", folder=None, concurrent=2, **options):
    def work(world):
        train, search = training(world, **options), Grid({"lr": lr})
        return sweep(
            train,
            search,
            metric=metric,
            mode="max",
            world=world,
            folder=folder,
            concurrent=concurrent,
        )

    return run_ranks(ranks, work)


def refused(begun, *, match, metric="score", ranks=2, **options):
    def work(world):
        with pytest.raises(JobError, match=match):
            sweep(
                training(world, begun=begun, **options),
                Grid({"lr": [1, 2, 3, 4, 5, 6]}),
                metric=metric,
                mode="max",
                world=world,
            )

    run_ranks(ranks, work)


def test_first_end_without_the_metric_ends_the_sweep():
    """The error names what was logged, on every rank. Of six trials, only a few have started."""
    begun = []
    refused(
        begun,
        match=r"Trial `[01] lr=\d` has ended but never logged `score`.* "
        r"It logged: `loss`\.",
    )
    assert len({job.name for _, job in begun}) <= 3


def test_first_evaluation_without_the_metric_ends_it():
    begun = []
    refused(
        begun,
        metric="eval/accuracy",
        evaluate=lambda _, state: {"error": state},
        match="but its evaluation `eval` after step 2 has not returned that metric. "
        "It returned: `eval/error`",
    )
    assert len({job.name for _, job in begun}) == 2
    assert {job.step for _, job in begun if job.status == "failed"} == {2}


def test_a_metric_that_comes_at_the_end_is_fine():
    result, _ = on_ranks(2, [1, 2], late=True)
    assert {trial.status for trial in result.trials} == {"finished"}


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
def test_the_last_value_of_a_step_counts(counted, tmp_path, caplog):
    """A function may log several times per step, or make steps that jaxcross doesn't count."""

    def work(world):
        step = make_step(world) if counted else lambda state, batch: state + batch

        def train(job, lr):
            state = job.restore(0.0)
            for batch in job.batches([float(lr)] * 3):
                state = job.state = step(state, batch)
                job.log({"score": -state})
                job.log({"score": state})
                job.save(state)
            return state

        grid = Grid({"lr": [1, 2]})
        return sweep(train, grid, metric="score", mode="max", world=world, folder=tmp_path)

    for result in run_ranks(2, work) + run_ranks(2, work):
        assert result.best.number == 1
        for trial in result.trials:
            steps, values = zip(*trial.values, strict=True)
            assert steps == ((1, 1, 2, 2, 3, 3) if counted else (0,) * 6)
            assert [value > 0 for value in values] == [False, True] * 3
            assert trial.value == values[-1] == max(values)
    assert "restart" not in caplog.text


def test_a_later_evaluation_may_lack_the_metric():
    def evaluate(step, state):
        return {"accuracy": state} if step == 2 else {"error": state}

    result, _ = on_ranks(2, [1, 2], metric="eval/accuracy", evaluate=evaluate)
    assert [len(trial.values) for trial in result.trials] == [1, 1]


def test_values_are_on_disk_before_a_checkpoint_covers_them(monkeypatch, tmp_path):
    """Values survive a power failure, as the file is synced before the checkpoint starts."""
    on_disk, covered, real, saving = [""], {}, os.fsync, TrialObserver.saving

    def fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == "trials.jsonl":
            on_disk[0] = path.read_text()
        real(descriptor)

    def saved(observer, step):
        saving(observer, step)
        covered[step] = on_disk[0]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(TrialObserver, "saving", saved)
    on_ranks(1, [1], logs="score", folder=tmp_path)
    assert 4 in covered
    for step, text in covered.items():
        assert any(json.loads(line).get("step") == step for line in text.splitlines())


@pytest.mark.integration
def test_each_trial_is_deleted_once(monkeypatch, tmp_path):
    deleted, real = [], Folders.delete
    monkeypatch.setattr(
        Folders, "delete", lambda self, names: (deleted.append(self.path), real(self, names))
    )
    on_ranks(1, [*range(8)], logs="score", folder=tmp_path, concurrent=1)
    mine = [path.name for path in deleted if path.parent.name == "checkpoints"]
    assert len(list((tmp_path / "checkpoints").glob("*/0*"))) == 1
    assert max(Counter(mine).values()) <= 5, (
        "its own checkpoints are thinned out as well, but by itself alone"
    )
