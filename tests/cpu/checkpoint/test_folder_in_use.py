"""Two concurrent runs can't share a checkpoint folder: the second one is rejected on every rank."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.health.process import ProcessId, _stat, this_process
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import loop, make_step


def train(folder):
    """Runs a short job on two ranks."""

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(folder))
        runner.add("a", loop, {"step": make_step(world), "data": [1.0]})
        runner.run()

    run_ranks(2, work)


def owner_of(folder):
    return json.loads((folder / "jobs.json").read_text())["process"]


@pytest.fixture
def other():
    """Yields another process of this host, with its identity as a folder's owner."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = _stat(process.pid)
        assert started is not None
        yield process, dataclasses.replace(this_process(), pid=process.pid, started=started[1])
        process.kill()


def note(folder: os.PathLike, process: ProcessId):
    folder.mkdir()
    members = {"jobs": ["a"], "added": [], "submitted": {}}
    (folder / "jobs.json").write_text(
        json.dumps({**members, "process": dataclasses.asdict(process)})
    )


def test_a_run_that_has_ended_leaves_the_folder_free(tmp_path):
    train(tmp_path / "c")
    assert owner_of(tmp_path / "c") is None


def test_a_folder_in_use_is_refused_on_every_rank(tmp_path, other):
    note(tmp_path / "c", other[1])
    before = (tmp_path / "c" / "jobs.json").read_text()

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(tmp_path / "c"))
        runner.add("a", loop, {"step": make_step(world), "data": [1.0]})
        with pytest.raises(
            JobError,
            match=f"process {other[1].pid} on this host is using it for training now: wait",
        ):
            runner.run()

    run_ranks(2, work)
    assert (tmp_path / "c" / "jobs.json").read_text() == before


@pytest.mark.parametrize("case", ["killed", "another host", "another process of that number"])
def test_an_owner_that_is_gone_or_elsewhere_keeps_nothing(tmp_path, other, case):
    process, owner = other
    if case == "killed":
        process.kill()
        process.wait()
    elif case == "another host":
        owner = dataclasses.replace(owner, host="elsewhere")
    else:
        owner = dataclasses.replace(owner, started=owner.started - 1)
    note(tmp_path / "c", owner)
    train(tmp_path / "c")
    assert owner_of(tmp_path / "c") is None
