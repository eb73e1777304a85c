"""Damaged, incomplete or unreadable checkpoints: the previous one is used, or all ranks raise."""

import os
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest

from jaxcross.checkpoint import Checkpoints, Session, arrays
from jaxcross.checkpoint.folders import Folders
from jaxcross.errors import JobError
from tests.support.checkpoint_damage import flip, half_written, names, newest, refused
from tests.support.checkpoint_jobs import init, resumes, same, train
from tests.support.fakes import run_ranks


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def linked(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def emptied(path):
    path.write_bytes(b"")


DAMAGES = [flip, truncate, linked, emptied, os.remove]


def kinds(folder):
    """Returns one file of each kind."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found[re.sub(r"[0-9a-f]{32}", "...", str(path.relative_to(folder)))] = path
    return found


def restored(folder, ranks=2, job="a"):
    """Returns the state and step that each rank restores without a run, or None."""

    def work(world):
        session = Session(Checkpoints(folder), world, jobs=["a", "b"], policy="")
        checkpointer = session.checkpointer(job, note=lambda text: None)
        found = checkpointer.restore(init(world, own=True), lambda label, work: work(world.control))
        session.close()
        return found and (found[0], found[1].step)

    return run_ranks(ranks, work)


@pytest.mark.integration
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_any_damaged_file_falls_back_to_previous(damage, saved, tmp_path, caplog):
    before = train(2, None, own=True, steps=6)
    names = list(kinds(newest(saved)))
    assert len(names) >= 12 and "rank-0001/state/manifest.ocdbt" in names
    for n, name in enumerate(names):
        folder = tmp_path / str(n)
        shutil.copytree(saved / "a", folder / "a")
        damage(kinds(newest(folder))[name])
        caplog.clear()
        for (state, step), rank in zip(restored(folder), before, strict=True):
            assert step == 6
            same(state, rank["a"][0])
        assert any(newest(saved).name in text for text in resumes(caplog)), name


def test_damaged_checkpoint_is_deleted_after_a_better(saved, whole, tmp_path):
    shutil.copytree(saved, folder := tmp_path / "copy")
    flip(newest(folder) / "rank-0001/state/manifest.ocdbt")
    for mine, theirs in zip(train(2, folder, own=True), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert (min(mine["a"][2]), min(mine["b"][2])) == (7, 9)
    assert newest(saved).name not in [path.name for path in (folder / "a").iterdir()]


def test_a_file_too_many_is_no_part_of_it(saved, whole, tmp_path, caplog):
    shutil.copytree(saved, folder := tmp_path / "copy")
    (newest(folder) / "rank-0000/state/d/more").write_text("")
    assert min(train(2, folder, own=True)[0]["a"][2]) == 7
    assert "does not belong to the checkpoint" in "".join(resumes(caplog))


def test_what_was_half_written_is_not_used(saved, whole, tmp_path, caplog):
    shutil.copytree(saved, folder := tmp_path / "copy")
    shutil.rmtree(newest(folder) / "rank-0001")
    for mine, theirs in zip(train(2, folder, own=True), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert min(mine["a"][2]) == 7
    assert "it was not written completely" in "".join(resumes(caplog))


@pytest.mark.mostly_integration(
    "rank-0000/part.json-flip",
    "rank-0000/part.json-truncate",
    "rank-0000/part.json-linked",
    "rank-0001/part.json-flip",
    "rank-0001/part.json-remove",
)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    "file", ["rank-0000/part.json", "rank-0001/part.json", "rank-0001/state/manifest.ocdbt"]
)
def test_no_intact_checkpoint_prevents_a_fresh_start(file, damage, saved, tmp_path):
    """A job whose checkpoints are all damaged raises instead of starting from scratch."""
    shutil.copytree(saved / "a", tmp_path / "a")
    for path in (tmp_path / "a").glob(f"0*/{file}"):
        damage(path)
    said = ".*".join(
        rf"`{name}`: on rank {file[8]}, `.*{file[10:14]}" for name in reversed(names(saved))
    )
    refused(
        2, tmp_path, rf"none of them is intact any more.*move `{tmp_path}/a` away.*{said}", own=True
    )
    assert names(tmp_path) == names(saved)


def test_moving_the_folder_away_allows_a_fresh_start(saved, whole, tmp_path):
    """A job whose checkpoint folder was moved away starts from scratch."""
    shutil.copytree(saved, folder := tmp_path / "copy")
    for part in folder.glob("a/*/rank-0000/part.json"):
        flip(part)
    (folder / "a").rename(tmp_path / "away")
    mine = train(2, folder, own=True)
    same(mine[1]["a"][0], whole[1]["a"][0])
    assert min(mine[0]["a"][2]) == 1


def test_rank_with_an_empty_disk_does_not_start_over(tmp_path):
    """One disk is empty, e.g. after a node was replaced, but the other shows what was complete."""
    train(2, lambda rank: tmp_path / str(rank), own=True, steps=8)
    before = names(tmp_path / "1")
    shutil.rmtree(tmp_path / "0")
    with pytest.raises(
        JobError,
        match=rf"none of them is intact.*`{before[-1]}`: on rank 0, all of its files are missing",
    ):
        train(2, lambda rank: tmp_path / str(rank), own=True)
    assert names(tmp_path / "1") == before


def test_what_was_never_whole_lets_the_job_begin_anew(whole, tmp_path, caplog):
    for _ in range(2):
        half_written(tmp_path)
    assert len(names(tmp_path)) > 1
    mine = train(2, tmp_path, own=True, names="a")
    same(mine[1]["a"][0], whole[1]["a"][0])
    assert min(mine[0]["a"][2]) == 1
    assert "was ever complete: the job starts from scratch" in "".join(resumes(caplog))
    assert [int(name[:12]) for name in names(tmp_path)] == [9, 12]


def test_deleted_checkpoints_are_forgotten(saved, tmp_path):
    shutil.copytree(saved, folder := tmp_path / "copy")
    for name in names(folder):
        shutil.rmtree(folder / "a" / name)
    half_written(folder)
    assert min(train(2, folder, own=True, names="a")[0]["a"][2]) == 1


TROUBLES = [
    (Folders, "read", OSError(5, "Input/output error")),
    (Path, "lstat", PermissionError(13, "Permission denied")),
    (Path, "read_bytes", TimeoutError(110, "Connection timed out")),
    (Folders, "names", OSError(116, "Stale file handle")),
    (Folders, "check_files", OSError(5, "Input/output error")),
    (arrays, "read", MemoryError("no more")),
    (arrays, "read", ValueError("INTERNAL: read of 4096 bytes failed")),
]


@pytest.mark.mostly_integration("Path-lstat-[Errno 13] Permission denied")
@pytest.mark.parametrize(
    ("owner", "method", "error"), TROUBLES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_read_error_is_not_treated_as_damage(owner, method, error, saved, whole, tmp_path):
    """A read error occurs once, on one rank's disk."""
    shutil.copytree(saved, folder := tmp_path / "copy")
    real = getattr(owner, method)

    def failing(*args, **kwargs):
        first = args[0]._rank if isinstance(args[0], Folders) else str(args[0])
        if first == 1 or (isinstance(first, str) and "rank-0001" in first):
            raise error
        return real(*args, **kwargs)

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with mock.patch.object(owner, method, failing):
        said = rf"{type(error).__name__}: .*{re.escape(str(error.args[-1]))}"
        refused(
            2,
            folder,
            rf"cannot be read now.*none was deleted.*, on rank 1: in `{folder}/a.*, {said}",
            own=True,
        )
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == files
    for mine, theirs in zip(train(2, folder, own=True), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert min(mine["a"][2]) == 9


@pytest.mark.parametrize(
    "read", [lambda f: f.read("000000000003-0000000000000000"), lambda f: f.marked("left")]
)
def test_errors_of_reading_name_the_file(read, tmp_path):
    folders = Folders(tmp_path, rank=0, ranks=1)
    folders.part_path("000000000003-0000000000000000").mkdir(parents=True)
    (folders.part_path("000000000003-0000000000000000") / "part.json").write_text("{}")
    folders.mark("left", "ended")
    failing = mock.Mock(side_effect=OSError(5, "Input/output error"))
    with (
        mock.patch.multiple(Path, read_bytes=failing, open=failing),
        pytest.raises(OSError, match=rf"\[Errno 5\] .*'{tmp_path}/.*(part.json|left-0000)'"),
    ):
        read(folders)


def test_unreadable_mark_is_not_treated_as_absent(saved, tmp_path):
    shutil.copytree(saved, folder := tmp_path / "copy")
    real = Folders.marked

    def marked(self, what):
        if (self._rank, what) == (1, "left"):
            raise OSError(5, "Input/output error")
        return real(self, what)

    with mock.patch.object(Folders, "marked", marked):
        refused(2, folder, r"cannot be read now.*, on rank 1: OSError: \[Errno 5\]", own=True)


def test_damaged_checkpoint_stays_until_one_is_whole(saved, tmp_path):
    shutil.copytree(saved, folder := tmp_path / "copy")
    flip(newest(folder) / "rank-0001/state/manifest.ocdbt")
    half_written(folder)
    assert newest(saved).name in names(folder)
    assert (folder / "a" / newest(saved).name / "rank-0000/part.json").is_file()


@pytest.mark.integration
def test_where_all_was_equal_rank_0_is_enough(tmp_path):
    whole = train(2, None)
    train(2, tmp_path, steps=8)
    shutil.rmtree(newest(tmp_path) / "rank-0001")
    for mine, theirs in zip(train(2, tmp_path), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert min(mine["a"][2]) == 9
