"""Tests that files are either complete or unchanged, and the lock that shows if another process has
one.
"""

import errno
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from jaxcross._files import (
    TIME,
    check_placeholders,
    lock,
    replacing,
    start_time,
    with_time,
    write_whole,
)


@pytest.mark.parametrize("content", ["text\r\n", b"\x00bytes"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_file_is_replaced_and_no_draft_left(tmp_path, content, shared):
    path = tmp_path / "a.json"
    for _ in range(2):
        write_whole(path, content, shared=shared)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    write_whole(path, "old")

    def write():
        with replacing(path) as file:
            file.write("ne")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        write()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_content_and_name_are_on_disk_in_this_order(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    write_whole(tmp_path / "a", "x")
    assert synced == [str(tmp_path / "a.new"), str(tmp_path)]
    write_whole(tmp_path / "a", "y", durable=False)
    assert len(synced) == 2


@pytest.mark.parametrize(("number", "kept"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_disk_that_does_not_sync_folders_will_do(tmp_path, monkeypatch, number, kept):
    """A file system that can't sync folders isn't an error, but a disk that fails is one.

    When we sync the folder, the file already has its new content. If the file system doesn't
    support that, there's nothing else that we could do.
    """
    whole = os.fsync

    def fsync(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        whole(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with nullcontext() if kept else pytest.raises(OSError, match=os.strerror(number)):
        write_whole(tmp_path / "a", "x")


def test_another_process_has_the_lock(tmp_path):
    code = f"""
from jaxcross._files import lock
file = open({str(tmp_path / "a")!r}, "w")
print(lock(file), flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with (tmp_path / "a").open("w") as file:
            assert not lock(file)
            other.communicate("\n")
            assert lock(file)


def test_a_disk_without_locks_is_nobodys(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    with (tmp_path / "a").open("w") as file:
        assert lock(file)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("runs", "runs"),
        ("runs/{time}/{time}-b", "runs/T/T-b"),
        ("a}b{", "a}b{"),
        ("{a/b}", "{a/b}"),
    ],
)
def test_the_time_is_part_of_a_folders_name(name, path):
    assert with_time(name, {TIME: "T"}) == with_time(Path(name), {TIME: "T"}) == Path(path)


@pytest.mark.parametrize("name", ["runs/{date}", "{}", "{time}/{rank}"])
def test_other_placeholders_are_refused(name):
    for check in (check_placeholders, lambda name: with_time(name, {TIME: "T"})):
        with pytest.raises(ValueError, match="which can't be replaced. The only placeholder in"):
            check(name)


def test_a_process_that_does_not_know_the_time_says_so():
    with pytest.raises(ValueError, match="give an existing folder by its actual name"):
        with_time("runs/{time}", {})


def test_the_time_sorts_as_text():
    first, second = start_time(), start_time()
    assert re.fullmatch(r"\d{8}-\d{6}-\d{3}", first) and first <= second
