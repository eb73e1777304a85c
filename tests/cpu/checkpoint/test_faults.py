"""Checkpoints that are damaged, half written or not what they say: the one before is used, or all ranks say why not."""

import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross import _pytree
from jaxcross.checkpoint import Checkpoints, Session, arrays
from jaxcross.checkpoint.layout import Folders, folder_name
from jaxcross.checkpoint.part import Part, SavedLeaf, UnknownFormatError, UnusableError, parse, to_text
from jaxcross.errors import JobError
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import STEPS, batches, init, loop, make_step, resumes, same, train
from tests.support.fakes import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two jobs' checkpoints after steps 3, 6 and 8, of 2 ranks that each had leaves of its own."""
    folder = tmp_path_factory.mktemp("saved")
    train(2, folder, own=True, steps=8, keep=3)
    return folder


@pytest.fixture(scope="module")
def whole():
    return train(2, None, own=True)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def linked(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def emptied(path):
    path.write_bytes(b"")


DAMAGES = [flip, truncate, linked, emptied, os.remove]


def newest(folder, job="a"):
    return max(path for path in (folder / job).iterdir() if path.is_dir())


def kinds(folder):
    """One file of each kind."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found[re.sub(r"[0-9a-f]{32}", "...", str(path.relative_to(folder)))] = path
    return found


def restored(folder, ranks=2, job="a"):
    """What each rank restores, without a run: state and step, or None."""

    def work(world):
        session = Session(Checkpoints(folder), world, jobs=["a", "b"], policy="")
        checkpointer = session.checkpointer(job, note=lambda text: None)
        found = checkpointer.restore(init(world, own=True), lambda label, work: work(world.control))
        session.close()
        return found and (found[0], found[1].step)

    return run_ranks(ranks, work)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_after_any_damage_to_any_file_the_one_before_is_used(damage, saved, tmp_path, caplog):
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


def test_a_damaged_checkpoint_is_deleted_once_there_is_a_better_one(saved, whole, tmp_path):
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
    assert "is not a part of it" in "".join(resumes(caplog))


def test_what_was_half_written_is_not_used(saved, whole, tmp_path, caplog):
    shutil.copytree(saved, folder := tmp_path / "copy")
    shutil.rmtree(newest(folder) / "rank-0001")
    for mine, theirs in zip(train(2, folder, own=True), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert min(mine["a"][2]) == 7
    assert "it was not written to its end" in "".join(resumes(caplog))


def names(folder, job="a"):
    return sorted(path.name for path in (folder / job).glob("0*"))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("file", ["rank-0000/part.json", "rank-0001/part.json", "rank-0001/state/manifest.ocdbt"])
def test_with_no_checkpoint_whole_any_more_the_job_does_not_begin_anew(file, damage, saved, tmp_path):
    shutil.copytree(saved / "a", tmp_path / "a")
    for path in (tmp_path / "a").glob(f"0*/{file}"):
        damage(path)
    said = ".*".join(rf"`{name}`: on rank {file[8]}, `.*{file[10:14]}" for name in reversed(names(saved)))
    refused(2, tmp_path, rf"none of them is whole any more.*move `{tmp_path}/a` away.*{said}", own=True)
    assert names(tmp_path) == names(saved)


def test_a_folder_that_was_moved_away_lets_the_job_begin_anew(saved, whole, tmp_path):
    shutil.copytree(saved, folder := tmp_path / "copy")
    for part in folder.glob("a/*/rank-0000/part.json"):
        flip(part)
    (folder / "a").rename(tmp_path / "away")
    mine = train(2, folder, own=True)
    same(mine[1]["a"][0], whole[1]["a"][0])
    assert min(mine[0]["a"][2]) == 1


def test_a_rank_whose_disk_is_empty_does_not_begin_anew(tmp_path):
    """A node was replaced, say. What was once whole is known from the other rank's disk."""
    train(2, lambda rank: tmp_path / str(rank), own=True, steps=8)
    before = names(tmp_path / "1")
    shutil.rmtree(tmp_path / "0")
    with pytest.raises(JobError, match=rf"none of them is whole.*`{before[-1]}`: on rank 0, nothing of it is there"):
        train(2, lambda rank: tmp_path / str(rank), own=True)
    assert names(tmp_path / "1") == before


def half_written(folder, **kwargs):
    """The first write of job `a` fails on rank 1."""
    write = Folders.commit

    def commit(self, name, part):
        if part.rank == 1:
            raise OSError(28, "No space left on device")
        write(self, name, part)

    with mock.patch.object(Folders, "commit", commit):
        refused(2, folder, "could not be saved, on rank 1", own=True)


def test_what_was_never_whole_lets_the_job_begin_anew(whole, tmp_path, caplog):
    for _ in range(2):
        half_written(tmp_path)
    assert len(names(tmp_path)) > 1
    mine = train(2, tmp_path, own=True, names="a")
    same(mine[1]["a"][0], whole[1]["a"][0])
    assert min(mine[0]["a"][2]) == 1
    assert "was ever written to its end: the job starts from its beginning" in "".join(resumes(caplog))
    assert [int(name[:12]) for name in names(tmp_path)] == [9, 12]


def test_checkpoints_that_somebody_deleted_are_forgotten(saved, tmp_path):
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


@pytest.mark.parametrize(("owner", "method", "error"), TROUBLES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_what_cannot_be_read_now_is_not_taken_for_damage(owner, method, error, saved, whole, tmp_path):
    """One rank's disk answers with an error, once."""
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
        refused(2, folder, rf"cannot be read now.*none was deleted.*, on rank 1: in `{folder}/a.*, {said}", own=True)
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == files
    for mine, theirs in zip(train(2, folder, own=True), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert min(mine["a"][2]) == 9


@pytest.mark.parametrize("read", [lambda f: f.read("000000000003-0000000000000000"), lambda f: f.marked("left")])
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


def test_a_mark_that_cannot_be_read_is_not_taken_for_none(saved, tmp_path):
    shutil.copytree(saved, folder := tmp_path / "copy")
    real = Folders.marked

    def marked(self, what):
        if (self._rank, what) == (1, "left"):
            raise OSError(5, "Input/output error")
        return real(self, what)

    with mock.patch.object(Folders, "marked", marked):
        refused(2, folder, r"cannot be read now.*, on rank 1: OSError: \[Errno 5\]", own=True)


def test_what_is_damaged_stays_until_a_newer_one_is_whole(saved, tmp_path):
    shutil.copytree(saved, folder := tmp_path / "copy")
    flip(newest(folder) / "rank-0001/state/manifest.ocdbt")
    half_written(folder)
    assert newest(saved).name in names(folder)
    assert (folder / "a" / newest(saved).name / "rank-0000/part.json").is_file()


def test_where_all_was_equal_rank_0_is_enough(tmp_path):
    whole = train(2, None)
    train(2, tmp_path, steps=8)
    shutil.rmtree(newest(tmp_path) / "rank-0001")
    for mine, theirs in zip(train(2, tmp_path), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert min(mine["a"][2]) == 9


def refused(ranks, folder, match, fn=loop, **kwargs):
    """The job fails on every rank, with this text."""

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(folder))
        job = runner.add("a", fn, world=world, data=batches(world), **kwargs)
        with pytest.raises(JobError, match=match):
            runner.run()
        return job.step

    return run_ranks(ranks, work)


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
    with mock.patch("jaxcross.checkpoint.part.FORMAT", 2):
        refused(2, tmp_path, "another version of jaxcross wrote.*rank-0000")


def test_a_job_restores_once_and_before_it_saves(tmp_path):
    refused(1, tmp_path, "restores twice", fn=lambda job, **_: [job.restore({}), job.restore({})])
    refused(1, tmp_path, "has not called `job.restore`", fn=lambda job, **_: job.save({"w": 1}))


def test_only_what_a_restart_could_use_is_saved(tmp_path, caplog):
    def fn(job, world, data):
        state = job.restore(init(world, own=False))
        for batch in job.batches(data, 2):
            state = make_step(world)(state, batch)
        job.save(state | {"more": 1})

    refused(2, tmp_path, r"cannot save this state, on rank 0: it is not like .* it has a leaf `\['more'\]`", fn=fn)
    refused(2, tmp_path, "texts", fn=lambda job, **_: job.restore({"w": "text"}))


def test_a_function_that_returns_something_else_leaves_its_last_save(tmp_path, caplog):
    def fn(job, world, data, steps):
        loop(job, world, data, steps=steps)
        return {"accuracy": 0.5}

    train(2, tmp_path, names="a", fn=fn, steps=8)
    assert newest(tmp_path).name.startswith("000000000006-")
    assert "its last state is not saved" in "".join(resumes(caplog))


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("step", [3, STEPS])
def test_a_disk_that_fails_on_one_rank_ends_the_job_on_all(bad, step, tmp_path):
    write = Folders.commit

    def commit(self, name, part):
        if part.rank == bad and part.step == step:
            raise OSError(28, "No space left on device")
        write(self, name, part)

    with mock.patch.object(Folders, "commit", commit):
        steps = refused(2, tmp_path, f"could not be saved, on rank {bad}: OSError: .*No space left")
    assert steps == [min(step + 3, STEPS)] * 2  # the next save tells
    whole = train(2, None, names="a")
    for mine, theirs in zip(train(2, tmp_path, names="a"), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    def work(world):
        directory = tmp_path / "file/checkpoints" if world.rank else tmp_path / "fine"
        runner = Runner(world, checkpoints=Checkpoints(directory))
        runner.add("a", loop, world=world, data=batches(world))
        with pytest.raises(JobError, match="^Checkpoints cannot be kept in .*, on rank 1: .*Not a directory"):
            runner.run()

    run_ranks(2, work)


def test_ranks_must_want_the_same_checkpoints(tmp_path):
    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(tmp_path) if world.rank else None)
        runner.add("a", loop, world=world, data=batches(world))
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
     ({"directory": 3}, TypeError, "`directory` of the checkpoints must be the path of a folder, got 3"),
     ({"directory": ""}, ValueError, "`directory` of the checkpoints is empty")],
)  # fmt: skip
def test_settings_that_make_no_sense(arguments, kind, said):
    with pytest.raises(kind, match=f"^{said}"):
        Checkpoints(**{"directory": "x", **arguments})


def test_settings_may_be_numpys():
    given = Checkpoints("x", every=np.int64(2), keep=np.int32(1))
    assert json.dumps([given.every, given.keep]) == "[2, 1]"


# What a stranger might write.

FORM = _pytree.Form(kind="numpy", dtype="float32", shape=(2, 3))
PART_0 = Part(
    job="a", step=3, rank=0, ranks=2, leaves={"['w']": SavedLeaf(form=FORM, digest="d", common=True)},
    files={"manifest.ocdbt": (3, "d")}, places=((3, None), (2, '{"value": 1}')), cuts={"x": 4},
    environment={"jax": "0"},
)  # fmt: skip


def test_a_part_says_what_it_was_told():
    assert parse(to_text(PART_0)) == PART_0


def parsed(text):
    try:
        return parse(text)
    except (UnusableError, UnknownFormatError):
        return None


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_any_change_to_a_part_is_noticed(data):
    text = to_text(PART_0)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    assert parsed(changed) in (None, PART_0)  # a blank more changes nothing


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.text() | JSON.map(json.dumps))
@settings(deadline=None, max_examples=100)
def test_other_texts_are_no_parts(text):
    assert parsed(text) is None


def places_in(tree, path=()):
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places_in(value, (*path, key))


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_forged_part_is_refused_or_means_something_of_the_right_types(data):
    """One with a digest of its own: whatever stands in it, nothing else than these errors comes out."""
    body = json.loads(to_text(PART_0))
    del body["digest"], body["format"]
    path = data.draw(st.sampled_from([path for path in places_in(body) if path]))
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(JSON | st.sampled_from([-1, 2**63, 2**70, "O", "V8", "f4,f4", "../x", "object", 1e300]))
    with mock.patch("jaxcross.checkpoint.part.asdict", return_value=body):
        part = parsed(to_text(PART_0))
    if part is not None:
        for saved in part.leaves.values():
            assert all(0 <= size < 2**48 for size in saved.form.shape)
            assert _pytree.numeric(np.dtype(saved.form.dtype))


def test_texts_that_are_too_deep_or_too_long_are_no_parts(tmp_path):
    assert parsed("[" * 100_000) is None
    assert parsed('{"digest": ' + "9" * 10_000 + "}") is None
    folders = Folders(tmp_path, rank=0, ranks=1)
    folders.part_path("000000000003-0000000000000000").mkdir(parents=True)
    with (folders.part_path("000000000003-0000000000000000") / "part.json").open("wb") as file:
        file.truncate(2**40)  # holds no blocks
    with pytest.raises(UnusableError, match="more than any part"):
        folders.read("000000000003-0000000000000000")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (_pytree.Form(kind="numpy", dtype="float32", shape=(2**40,)), r"holds `x` as float32\[3\]"),
        (_pytree.Form(kind="numpy", dtype="int32", shape=(3,)), r"holds `x` as float32\[3\]"),
        (_pytree.Form(kind="numpy", dtype="float32", shape=()), r"holds `x` as float32\[3\]"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(form, said, tmp_path):
    arrays.write(tmp_path / "state", {"x": np.zeros(3, np.float32)})
    with pytest.raises(UnusableError, match=said):
        arrays.read(tmp_path / "state", {"x": form})
    with pytest.raises(UnusableError, match="other arrays"):
        arrays.read(tmp_path / "state", {"y": form})


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
@settings(deadline=None, max_examples=100)
def test_each_job_has_a_folder_of_its_own(jobs):
    one, other = map(folder_name, jobs)
    assert one != other
    for name in (one, other):
        assert "/" not in name and not name.startswith(".") and len(name.encode()) < 250


def test_a_job_cannot_take_the_place_of_the_set_s_own_file(tmp_path):
    names = ("jobs.json", "jobs.json.draft", "left-0000")
    first = train(2, tmp_path, names=names, after=7)
    assert (tmp_path / "jobs.json").is_file()
    again, _ = train(2, tmp_path, names=names)
    assert [again[name][1] for name in names] == [STEPS] * 3 and [first[0][name][1] for name in names] == [7] * 3


def test_what_lies_in_the_way_of_a_deletion_stays(tmp_path):
    """A file where a part's folder should be, and a folder where its text should be."""
    train(2, tmp_path, steps=3)
    for number, place in enumerate(("rank-0000", "rank-0001/part.json/x")):
        path = tmp_path / "a" / f"{number:012d}-{number:016x}" / place
        path.parent.mkdir(parents=True)
        path.write_text("no part")
    again, _ = train(2, tmp_path)
    assert again["a"][1] == STEPS
    assert sum(path.is_file() and path.read_text() == "no part" for path in (tmp_path / "a").glob("0*/rank*")) == 1


def test_parts_on_other_ranks_disks_are_refused(tmp_path):
    """Nodes in another order: to begin anew would lose the night."""
    train(3, lambda rank: tmp_path / str(rank), own=True, steps=8)
    with pytest.raises(JobError, match="that of rank 0 on rank 1's disk, that of rank 1 on rank 0's disk"):
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
