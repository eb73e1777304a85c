"""`Checkpoints(best=...)` keeps the best state alongside the latest ones, despite any kill."""

import math
import shutil
from contextlib import suppress

import numpy as np
import pytest

import jaxcross
from jaxcross.checkpoint import Checkpoints
from jaxcross.checkpoint.folders import Folders
from jaxcross.errors import JobError
from tests.support.checkpoint_damage import newest
from tests.support.checkpoint_jobs import same
from tests.support.checkpoint_jobs import train as train_plainly
from tests.support.evaluated_jobs import SCORES, STEPS, evaluations, steps_on_disk, train

LIKE = {"w": np.zeros(3)}


def best_of(folder):
    state, step = jaxcross.load_checkpoint(folder, "a", LIKE, best=True)
    return state["w"].sum(), step


def w_of(job, step):
    return dict(evaluations(job))[step]["w"]


@pytest.mark.mostly_integration("min-4-3")
@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize(("mode", "step"), [("max", 6), ("min", 4)])
def test_best_state_is_kept_alongside_the_last(mode, step, keep, tmp_path):
    (job, _), _ = train(2, tmp_path, best=mode, keep=keep, n=2, save_every=1)
    assert best_of(tmp_path) == (w_of(job, step), step)
    assert steps_on_disk(tmp_path) == [step, *range(STEPS - keep + 1, STEPS + 1)]
    state, last = jaxcross.load_checkpoint(tmp_path, "a", LIKE)
    assert last == STEPS
    same(state, job.state)


def test_the_best_of_several_saves_is_the_only_extra(tmp_path):
    """An evaluation that isn't the best writes nothing; the best is saved immediately."""
    train(2, tmp_path, best="max", keep=9, save_every=100)
    assert steps_on_disk(tmp_path) == [2, 6, STEPS]


@pytest.mark.parametrize(
    "values", [[math.nan] * 6, [math.nan, 1.0, math.inf, math.nan, 0.5, 0.0]], ids=["nan", "some"]
)
def test_nan_is_never_the_best(values, tmp_path):
    scored = dict(zip(SCORES, values, strict=True))
    (job, _), _ = train(
        2, tmp_path, best="max", keep=1, evaluate=lambda step: {"score": scored[step]}
    )
    if 1.0 in values:
        assert best_of(tmp_path) == (w_of(job, 4), 4)
    else:
        with pytest.raises(JobError, match="Job `a` has no best state in"):
            best_of(tmp_path)


@pytest.fixture(scope="module", params=[False, True], ids=["equal", "own"])
def never_killed(request, tmp_path_factory):
    """Trains without interruption.

    Returns whether ranks have rank-local leaves, the folder, and each rank's `w` of step 6.
    """
    folder = tmp_path_factory.mktemp("never_killed")
    jobs = train(2, folder, best="max", keep=1, own=request.param, save_every=1)
    return request.param, folder, tuple(w_of(job, 6) for job, _ in jobs)


@pytest.mark.integration
@pytest.mark.parametrize(
    "stop", [{"after": n} for n in (5, 6, 7, 11)] + [{"fails_at": n} for n in (6, 8)], ids=str
)
def test_the_best_is_that_of_a_run_that_was_not_killed(stop, never_killed, tmp_path):
    own, whole, w_of_rank = never_killed
    common = {"best": "max", "keep": 1, "own": own, "save_every": 1}
    train(2, tmp_path, **common, **stop)
    train(2, tmp_path, **common)
    assert steps_on_disk(tmp_path) == steps_on_disk(whole) == [6, STEPS]
    for rank in range(2):
        like = LIKE | ({"residual": np.zeros(2)} if own else {})
        mine, theirs = (
            jaxcross.load_checkpoint(f, "a", like, best=True, rank=rank * own)[0]
            for f in (tmp_path, whole)
        )
        same(mine, theirs)
        assert mine["w"].sum() == w_of_rank[rank]


@pytest.mark.integration
@pytest.mark.parametrize("moment", range(1, 28))
def test_a_kill_at_any_write_or_deletion_keeps_a_best(moment, tmp_path, monkeypatch):
    """If one rank's disk fails from some moment on, a newest and a best state remain on disk."""
    common = {"best": "max", "keep": 1, "save_every": 1, "own": True}
    left, commit, delete = [moment], Folders.commit, Folders.delete

    def counted(function):
        def call(self, *args):
            if self._rank == 1:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError("gone")
            return function(self, *args)

        return call

    monkeypatch.setattr(Folders, "commit", counted(commit))
    monkeypatch.setattr(Folders, "delete", counted(delete))
    with suppress(JobError, OSError):  # `OSError` if it was the very last deletion
        train(2, tmp_path / "c", **common)
    monkeypatch.undo()
    like = LIKE | {"residual": np.zeros(2)}
    if steps_on_disk(tmp_path / "c") and moment > 1:
        _, newest = jaxcross.load_checkpoint(tmp_path / "c", "a", like)
        if newest >= 2:
            _, step = jaxcross.load_checkpoint(tmp_path / "c", "a", like, best=True)
            assert step == max((s for s in SCORES if s <= newest), key=SCORES.__getitem__)
    train(2, tmp_path / "c", **common)
    assert steps_on_disk(tmp_path / "c") == [6, STEPS]


def test_deleted_best_state_is_reported(tmp_path, caplog):
    train(2, tmp_path, best="max", keep=1, after=7, save_every=1)
    shutil.rmtree(next((tmp_path / "a").glob("*06-*")))
    train(2, tmp_path, best="max", keep=1, save_every=1)
    assert "the checkpoint of its best state, of step 6, is gone" in caplog.text
    assert best_of(tmp_path)[1] == 10


def test_another_metric_begins_with_no_best(tmp_path):
    train(2, tmp_path, best="max", after=7)
    train(2, tmp_path, best="min")
    assert best_of(tmp_path)[1] == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"best": "m"}, "`mode` of the checkpoints must be 'min' or 'max'"),
        ({"mode": "min"}, "`mode` of the checkpoints must be None without `best`"),
        ({"best": 3, "mode": "min"}, "`best` of the checkpoints must be the name of a metric"),
    ],
)
def test_arguments_are_checked(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        Checkpoints("folder", **options)


def test_load_refuses_what_is_not_there(tmp_path, saved):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(JobError, match="has no checkpoint in .* that is complete on all ranks"):
            jaxcross.load_checkpoint(folder, "a", LIKE)
    like = LIKE | {"residual": np.zeros(2)}
    for rank in range(2):
        state, step = jaxcross.load_checkpoint(saved, "a", like, rank=rank)
        assert step == 8 and (state["residual"] == 2 * rank * (1 - 2**-9)).all()
    with pytest.raises(JobError, match="`rank` must be from 0 to 1, got 2"):
        jaxcross.load_checkpoint(saved, "a", like, rank=2)
    with pytest.raises(JobError, match="by another model .* What differs: .*residual"):
        jaxcross.load_checkpoint(saved, "a", LIKE)


@pytest.mark.mostly_integration("True-6")
@pytest.mark.parametrize(("own", "step"), [(False, 8), (True, 6)])
def test_load_needs_all_parts_only_if_ranks_differ(own, step, tmp_path):
    """Without rank-local leaves, rank 0's part holds the whole state, so it suffices."""
    train_plainly(2, tmp_path, names="a", own=own, steps=8)
    shutil.rmtree(newest(tmp_path) / "rank-0001")
    assert (
        jaxcross.load_checkpoint(tmp_path, "a", LIKE | ({"residual": np.zeros(2)} if own else {}))[
            1
        ]
        == step
    )


def test_load_refuses_a_damaged_file(tmp_path, saved):
    shutil.copytree(saved, tmp_path / "c")
    folder = max((tmp_path / "c/a").glob("0*"))
    file = max(
        (folder / "rank-0000/state").rglob("*"),
        key=lambda path: path.stat().st_size * path.is_file(),
    )
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(JobError, match="cannot be loaded from .* bytes, not"):
        jaxcross.load_checkpoint(tmp_path / "c", "a", LIKE | {"residual": np.zeros(2)})
