"""One cache level: its budget, checksums, crashes, full disks, and several processes."""

import errno
import logging
import os
import signal
import subprocess
import threading
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross.data.cache import page_store
from jaxcross.data.cache.next_use import NEVER, PAGE_BYTES
from tests.support import warm_python
from tests.support.examples import scaled
from tests.support.page_stores import BUDGET, RECORDS, content, open_store

ROOT = Path(__file__).parents[3]


def file_bytes(folder):
    return sum((folder / name).stat().st_size for name in ("data", "pages"))


def kept(store, pages=3):
    """Returns the records that are present, after checking that each is intact."""
    found = [
        number
        for number in range(RECORDS)
        if (blob := store.get(number)) is not None and blob == content(number, pages)
    ]
    assert found == [number for number in range(RECORDS) if number in store]
    return found


def free_pages(store):
    """Returns the number of free pages, after checking it against a recount from the rows."""
    with store._locked():  # recounts if a process was killed
        counted = int(store._header[page_store.FREE])
        store._header[page_store.DIRTY] = 1
    with store._locked():
        assert int(store._header[page_store.FREE]) == counted
    return counted


@settings(max_examples=scaled(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, RECORDS - 1), st.integers(1, 60_000)), max_size=60),
    st.integers(0, 2**32 - 1),
)
def test_any_records_in_any_order(tmp_path_factory, offers, seed):
    """What's stored is what was put, and neither pages nor files ever exceed the budget."""
    folder = tmp_path_factory.mktemp("store")
    random = Random(
        seed
    )  # draws of `st.randoms()` are part of the example, which is limited in size
    distance = [random.randrange(100) for _ in range(RECORDS)]
    store = open_store(
        folder,
        distances=lambda numbers: np.array([distance[number] for number in numbers], np.int64),
    )
    put = {}
    for number, nbytes in offers:
        if number not in put or store.get(number) is None:
            put[number] = random.randbytes(nbytes)
            assert store.put(number, put[number]) == (store.get(number) == put[number])
        assert file_bytes(folder) <= BUDGET
        assert store.usage()[1] <= BUDGET
    assert all(store.get(number) in (None, blob) for number, blob in put.items())
    free_pages(store)
    store.close()


def test_what_is_needed_last_is_dropped_first(tmp_path):
    store = open_store(tmp_path)
    for number in range(20, 33):
        assert store.put(number, content(number))
    assert store.put(5, content(5))
    assert kept(store) == [5, *range(20, 32)]
    assert not store.put(40, content(40))
    assert kept(store) == [5, *range(20, 32)]


def test_a_copy_replaces_what_no_stream_needs(tmp_path):
    """With one stream, a copy replaces nothing else; with several, also records needed later."""
    needed, more_streams = np.array([NEVER, 90, 80, 5, 5]), []
    store = open_store(
        tmp_path,
        16 * PAGE_BYTES,
        lambda numbers: needed[numbers],
        several=lambda: bool(more_streams),
    )
    for number in range(3):
        assert store.put(number, content(number, 5))
    assert store.put_copy(3, content(3, 5)) and 0 not in store
    assert not store.put_copy(4, content(4, 5)) and kept(store, 5) == [1, 2, 3]
    more_streams.append(1)
    assert store.put_copy(4, content(4, 5)) and 1 not in store
    assert store.get(4) == content(4, 5)
    store.close()


def test_a_record_larger_than_the_level(tmp_path):
    store = open_store(tmp_path)
    assert not store.put(0, bytes(BUDGET))
    assert not store.put(1, b"")
    assert store.usage() == (0, 0)


def test_the_next_run_finds_the_records(tmp_path):
    store = open_store(tmp_path)
    assert all(store.put(number, content(number)) for number in range(5))
    store.close()
    again = open_store(tmp_path)
    assert kept(again) == [0, 1, 2, 3, 4]
    assert again.usage() == (5, 15 * PAGE_BYTES)
    assert free_pages(again) == again.n_pages - 15


def test_a_smaller_budget_keeps_what_fits(tmp_path):
    store = open_store(tmp_path)
    assert all(store.put(number, content(number)) for number in range(12))
    store.close()
    again = open_store(tmp_path, BUDGET // 2)
    assert 3 <= len(kept(again)) <= 6
    assert file_bytes(tmp_path) <= BUDGET // 2
    again.close()
    assert 3 <= len(kept(open_store(tmp_path, 2 * BUDGET))) <= 6


def test_another_budget_while_in_use_is_refused(tmp_path):
    store = open_store(tmp_path)
    store.put(0, content(0))
    with pytest.raises(
        ValueError, match="is in use by another process with another budget than `disk_bytes="
    ):
        open_store(tmp_path, 2 * BUDGET)
    assert kept(store) == [0]
    assert kept(open_store(tmp_path)) == [0]


def test_a_budget_of_a_few_pages_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^`disk_bytes` must be 0 or at least 65536, got 1000"):
        open_store(tmp_path, 1000)


@pytest.mark.parametrize("where", [0, PAGE_BYTES - 1, 5 * PAGE_BYTES + 7])
def test_a_flipped_byte_is_found_and_dropped(tmp_path, where):
    store = open_store(tmp_path)
    assert all(store.put(number, content(number)) for number in range(3))
    with (tmp_path / "data").open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 16]))
    assert store.get(where // (3 * PAGE_BYTES)) is None
    assert store.damaged == 1
    assert len(kept(store)) == 2
    number = where // (3 * PAGE_BYTES)
    assert store.put(number, content(number))
    assert kept(store) == [0, 1, 2]
    assert free_pages(store) == store.n_pages - 9


def test_a_truncated_file_is_found_and_dropped(tmp_path):
    store = open_store(tmp_path)
    assert all(store.put(number, content(number)) for number in range(5))
    os.truncate(tmp_path / "data", 7 * PAGE_BYTES)
    assert [number for number in range(5) if store.get(number) is not None] == [0, 1]
    assert store.damaged == 3
    assert free_pages(store) == store.n_pages - 6


@pytest.mark.parametrize("name", ["rows", "pages"])
@pytest.mark.parametrize("damage", ["garbage", "zeros", "truncated", "missing"])
def test_a_damaged_index_gives_no_wrong_record(tmp_path, name, damage):
    store = open_store(tmp_path)
    assert all(store.put(number, content(number)) for number in range(8))
    store.close()
    path = tmp_path / name
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "garbage": np.random.default_rng(0).bytes(size),
                "zeros": bytes(size),
                "truncated": path.read_bytes()[:40],
            }[damage]
        )
    again = open_store(tmp_path)
    assert len(kept(again)) <= 8
    for number in range(RECORDS):
        again.put(number, content(number))
    assert len(kept(again)) == again.n_pages // 3
    free_pages(again)


@settings(max_examples=scaled(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["rows", "pages", "data"]),
            st.floats(0, 1, exclude_max=True),
            st.integers(0, 255),
        ),
        max_size=8,
    )
)
def test_any_damaged_bytes_give_no_wrong_record(tmp_path_factory, damages):
    folder = tmp_path_factory.mktemp("store")
    store = open_store(folder)
    assert all(store.put(number, content(number)) for number in range(10))
    store.close()
    for name, share, byte in damages:
        with (folder / name).open("r+b") as file:
            file.seek(int(share * (folder / name).stat().st_size))
            file.write(bytes([byte]))
    again = open_store(folder)
    for number in range(20):
        assert again.get(number) in (None, content(number))
        again.put(number, content(number))
    kept(again)
    free_pages(again)
    again.close()


def test_another_data_sets_record_is_not_taken(tmp_path):
    store = open_store(tmp_path)
    assert store.put(0, content(0), salt=1)
    assert store.get(0, salt=1) == content(0)
    assert store.get(0, salt=2) is None
    assert 0 not in store


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_turns_it_off_with_one_warning(tmp_path, monkeypatch, caplog, number):
    store = open_store(tmp_path)
    assert store.put(0, content(0))

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(page_store.os, "pwrite", fail)
    with caplog.at_level(logging.WARNING):
        assert not store.put(1, content(1))
        assert not store.put(2, content(2))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (
        os.strerror(number) in caplog.text
        and "`disk` in" in caplog.text
        and "smaller `disk_bytes`" in caplog.text
    )
    assert store.is_off
    assert kept(store) == [0]


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from jaxcross.data.cache import page_store
from jaxcross.data.cache.page_store import PageStore
from tests.support.page_stores import content, open_store
store = open_store(Path(sys.argv[1]))
calls = 0
def bomb(real):
    def call(*arguments):
        global calls
        calls += 1
        if calls == 25:
            if real is os.pwrite:
                real(arguments[0], bytes(arguments[1])[:100], arguments[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call
places = {
    "pwrite": (os, "pwrite"),
    "crc": (page_store.zlib, "crc32"),
    "row": (page_store, "_check"),
    "drop": (PageStore, "_chain"),
}
owner, name = places[sys.argv[2]]
setattr(owner, name, bomb(getattr(owner, name)))
for number in range(63, -1, -1):
    store.put(number, content(number))
"""


@pytest.mark.integration
@pytest.mark.parametrize("place", ["pwrite", "crc", "row", "drop"])
def test_kill_while_writing_leaves_whole_records(tmp_path, place):
    """Kills amid a record's bytes, before its row, and while others are dropped for it."""
    store = open_store(tmp_path)
    command = [*warm_python.COMMAND, "-c", KILLED, str(tmp_path), place]
    done = subprocess.run(command, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert len(kept(store)) >= 1
    free_pages(store)
    for number in range(RECORDS):
        store.put(number, content(number))
    assert len(kept(store)) == store.n_pages // 3
    store.close()
    assert len(kept(open_store(tmp_path))) == store.n_pages // 3


FILLS = """
import sys
from pathlib import Path
from tests.support.page_stores import content, open_store
store = open_store(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.readline()
for turn in range(4):
    for number in range(64):
        key = (number * 7 + turn * int(sys.argv[2])) % 64
        store.put(key, content(key))
        blob = store.get(number)
        assert blob in (None, content(number))
assert store.damaged == 0
"""


@pytest.mark.integration
def test_processes_fill_one_level_together(tmp_path):
    """Processes drop records that others are reading, yet only whole records are read."""
    store = open_store(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [
        subprocess.Popen(
            [*warm_python.COMMAND, "-c", FILLS, str(tmp_path), str(n)], cwd=ROOT, **pipes
        )
        for n in (1, 5, 11)
    ]
    assert [child.stdout.readline() for child in children] == ["open\n"] * 3
    for child in children:
        child.communicate("\n", timeout=120)
    assert [child.returncode for child in children] == [0, 0, 0]
    assert kept(store) == list(range(store.n_pages // 3))
    free_pages(store)
    assert file_bytes(tmp_path) <= BUDGET


def test_a_store_closes_behind_a_write(tmp_path, monkeypatch):
    """A thread that stores a record never writes to a file that reuses the descriptor."""
    store, write = open_store(tmp_path / "level"), page_store._write
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        assert go_on.wait(30)
        write(*args)

    monkeypatch.setattr(page_store, "_write", slow)
    writer = threading.Thread(target=store.put, args=(1, b"x" * 9000))
    writer.start()
    assert begun.wait(30)
    closer = threading.Thread(target=store.close)
    closer.start()
    go_on.set()
    for thread in (writer, closer):
        thread.join(30)
    mine = [os.open(tmp_path / f"mine-{n}", os.O_RDWR | os.O_CREAT) for n in range(8)]
    assert not store.put(2, b"y" * 9000)
    assert store.get(1) is None
    assert [os.fstat(fd).st_size for fd in mine] == [0] * 8
    for fd in mine:
        os.close(fd)


def test_a_store_may_be_closed_while_a_record_is_looked_up(tmp_path):
    """Another thread closes the store between two accesses to its rows."""
    store = open_store(tmp_path / "level")
    store.put(3, content(3))
    rows = store._rows

    class Closing:
        """Rows whose store is closed after the first access."""

        def __len__(self):
            store.close()
            return len(rows)

        def __getitem__(self, where):
            return rows[where]

    store._rows = Closing()
    assert 3 in store
    assert 3 not in store


def test_a_file_that_the_disk_has_no_place_for_keeps_its_size(tmp_path, monkeypatch):
    """With a grown file, the next process would map it and die from SIGBUS."""
    path = tmp_path / "rows"
    path.write_bytes(b"x" * 100)

    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(page_store.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        page_store._resize(path, 5000)
    assert path.read_bytes() == b"x" * 100


def test_a_store_that_cannot_be_opened_leaves_no_descriptor(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(errno.ENOMEM, "no memory to map it")

    open_store(tmp_path / "level").close()
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(page_store, "_map", broken)
    with pytest.raises(OSError, match="no memory"):
        open_store(tmp_path / "level")
    assert set(os.listdir("/proc/self/fd")) == before
