"""An unusable state, setting or folder is rejected on every rank, with the reason."""

import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross.checkpoint import Checkpoints
from jaxcross.checkpoint.folders import Folders, folder_name
from jaxcross.errors import JobError
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_damage import newest, refused
from tests.support.checkpoint_jobs import (
    STEPS,
    batches,
    init,
    loop,
    make_step,
    resumes,
    same,
    train,
)
from tests.support.examples import scaled
from tests.support.fakes import run_ranks


def with_state(job, world, data, state):
    step, state = make_step(world), job.restore(state, mode="local")
    for batch in job.batches(data, STEPS):
        job.state = state = step(state, batch)
        job.save(state)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"w": np.zeros(4)}, r"its leaf `\['w'\]` is float64\[3\], not float64\[4\]"),
        ({"w": np.zeros(3, np.int32)}, r"its leaf `\['w'\]` is float64\[3\], not int32\[3\]"),
        ({"v": np.zeros(3)}, r"it has no leaf `\['v'\]`"),
        ({}, r"it has a leaf `\['w'\]`, for which there is no place"),
    ],
)
def test_another_model_is_refused(state, said, tmp_path):
    train(2, tmp_path, names="a", steps=2)
    refused(2, tmp_path, rf"cannot resume from .* on rank 0: {said}", fn=with_state, state=state)


def test_another_version_is_refused(tmp_path):
    train(2, tmp_path, names="a", steps=2)
    with mock.patch("jaxcross.checkpoint.part.FORMAT", 3):
        refused(2, tmp_path, "another version of jaxcross wrote.*rank-0000")


def test_checkpoints_of_another_job_are_refused(tmp_path):
    train(1, tmp_path, names="b", steps=3)
    (tmp_path / "b").rename(tmp_path / "a")
    refused(1, tmp_path, "none of them is intact any more.*belongs to a job `b`")


def test_a_job_restores_once_and_before_it_saves(tmp_path):
    refused(
        1,
        tmp_path,
        "has called `job.restore` twice",
        fn=lambda job, **_: [job.restore({}), job.restore({})],
    )
    refused(1, tmp_path, "has not called `job.restore`", fn=lambda job, **_: job.save({"w": 1}))


def test_only_what_a_restart_could_use_is_saved(tmp_path, caplog):
    def fn(job, world, data):
        state = job.restore(init(world, own=False))
        for batch in job.batches(data, 2):
            state = make_step(world)(state, batch)
        job.save(state | {"more": 1})

    refused(
        2,
        tmp_path,
        r"cannot save this state, on rank 0: it does not have .* it has a leaf `\['more'\]`",
        fn=fn,
    )
    refused(2, tmp_path, "static leaves", fn=lambda job, **_: job.restore({"w": {"text"}}))


def test_other_return_value_leaves_the_last_save(tmp_path, caplog):
    """A function that returns something other than its state doesn't replace its last save."""

    def fn(job, world, data, steps):
        loop(job, world, data, steps=steps)
        return {"accuracy": 0.5}

    train(2, tmp_path, names="a", fn=fn, steps=8)
    assert newest(tmp_path).name.startswith("000000000006-")
    assert "its last state is not saved" in "".join(resumes(caplog))


@pytest.mark.mostly_integration("3-0", "3-1")
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("step", [3, STEPS])
def test_disk_failure_on_one_rank_ends_job_on_all(bad, step, tmp_path):
    write = Folders.commit

    def commit(self, name, part):
        if part.rank == bad and part.step == step:
            raise OSError(28, "No space left on device")
        write(self, name, part)

    with mock.patch.object(Folders, "commit", commit):
        steps = refused(2, tmp_path, f"could not be saved, on rank {bad}: OSError: .*No space left")
    assert steps == [min(step + 3, STEPS)] * 2  # the next save reports it
    whole = train(2, None, names="a")
    for mine, theirs in zip(train(2, tmp_path, names="a"), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])


def test_uncreatable_folder_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    def work(world):
        directory = tmp_path / "file/checkpoints" if world.rank else tmp_path / "fine"
        runner = Runner(world, checkpoints=Checkpoints(directory))
        runner.add("a", loop, {"world": world, "data": batches(world)})
        with pytest.raises(
            JobError, match="^Checkpoints cannot be kept in .*, on rank 1: .*Not a directory"
        ):
            runner.run()

    run_ranks(2, work)


def test_ranks_must_want_the_same_checkpoints(tmp_path):
    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(tmp_path) if world.rank else None)
        runner.add("a", loop, {"world": world, "data": batches(world)})
        with pytest.raises(JobError, match="want to run different things.*checkpoints"):
            runner.run()

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [({"every": 0}, ValueError, "`every` of the checkpoints must be at least 1, got 0"),
     ({"keep": -1}, ValueError, "`keep` of the checkpoints must be at least 1, got -1"),
     ({"every": 1.5}, TypeError, "`every` of the checkpoints must be a whole number, got 1.5"),
     ({"every": True}, TypeError, "`every` of the checkpoints must be a whole number, got True"),
     ({"keep": None}, TypeError, "`keep` of the checkpoints must be a whole number, got None"),
     ({"directory": 3}, TypeError, (
         "`directory` of the checkpoints must be the path of a folder, got 3"
     )),
     ({"directory": ""}, ValueError, "`directory` of the checkpoints must .* an empty text")],
)  # fmt: skip
def test_settings_that_make_no_sense(arguments, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        Checkpoints(**{"directory": "x", **arguments})


def test_settings_may_be_numpys():
    given = Checkpoints("x", every=np.int64(2), keep=np.int32(1))
    assert json.dumps([given.every, given.keep]) == "[2, 1]"


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
@settings(deadline=None, max_examples=scaled(100))
def test_each_job_has_a_folder_of_its_own(jobs):
    one, other = map(folder_name, jobs)
    assert one != other
    for name in (one, other):
        assert "/" not in name and not name.startswith(".") and len(name.encode()) < 250


@pytest.mark.integration
def test_job_name_cannot_replace_the_sets_own_file(tmp_path):
    """A job can't overwrite a file that belongs to the checkpoint set itself."""
    names = ("jobs.json", "jobs.json.draft", "left-0000")
    first = train(2, tmp_path, names=names, after=7)
    assert (tmp_path / "jobs.json").is_file()
    again, _ = train(2, tmp_path, names=names)
    assert [again[name][1] for name in names] == [STEPS] * 3 and [
        first[0][name][1] for name in names
    ] == [7] * 3


def test_what_lies_in_the_way_of_a_deletion_stays(tmp_path):
    """There is a file in place of a part's folder, and a folder in place of its text."""
    train(2, tmp_path, steps=3)
    for number, place in enumerate(("rank-0000", "rank-0001/part.json/x")):
        path = tmp_path / "a" / f"{number:012d}-{number:016x}" / place
        path.parent.mkdir(parents=True)
        path.write_text("no part")
    again, _ = train(2, tmp_path)
    assert again["a"][1] == STEPS
    assert (
        sum(
            path.is_file() and path.read_text() == "no part"
            for path in (tmp_path / "a").glob("0*/rank*")
        )
        == 1
    )


@pytest.mark.integration
def test_parts_on_other_ranks_disks_are_refused(tmp_path):
    """The nodes come in a different order. Starting from scratch would lose a night's training."""
    train(3, lambda rank: tmp_path / str(rank), own=True, steps=8)
    with pytest.raises(
        JobError, match="rank 0's part is on rank 1's disk, rank 1's part is on rank 0's disk"
    ):
        train(3, lambda rank: tmp_path / str((1, 0, 2)[rank]), own=True)
    whole, again = train(3, None, own=True), train(3, lambda rank: tmp_path / str(rank), own=True)
    same(again[1]["a"][0], whole[1]["a"][0])


def test_names_of_jobs_that_are_no_names_of_folders(tmp_path):
    names = ["..", "a/b", "job0 lr=0.1,seed=0", "ä" * 300]
    first = train(1, tmp_path / "here", names=names, steps=3)[0]
    again = train(1, tmp_path / "here", names=names, steps=3, data=lambda *_: iter(()))[0]
    for name in names:
        same(first[name][0], again[name][0])
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
