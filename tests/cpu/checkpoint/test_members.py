"""The set of jobs survives a restart: submitted, stopped, paused, and added by a function."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxcross.checkpoint import Checkpoints
from jaxcross.checkpoint.folders import Folders, folder_name
from jaxcross.checkpoint.job_list import JobList, parse, read
from jaxcross.checkpoint.part import UnusableError
from jaxcross.errors import JobError
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import batches, loop, make_step, resumes, same
from tests.support.checkpoint_jobs import train as train_jobs
from tests.support.examples import scaled
from tests.support.fakes import run_ranks
from tests.support.membership_jobs import all_see

STEPS = 30


def as_killed(folder, copy):
    """Copies the files a kill at this moment would leave, while other threads may be writing."""
    for where, _, files in os.walk(folder):
        target = copy / Path(where).relative_to(folder)
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            with suppress(FileNotFoundError):  # deleted in the meantime
                shutil.copyfile(Path(where, file), target / file)


def train(folder, *, killed=None, by="submit", offers=True, added=()):
    """Runs jobs of which `first` makes `later` join, stops `endless`, and pauses `rests` from its
    step 5 to 25.

    At step 20, the job `first` copies the files that would remain if the run were killed now.

    Returns:
        For each rank: a mapping from a job's name to its status, step and state, and whether the
        job `rests` was paused when `first` made step 22.
    """

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(folder, keep=3))
        rested = []

        def offered(job, seed, steps=STEPS):
            return loop(job, world, batches(world, seed), steps=steps)

        def first(job):
            step, state = make_step(world, "first"), job.restore({"w": np.arange(3.0)})
            for batch in job.batches(batches(world), STEPS):
                if job.step == 3 and by == "submit" and world.rank == 0:
                    runner.submit("offered", job="later", kwargs={"seed": 3})
                if job.step == 3 and by == "add":
                    runner.add("later", offered, {"seed": 3})
                if job.step == 5:
                    # Wait until the job `endless` has started its checkpoint of step 3, so that
                    # there's one after a kill. After a restart, that job may have ended already.
                    while not all_see(job, lambda: endless.step > 3 or endless.done.is_set()):
                        pass
                    endless.stop()
                    rests.pause()
                if job.step == 20 and killed is not None and world.rank == 0:
                    as_killed(folder, killed)
                if job.step == 22:
                    rested.append(rests.paused)
                if job.step == 25:
                    rests.resume()
                state = step(state, batch)
                if job.step % 3 == 0:
                    job.save(state)
            return state

        if offers:
            runner.register("offered", offered)
        runner.add("first", first)
        endless = runner.add("endless", offered, {"seed": 1, "steps": None})
        rests = runner.add("rests", offered, {"seed": 2})
        for name in added:
            runner.add(name, offered, {"seed": 3})
        runner.run()
        return {job.name: (job.status, job.step, job.state) for job in runner.jobs}, rested

    return run_ranks(2, work)


@pytest.mark.integration
@pytest.mark.parametrize("by", ["submit", "add"])
def test_a_restart_has_the_same_jobs(by, tmp_path, caplog):
    whole = train(tmp_path / "whole", killed=tmp_path / "killed", by=by)
    caplog.clear()
    again = train(tmp_path / "killed", by=by, added=["later"] if by == "add" else [])
    for (want, rested), (got, rested_again) in zip(whole, again, strict=True):
        assert rested == rested_again == [True]
        assert got.keys() == want.keys() == {"first", "endless", "rests", "later"}
        assert {name: how for name, (how, _, _) in got.items()} == {
            name: how for name, (how, _, _) in want.items()
        }
        for name in ("first", "rests", "later"):
            assert got[name][:2] == ("ended", STEPS)
            same(got[name][2], want[name][2])
        assert 0 < got["endless"][1] <= want["endless"][1], (
            "of its newest checkpoint, and not a step more"
        )
    assert (
        sum("was stopped in an earlier run, and stays stopped" in text for text in resumes(caplog))
        == 2
    )


@pytest.mark.integration
@pytest.mark.parametrize("by", ["submit", "add"])
def test_a_step_that_adds_a_job_may_be_made_again(by, tmp_path):
    """The kill came after the job was added, but before the job that added it saved that step."""
    whole = train(tmp_path / "whole", killed=tmp_path / "killed", by=by)
    for folder in (tmp_path / "killed" / "first").glob("0*"):
        shutil.rmtree(folder)
    again = train(tmp_path / "killed", by=by, added=["later"] if by == "add" else [])
    for (want, _), (got, _) in zip(whole, again, strict=True):
        assert got["later"][:2] == got["first"][:2] == ("ended", STEPS)
        same(got["later"][2], want["later"][2])


def test_marks_of_ranks_that_are_no_more_are_forgotten(tmp_path):
    four, two = (Folders(tmp_path, rank=rank, ranks=ranks) for rank, ranks in ((3, 4), (0, 2)))
    four.mark("paused", "paused")
    assert four.marked("paused") == "paused" and two.marked("paused") == ""
    two.mark("paused", None)
    assert four.marked("paused") == ""


def test_leaf_sharded_for_one_rank_names_the_ranks(tmp_path):
    """The error for a leaf that was sharded for one rank names both rank counts."""

    def cut(job, world, data):
        step, state = (
            make_step(world, job.name),
            job.restore({"w": np.arange(3.0), "part": np.zeros(48 // world.size)}),
        )
        for batch in job.batches(data, 3):
            state = step({"w": state["w"]}, batch) | {"part": state["part"]}
        job.save(state)
        return state

    train_jobs(1, tmp_path, names=("a",), fn=cut)
    with pytest.raises(
        JobError,
        match=r"cannot resume on 2 ranks from `.*`, which 1 rank wrote\..* start 1 rank, .*'part'",
    ):
        train_jobs(2, tmp_path, names=("a",), fn=cut)


@pytest.mark.integration
def test_a_job_that_the_restart_lacks_is_named(tmp_path, caplog):
    train(tmp_path / "whole", killed=tmp_path / "killed", by="add")
    caplog.clear()
    train(tmp_path / "killed", by="add")
    (said,) = [text for text in resumes(caplog) if "joined an earlier run" in text]
    assert "`later`" in said and "endless" not in said
    caplog.clear()
    train(tmp_path / "killed", by="add", added=["later"])
    train(tmp_path / "killed", by="add")
    assert not any("joined an earlier run" in text for text in resumes(caplog)), "it has ended"


@pytest.mark.integration
def test_invalid_stored_submissions_are_skipped(tmp_path, caplog):
    folder = tmp_path / "set"
    folder.mkdir()
    strange = {
        "x": "[",
        "y": json.dumps({"function": "offered"}),
        "first": json.dumps({"function": 1, "job": "first"}),
    }
    for listed, job in (("a", ""), ("b", "another"), ("c", 3), ("d", ["d"])):
        strange[listed] = json.dumps({"function": "offered", "job": job, "arguments": {"seed": 1}})
    (folder / "jobs.json").write_text(json.dumps({"jobs": list(strange), "submitted": strange}))
    (got, _), _ = train(folder, by="none")
    assert got.keys() == {"first", "endless", "rests"}
    assert sum("submission cannot be used" in text for text in resumes(caplog)) == 12, (
        "six, on each rank"
    )
    assert not [path for path in folder.iterdir() if path.name not in {*got, "jobs.json"}]


@settings(max_examples=scaled(80), deadline=None)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["jobs", "submitted", "a"]), inner, max_size=3)
        ),
        max_leaves=9,
    ).map(lambda value: json.dumps(value).encode())
)
@example(b'{"jobs": ["a", "a"], "submitted": {"a": "text"}}')
@example(b'{"jobs": "ab", "submitted": {}}')
@example(b"[" * 100_000)
@example(b'{"jobs": ["\\ud800"]}')
@example(b'{"jobs": [""], "added": {}}')
def test_any_text_is_a_set_or_refused(content):
    try:
        found = parse(content)
    except UnusableError:
        return
    texts = (*found.jobs, *found.submitted, *found.submitted.values())
    assert all(type(text) is str for text in texts) and len(set(found.jobs)) == len(found.jobs)
    assert all(folder_name(name).encode() for name in found.jobs) and set(found.added) <= set(
        found.jobs
    )


def test_a_set_that_is_no_file_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "jobs.json"
    assert read(file) == JobList(submitted={})
    file.write_text('{"jobs": ["a"], "added": ["b"]}')
    assert read(file) == JobList(jobs=("a", "b"), added=("b",), submitted={})
    monkeypatch.setattr("jaxcross.checkpoint.job_list.MAX_BYTES", 5)
    with pytest.raises(UnusableError):
        read(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(UnusableError):
        read(file)
