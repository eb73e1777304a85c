"""A run that fails before its first step leaves no checkpoint folder unless a restart needs it."""

import jax.numpy as jnp
import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import loop, make_step


def fails(job, saves=False):
    state = job.restore(jnp.zeros(3))
    if saves:
        job.save(state)
    raise ValueError("the training loop failed")


def is_stopped(job):
    job.stop()
    while True:
        job.run_on_all_ranks("waits", lambda control: None)


def run(folder, ranks, *jobs):
    """Runs jobs of which one fails, and returns the files that remain."""

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(folder))
        for n, (fn, arguments) in enumerate(jobs):
            step = {"step": make_step(world)} if fn is loop else {}
            runner.add(f"job-{n}", fn, {**arguments, **step})
        with pytest.raises(JobError, match="the training loop failed"):
            runner.run()

    run_ranks(ranks, work)
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_without_a_step_is_removed(tmp_path, ranks):
    assert run(tmp_path / "ck", ranks, (fails, {}), (fails, {})) is None


@pytest.mark.parametrize(
    "other",
    [(fails, {"saves": True}), (is_stopped, {}), (loop, {"data": [1.0, 2.0]})],
    ids=["saved", "stopped", "step"],
)
def test_what_a_restart_needs_stays(tmp_path, other):
    assert run(tmp_path / "ck", 2, (fails, {}), other) == ["job-0", "job-1", "jobs.json"]


def test_a_folder_of_an_earlier_run_stays(tmp_path):
    folder = tmp_path / "ck"
    run(folder, 1, (fails, {}), (loop, {"data": [1.0]}))
    before = sorted(str(each) for each in folder.rglob("*.json"))
    assert run(folder, 1, (fails, {}), (fails, {})) is not None
    assert sorted(str(each) for each in folder.rglob("*.json")) == before


def test_files_of_others_stay(tmp_path):
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert run(folder, 1, (fails, {})) == ["notes.txt"]
