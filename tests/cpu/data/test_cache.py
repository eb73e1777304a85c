"""Batches through the levels of a cache: identical bits, predicted hits, budgets, several users."""

import itertools
import json

import numpy as np
import pytest

from jaxcross.cli import main
from jaxcross.data import Cache, SharedDecode, eval_batches, open_records, train_batches
from jaxcross.data.cache import simulate, streams
from jaxcross.data.cache.locks import Claims
from jaxcross.data.cache.next_use import PAGE_BYTES
from tests.support.data_caches import IMAGES, STREAM, digests, records_of, tree

BUDGETS = {
    "disk_bytes": (0, 90_000, 10**6),
    "memory_bytes": (0, 70_000, 10**6),
    "images_bytes": (0, 100_000, 10**6),
}


@pytest.mark.mostly_integration("(0, 0, 1000000)", "(0, 1000000, 1000000)")
@pytest.mark.parametrize("budgets", list(itertools.product(*BUDGETS.values())), ids=str)
def test_same_bits_with_any_levels(folder, plain, open_cache, budgets):
    """The origin doesn't change either, and no level's files exceed its budget."""
    before = tree(folder)
    cache = open_cache(**dict(zip(BUDGETS, budgets, strict=True)))
    assert digests(train_batches(folder, steps=20, cache=cache, **STREAM)) == plain
    assert tree(folder) == before
    assert sum(records_of(cache).values()) == 20 * 6
    for name, budget in zip(("disk", "memory", "images"), budgets, strict=True):
        found = [
            path
            for path in cache.folder.parent.rglob(f"{name}/*")
            if path.name in ("data", "pages")
        ]
        assert sum(path.stat().st_size for path in found) <= budget
        assert cache.usage().get(name, (0, 0))[1] <= budget


def test_evaluation_has_the_same_bits(folder, open_cache):
    cache = open_cache(disk_bytes=10**6, images_bytes=10**6)
    options = {"batch_size": 4, "image_size": 16}
    assert digests(eval_batches(folder, cache=cache, **options)) == digests(
        eval_batches(folder, **options)
    )
    assert digests(eval_batches(folder, cache=cache, **options)) == digests(
        eval_batches(folder, **options)
    )
    assert records_of(cache)["origin"] == IMAGES // 4


@pytest.mark.integration
@pytest.mark.parametrize("steps", [1, 7, 8, 13])
def test_resuming_has_the_same_bits(folder, plain, open_cache, steps):
    """Resumes anywhere in a pass, by position or start step, while the stream reads ahead."""
    cache = open_cache(disk_bytes=90_000, memory_bytes=70_000)
    stopped = train_batches(folder, steps=20, cache=cache, **STREAM)
    for _ in range(steps):
        next(stopped)
    state = stopped.get_state()
    stopped.close()
    resumed = train_batches(folder, steps=20, cache=cache, **STREAM)
    resumed.set_state(state)
    assert digests(resumed) == plain[steps:]
    assert (
        digests(train_batches(folder, steps=20, start_step=steps, cache=cache, **STREAM))
        == plain[steps:]
    )


def test_any_number_of_threads_has_the_same_bits(folder, plain, open_cache):
    cache = open_cache(memory_bytes=70_000, images_bytes=100_000, ahead_records=1)
    assert digests(train_batches(folder, steps=20, threads=5, cache=cache, **STREAM)) == plain


def sizes_of(records):
    return np.array([len(records.cached.read(n)[0]) for n in range(len(records))])


@pytest.mark.integration
@pytest.mark.parametrize("ahead", [1, 8, 100])
@pytest.mark.parametrize(
    ("disk", "memory"), [(0.5, 0), (0.5, 0.2), (0.4, 0.3), (1.2, 0.1), (0, 0.6)]
)
def test_hits_and_bytes_are_as_predicted(
    folder, open_cache, tmp_path, monkeypatch, disk, memory, ahead
):
    """For a single stream, the prediction is exact to the byte."""
    monkeypatch.setattr(streams, "START_S", 60)
    with Cache(tmp_path / "other") as other:
        sizes = sizes_of(open_records(folder, cache=other))
    pages = int((-(-sizes // PAGE_BYTES)).sum())
    budgets = {
        "memory_bytes": int(memory * pages * 4104) + 65_536 * (memory > 0),
        "disk_bytes": int(disk * pages * 4104),
    }
    cache = open_cache(ahead_records=ahead, **budgets)
    batches = train_batches(folder, epochs=5, cache=cache, **STREAM)
    length = batches.steps_per_epoch * STREAM["batch_size"]
    order = batches._stream.order
    digests(batches)

    def one_pass(epoch):
        return np.array(
            [int(order[position]) for position in range(epoch * length, (epoch + 1) * length)]
        )

    usable = [(budget - 64) // 4104 * PAGE_BYTES if budget else 0 for budget in budgets.values()]
    predicted = simulate(
        [one_pass], sizes, usable, length=length, epochs=5, group=max(1, ahead // 2)
    )
    found = cache.statistics()
    assert found["memory"].records == sum(tally.hits[0] for tally in predicted)
    assert found["disk"].records == sum(tally.hits[1] for tally in predicted)
    assert found["origin"].records == sum(tally.origin for tally in predicted)
    assert found["origin"].nbytes == sum(tally.origin_bytes for tally in predicted)


def test_waits_are_counted_by_level(folder, open_cache):
    """The first pass waits for the origin, the second for memory, an uncached stream for none."""
    cache = open_cache(memory_bytes=10**6)
    assert list(waits_of_a_pass(train_batches(folder, epochs=1, cache=cache, **STREAM))) == [
        "origin"
    ]
    shared = SharedDecode(train_batches(folder, epochs=1, cache=cache, **STREAM))
    assert list(waits_of_a_pass(shared.reader())) == ["memory"]
    assert waits_of_a_pass(train_batches(folder, epochs=1, **STREAM)) == {}


def waits_of_a_pass(batches):
    assert len([next(batches) for _ in range(batches.steps)]) == IMAGES // STREAM["batch_size"]
    found = batches.waited_s()
    batches.close()
    return found


def test_jobs_of_two_seeds_read_the_origin_once(folder, open_cache):
    cache = open_cache(disk_bytes=10**6)
    jobs = [
        train_batches(folder, epochs=2, cache=cache, **{**STREAM, "seed": seed}) for seed in (1, 2)
    ]
    for batches in zip(*jobs, strict=True):
        assert len(batches) == 2
    assert records_of(cache)["origin"] == IMAGES
    assert records_of(cache)["disk"] == 3 * IMAGES


def test_jobs_of_one_seed_read_the_origin_once(folder, open_cache):
    """The jobs need the same record at the same moment: one claims it, and the others wait."""
    cache = open_cache(memory_bytes=10**6)
    jobs = [train_batches(folder, epochs=2, cache=cache, **STREAM) for _ in range(3)]
    for one, two, three in zip(*jobs, strict=True):
        assert np.array_equal(one["image"], two["image"]) and np.array_equal(
            two["image"], three["image"]
        )
    assert records_of(cache)["origin"] == IMAGES


def test_ranks_of_a_node_share_the_levels(folder, open_cache):
    """Two caches in one folder, as with two processes: a rank needs what the other just read."""
    caches = [open_cache(memory_bytes=10**6) for _ in range(2)]
    ranks = [
        train_batches(folder, epochs=4, rank=rank, size=2, cache=cache, **STREAM)
        for rank, cache in enumerate(caches)
    ]
    for _ in zip(*ranks, strict=True):
        pass
    assert sum(records_of(cache)["origin"] for cache in caches) == IMAGES
    assert sum(records_of(cache)["memory"] for cache in caches) == 3 * IMAGES


def test_a_claim_excludes_other_users_of_the_file(tmp_path):
    """Users in the same process are excluded too, and closing one keeps the others' claims."""
    one, two = Claims(tmp_path / "claims"), Claims(tmp_path / "claims")
    assert one.take([3, 5]) == {3, 5}
    assert two.take([4, 5]) == {4}
    assert one.take([4, 5]) == set()
    two.close()
    three = Claims(tmp_path / "claims")
    assert three.take([3, 4, 5]) == {4}
    one.release([3])
    assert three.take([3, 5]) == {3}


def test_a_record_that_another_fetches_is_needed_at_once(tmp_path, monkeypatch):
    """A record that another stream fetches is needed until the waiting stream has it.

    Otherwise a full level would drop the record before the stream could read it there.
    """
    monkeypatch.setattr(streams, "START_S", 60)
    open_streams = streams.Streams(tmp_path)
    order = [2, 0, 3, 1]
    stream = open_streams.add(
        base=0,
        records=4,
        order=lambda _: np.array(order),
        record_at=lambda at: order[at % 4],
        length=4,
        stop=8,
    )
    assert [stream.take(0), stream.take(1)] == [2, 0]
    assert open_streams.distances(np.arange(4)).tolist() == [3, 1, 2, 0]
    stream.lacks([2, 0])
    assert open_streams.distances(np.arange(4)).tolist() == [0, 1, 0, 0]
    stream.has(2)
    assert open_streams.distances(np.arange(4)).tolist() == [0, 1, 2, 0]
    stream.has(0)
    assert open_streams.distances(np.arange(4)).tolist() == [3, 1, 2, 0]
    stream.close()


def test_the_second_run_reads_nothing_of_the_origin(folder, open_cache):
    first = open_cache(disk_bytes=10**6, memory_bytes=70_000)
    through = digests(train_batches(folder, epochs=1, cache=first, **STREAM))
    first.close()
    second = open_cache(disk_bytes=10**6, memory_bytes=70_000)
    assert digests(train_batches(folder, epochs=1, cache=second, **STREAM)) == through
    assert records_of(second)["origin"] == 0


def test_two_splits_share_a_level(folder, open_cache):
    cache = open_cache(disk_bytes=10**6)
    train, validation = (
        open_records(folder, cache=cache),
        open_records(folder, "validation", cache=cache),
    )
    for records, split in ((train, "train"), (validation, "validation")):
        plain = open_records(folder, split)
        assert len(records) == len(plain)
        assert [records.read(n) for n in range(len(records))] == [
            plain.read(n) for n in range(len(plain))
        ]
        assert [records.read(n) for n in range(len(records))] == [
            plain.read(n) for n in range(len(plain))
        ]
    assert records_of(cache)["disk"] == records_of(cache)["origin"] == len(train) + len(validation)


def test_shared_decode_reads_through_a_cache(folder, open_cache):
    cache = open_cache(images_bytes=10**6)
    shared = SharedDecode(train_batches(folder, steps=12, cache=cache, **STREAM))
    readers = [shared.reader(), shared.reader()]
    found = [[batch["image"].tobytes() for batch in turn] for turn in zip(*readers, strict=True)]
    through = [batch["image"].tobytes() for batch in train_batches(folder, steps=12, **STREAM)]
    assert found == [[image, image] for image in through]


def test_the_last_user_frees_the_memory(folder, open_cache, tmp_path):
    caches = [open_cache(memory_bytes=10**6, images_bytes=10**6) for _ in range(2)]
    digests(train_batches(folder, epochs=1, cache=caches[0], **STREAM))
    caches[0].close()
    assert list((tmp_path / "memory").rglob("data"))
    caches[1].close()
    assert not list((tmp_path / "memory").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_bytes": -1}, "^`disk_bytes` must be a whole number of bytes, 0 or more, got -1"),
        (
            {"memory_bytes": 1e9},
            "^`memory_bytes` must be a whole number of bytes, 0 or more, got 1000000000.0",
        ),
        ({"images_bytes": 4096}, "^`images_bytes` must be 0 or at least 65536, got 4096"),
        ({"ahead_records": 0}, "^`ahead_records` must be a whole number, at least 1, got 0"),
    ],
)
def test_bad_budgets_are_refused(open_cache, options, message):
    with pytest.raises(ValueError, match=message):
        open_cache(**options)


def test_a_folder_with_other_files_is_refused(folder, tmp_path):
    before = tree(folder)
    with pytest.raises(
        ValueError,
        match="holds other files rather than a cache, so nothing was written to it. Choose",
    ):
        Cache(folder, disk_bytes=10**6)
    with (
        Cache(folder / "inside", disk_bytes=10**6) as cache,
        pytest.raises(ValueError, match="is inside the data set's folder `.*`. Choose one outside"),
    ):
        open_records(folder, cache=cache)
    for path in sorted((folder / "inside").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "inside").rmdir()
    assert tree(folder) == before


def test_another_machine_is_refused(open_cache):
    cache = open_cache(disk_bytes=10**6)
    (cache.folder / "machine.json").write_text(json.dumps({"machine": "another"}))
    with pytest.raises(
        ValueError, match="is in use by another machine. Name a folder on a disk of this node"
    ):
        open_cache(disk_bytes=10**6)


def test_a_cache_of_another_version_is_refused(open_cache):
    cache = open_cache()
    cache.close()
    (cache.folder / "jaxcross-cache.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="is a cache of another version of jaxcross"):
        open_cache()


def test_a_url_needs_a_cache():
    with pytest.raises(
        ValueError, match="^`memory://data` is a URL, which is read through a cache: pass `cache="
    ):
        open_records("memory://data")


def test_info_shows_levels_and_hits(folder, open_cache, capsys):
    cache = open_cache(disk_bytes=10**6, memory_bytes=10**6)
    digests(train_batches(folder, epochs=2, cache=cache, **STREAM))
    cache.close()
    assert main(["data", "info", str(cache.folder)]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert str(IMAGES) in rows["memory"] and str(IMAGES) in rows["origin"]
    assert str(IMAGES) in rows["disk"]


def test_no_stream_begins_in_a_closed_cache(folder, open_cache):
    cache = open_cache(disk_bytes=10**6)
    digests(train_batches(folder, steps=3, cache=cache, **STREAM))
    records = open_records(folder, cache=cache)
    cache.close()
    cache.close()
    with pytest.raises(RuntimeError, match="The data cache was closed, so no further stream"):
        records.cached.feed(lambda position: position, length=IMAGES, start=0, stop=IMAGES)
