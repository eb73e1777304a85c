"""What can go wrong with a cache: kills, full disks, storage outages, lost files, late orders."""

import hashlib
import json
import subprocess
import sys
import threading

import pytest

from jaxcross.data import open_records, synthesise, train_batches
from jaxcross.data.cache import streams
from jaxcross.data.cache.feed import Passes
from jaxcross.data.cache.streams import Streams
from tests.support import warm_python
from tests.support.data_caches import IMAGES, STREAM, digest, digests, records_of


def test_a_changed_data_set_is_read_again(tmp_path, open_cache):
    folder = synthesise(tmp_path / "data", images=8, classes=2, width=32, height=32)
    cache = open_cache(disk_bytes=10**6)
    old = open_records(folder, cache=cache).read(0)
    changed = synthesise(tmp_path / "changed", images=8, classes=2, width=32, height=32, seed=1)
    for path in changed.iterdir():
        path.replace(folder / path.name)
    assert open_records(folder, cache=cache).read(0) == open_records(folder).read(0) != old


def test_lost_numbers_give_no_wrong_record(folder, open_cache):
    """The list of data sets is damaged, and another split reuses the first split's numbers."""
    first = open_cache(disk_bytes=10**6)
    records = open_records(folder, cache=first)
    assert [records.read(n)[1] for n in range(IMAGES)]
    first.close()
    (first.folder / "data_sets.json").write_text('{"truncated')
    second = open_cache(disk_bytes=10**6)
    validation = open_records(folder, "validation", cache=second)
    plain = open_records(folder, "validation")
    assert [validation.read(n) for n in range(len(plain))] == [
        plain.read(n) for n in range(len(plain))
    ]


def test_a_failing_origin_ends_the_loop_and_resumes(folder, open_cache, monkeypatch):
    cache = open_cache(disk_bytes=10**6)
    batches = train_batches(folder, steps=8, cache=cache, **STREAM)
    through = digests(train_batches(folder, steps=8, **STREAM))
    origin = batches._stream.records.cached._origin
    with monkeypatch.context() as patch:
        patch.setattr(
            type(origin), "read", lambda *_: (_ for _ in ()).throw(OSError("the storage is away"))
        )
        for _ in range(2):
            with pytest.raises(OSError, match="the storage is away"):
                next(batches)
    assert digests(batches) == through


def test_closing_a_cache_ends_its_streams(folder, open_cache):
    cache = open_cache(disk_bytes=10**6)
    batches = train_batches(folder, cache=cache, **STREAM)
    next(batches)
    cache.close()
    cache.close()
    with pytest.raises(RuntimeError, match="^The stream of batches was closed"):
        list(batches)
    batches.close()


RUN = """
import hashlib, json, sys
from jaxcross.data import Cache, train_batches
folder, cache, memory, seed = sys.argv[1:]
with Cache(
    cache, disk_bytes=10**6, memory_bytes=10**6, ahead_records=8, memory_folder=memory
) as cache:
    print("open", flush=True)
    sys.stdin.readline()
    bits = hashlib.sha256()
    for batch in train_batches(
        folder, batch_size=6, image_size=16, seed=int(seed), epochs=3, cache=cache
    ):
        bits.update(batch["image"].tobytes())
    print(json.dumps([bits.hexdigest(), cache.statistics()["origin"].records]), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.integration
def test_processes_share_one_folder(folder, tmp_path):
    """Two processes share a seed, a third has another: the origin reads each record once."""
    (tmp_path / "memory").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    places = [str(folder), str(tmp_path / "cache"), str(tmp_path / "memory")]
    children = [
        subprocess.Popen([*warm_python.COMMAND, "-c", RUN, *places, str(seed)], **pipes)
        for seed in (1, 1, 2)
    ]
    assert [child.stdout.readline() for child in children] == ["open\n"] * 3
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    found = [json.loads(child.stdout.readline()) for child in children]
    for child in children:
        child.communicate("\n", timeout=120)
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sum(origin for _, origin in found) == IMAGES
    for (bits, _), seed in zip(found, (1, 1, 2), strict=True):
        plain = hashlib.sha256()
        for batch in train_batches(folder, epochs=3, **{**STREAM, "seed": seed}):
            plain.update(batch["image"].tobytes())
        assert bits == plain.hexdigest()
    assert not list((tmp_path / "memory").iterdir())


KILLED = """
import os, sys
from jaxcross.data import Cache, train_batches
folder, cache, memory = sys.argv[1:]
cache = Cache(cache, disk_bytes=90_000, memory_bytes=70_000, ahead_records=8, memory_folder=memory)
batches = train_batches(folder, batch_size=6, image_size=16, seed=3, cache=cache)
for _ in range(11):
    next(batches)
os.kill(os.getpid(), 9)
"""


@pytest.mark.integration
def test_a_killed_run_leaves_a_good_cache(folder, plain, open_cache, tmp_path):
    places = [str(folder), str(tmp_path / "cache"), str(tmp_path / "memory")]
    assert (
        subprocess.run(
            [*warm_python.COMMAND, "-c", KILLED, *places], check=False, timeout=120
        ).returncode
        == -9
    )
    assert list((tmp_path / "cache" / "streams").iterdir())
    cache = open_cache(disk_bytes=90_000, memory_bytes=70_000)
    assert digests(train_batches(folder, steps=20, cache=cache, **STREAM)) == plain
    assert records_of(cache)["disk"] > 0
    assert not list((tmp_path / "cache" / "streams").iterdir())


@pytest.mark.integration
def test_memory_of_a_killed_run_is_freed(folder, open_cache, tmp_path):
    """The user's next cache frees it, even if it's a different cache."""
    places = [str(folder), str(tmp_path / "killed"), str(tmp_path / "memory")]
    assert (
        subprocess.run(
            [*warm_python.COMMAND, "-c", KILLED, *places], check=False, timeout=120
        ).returncode
        == -9
    )
    (left,) = (tmp_path / "memory").iterdir()
    cache = open_cache(memory_bytes=70_000)
    (own,) = (tmp_path / "memory").iterdir()
    assert own != left
    cache.close()


def test_private_tables_where_no_file_can_be_made(folder, plain, open_cache, monkeypatch, caplog):
    """If the folder of streams is full, the stream still counts within its own process."""
    cache = open_cache(disk_bytes=90_000)

    def full(*_):
        raise OSError(28, "No space left")

    monkeypatch.setattr(Streams, "_shared", full)
    assert digests(train_batches(folder, steps=20, cache=cache, **STREAM)) == plain
    assert "cannot announce a stream" in caplog.text
    assert records_of(cache)["disk"] > 0


def test_an_order_that_is_known_late(folder, plain, open_cache, monkeypatch):
    """If an order takes long, the stream starts without it, and levels use it once it's known."""
    known = threading.Event()
    compute = Passes._compute

    def late(self, epoch):
        known.wait()
        return compute(self, epoch)

    monkeypatch.setattr(Passes, "_compute", late)
    monkeypatch.setattr(streams, "START_S", 0)
    cache = open_cache(disk_bytes=90_000)
    batches = train_batches(folder, steps=20, cache=cache, **STREAM)
    first = [digest(next(batches)) for _ in range(5)]
    known.set()
    assert first + digests(batches) == plain
    assert records_of(cache)["disk"] > 0


def test_a_level_that_cannot_be_made_stays_off(folder, open_cache, monkeypatch, caplog):
    monkeypatch.setattr(
        "jaxcross.data.cache.page_store.os.posix_fallocate",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space")),
    )
    cache = open_cache(disk_bytes=10**6)
    assert digests(train_batches(folder, steps=9, cache=cache, **STREAM)) == digests(
        train_batches(folder, steps=9, **STREAM)
    )
    assert caplog.text.count("stays off") == 1
    assert records_of(cache)["disk"] == 0


def test_memory_of_another_user_is_not_used(folder, open_cache, monkeypatch, caplog):
    monkeypatch.setattr("jaxcross.data.cache.cache.os.getuid", lambda: 12_345)
    cache = open_cache(memory_bytes=10**6)
    assert "belongs to another user" in caplog.text
    assert open_records(folder, cache=cache).read(0) == open_records(folder).read(0)
    assert "memory" not in cache.usage()


FULL = """
import hashlib, json, logging, sys
from jaxcross.data import Cache, train_batches
logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
folder, disk, memory = sys.argv[1:]
cache = Cache(disk, disk_bytes=10**7, ahead_records=8, memory_folder=memory)
batches = train_batches(folder, batch_size=6, image_size=16, seed=3, steps=20, cache=cache)
bits = [hashlib.sha256(b["image"].tobytes() + b["label"].tobytes()).hexdigest() for b in batches]
print(json.dumps([bits, cache.statistics()["disk"].records, cache.usage()["disk"]]))
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.integration
def test_a_full_disk_turns_the_level_off_once(folder, plain, tmp_path):
    """Uses a real full disk: an in-memory file system with room for some of the records."""
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine has no namespaces for users")
    (tmp_path / "disk").mkdir()
    mount = [
        "sh",
        "-c",
        'mount -t tmpfs -o size=160k none "$0" && exec "$@"',
        str(tmp_path / "disk"),
    ]
    places = [str(folder), str(tmp_path / "disk"), str(tmp_path)]
    command = [*UNSHARE, *mount, sys.executable, "-c", FULL, *places]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    bits, hits, (records, nbytes) = json.loads(done.stdout)
    assert bits == plain
    assert hits > 0
    assert 0 < records < IMAGES and nbytes < 160 << 10
    assert (
        done.stderr.count(
            "is off from now on, since a write failed: [Errno 28] No space left on device"
        )
        == 1
    )
