"""Data sets named by a URL: byte ranges over HTTP and S3, and what a server can do wrong."""

import os
import re
import shutil
import threading
from random import Random

import boto3
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from jaxcross.data import Cache, open_records, synthesise, train_batches
from jaxcross.data.cache import origin as origin_module
from jaxcross.data.cache.array_record import BLOCK_BYTES, Footer, footer_start, read_records
from jaxcross.data.cache.origin import FooterFiles
from tests.support.data_caches import STREAM, digests, records_of, tree
from tests.support.examples import scaled
from tests.support.range_server import range_server

IMAGES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synthesise(
        tmp_path_factory.mktemp("data"), images=IMAGES, classes=3, width=64, height=48
    )


@pytest.fixture
def cache(tmp_path):
    with Cache(
        tmp_path / "cache", disk_bytes=10**6, ahead_records=8, memory_folder=tmp_path
    ) as cache:
        yield cache


def write_shard(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


def footer_of(content):
    start = footer_start(content[-BLOCK_BYTES:], len(content))
    index = content[start : len(content) - BLOCK_BYTES]
    return Footer(len(content), start, index.rstrip(b"\0"), content[-BLOCK_BYTES:].rstrip(b"\0"))


@settings(max_examples=scaled(25), deadline=None)
@given(
    st.lists(st.integers(0, 150_000), min_size=1, max_size=12),
    st.sampled_from(
        ["group_size:1", "group_size:3", "group_size:1,uncompressed", "group_size:2,zstd:9"]
    ),
    st.integers(0, 999),
)
def test_any_records_are_read_from_their_ranges(tmp_path_factory, sizes, options, seed):
    """Reads them with nothing of the file available but their chunks and the footer."""
    path = tmp_path_factory.mktemp("shard") / "shard"
    random = Random(seed)
    records = [random.randbytes(size) for size in sizes]
    write_shard(path, records, options)
    content = path.read_bytes()
    footer = footer_of(content)
    assert footer.n_records == len(records)
    wanted = random.sample(range(len(records)), random.randint(1, len(records)))
    ranges = dict(footer.range_of(record) for record in wanted)
    found = read_records(
        footer, {start: content[start:end] for start, end in ranges.items()}, wanted
    )
    assert found == [records[record] for record in wanted]


def test_an_index_of_many_blocks(tmp_path):
    """The footer of 40 000 records exceeds 64 KiB, so a block header interrupts it."""
    path = tmp_path / "shard"
    records = [os.urandom(index % 50 + 1) for index in range(40_000)]
    write_shard(path, records)
    content = path.read_bytes()
    footer = footer_of(content)
    assert len(footer.index) > BLOCK_BYTES
    assert footer.n_records == len(records)
    start, end = footer.range_of(30_000)
    assert read_records(footer, {start: content[start:end]}, [30_000]) == [records[30_000]]


def test_missing_and_damaged_ranges_are_refused(tmp_path):
    path = tmp_path / "shard"
    write_shard(path, [os.urandom(5000) for _ in range(5)])
    content = path.read_bytes()
    footer = footer_of(content)
    start, end = footer.range_of(2)
    with pytest.raises(ValueError, match="hash mismatch"):
        read_records(footer, {}, [2])
    damaged = bytearray(content[start:end])
    damaged[1000] ^= 1
    with pytest.raises(ValueError, match="hash mismatch"):
        read_records(footer, {start: bytes(damaged)}, [2])


@pytest.mark.parametrize(
    "content", [b"", bytes(BLOCK_BYTES), os.urandom(BLOCK_BYTES), b"\xff" * BLOCK_BYTES]
)
def test_what_is_no_shard_is_refused(content):
    with pytest.raises(ValueError, match="^(it|its|the index)"):
        footer_start(content, len(content))


def test_a_damaged_footer_file_counts_as_missing(tmp_path):
    files, footer = FooterFiles(tmp_path / "footers"), Footer(70_000, 3, b"abc", b"de")
    assert files.load("shard") is None
    files.save("shard", footer)
    assert files.load("shard") == footer
    (path,) = (tmp_path / "footers").iterdir()
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert files.load("shard") is None
        path.write_bytes(whole[:place])
        assert files.load("shard") is None


@pytest.mark.integration
def test_http_has_the_same_bits(folder, cache):
    """Records are sent once; the second pass and a second stream fetch nothing."""
    before = tree(folder)
    with range_server(folder) as sent:
        assert digests(train_batches(sent.url, steps=20, cache=cache, **STREAM)) == digests(
            train_batches(folder, steps=20, **STREAM)
        )
        assert records_of(cache)["origin"] == IMAGES
        ranges = [each for each in sent.requests if "array_record" in each[0]]
        assert len(ranges) == len(set(ranges)) == IMAGES + 2
        shards = sum(path.stat().st_size for path in folder.glob("*train*"))
        assert (
            cache.statistics()["origin"].nbytes == sum(nbytes for _, _, nbytes in ranges) <= shards
        )
        sent.requests.clear()
        digests(train_batches(sent.url, steps=20, cache=cache, **{**STREAM, "seed": 9}))
        assert not [each for each in sent.requests if "array_record" in each[0]]
    assert tree(folder) == before


def test_a_chained_url_has_the_same_records(folder, cache):
    """fsspec file systems that keep copies themselves read one range after another."""
    with range_server(folder) as sent:
        records = open_records(f"simplecache::{sent.url}", cache=cache)
        plain = open_records(folder)
        assert [records.read(n) for n in range(8)] == [plain.read(n) for n in range(8)]


def test_a_second_run_reads_only_small_files(folder, tmp_path):
    with range_server(folder) as sent:
        through = digests(train_batches(folder, steps=9, **STREAM))
        for _ in range(2):
            sent.requests.clear()
            with Cache(tmp_path / "cache", disk_bytes=10**6) as cache:
                assert digests(train_batches(sent.url, steps=9, cache=cache, **STREAM)) == through
        assert {name for name, _, _ in sent.requests} <= {
            path.name for path in folder.glob("*.[jt]*")
        }
        assert not [name for name, _, _ in sent.requests if "array_record" in name]


def test_a_server_without_ranges_is_refused(folder, cache):
    with range_server(folder, ranges=False) as sent:
        records = open_records(sent.url, cache=cache)
        with pytest.raises(
            ValueError,
            match=r"bytes where 65536 were asked for, from byte \d+. A server must support r",
        ):
            records.read(0)


def test_errors_of_the_server_are_tried_again(folder, cache, monkeypatch):
    monkeypatch.setattr(origin_module, "WAIT_S", 0.001)
    with range_server(folder) as sent:
        records = open_records(sent.url, cache=cache)
        plain = open_records(folder)
        sent.failures = 2
        assert records.read(0) == plain.read(0)
        sent.failures = 2
        assert records.read(1) == plain.read(1)
        sent.failures = 1000
        with pytest.raises(
            OSError, match=r"^Reading `http.*` failed 7 times: ClientResponseError: 500"
        ):
            records.read(2)
        sent.failures = 0
        assert records.read(2) == plain.read(2)


def test_a_server_that_is_away_is_named(folder, cache, monkeypatch):
    monkeypatch.setattr(origin_module, "WAIT_S", 0.001)
    with range_server(folder) as sent:
        records = open_records(sent.url, cache=cache)
        url = sent.url
    with pytest.raises(
        OSError, match=rf"^Reading `{re.escape(url)}/imagenet2012-train.*` failed 7 times"
    ):
        records.read(0)
    with pytest.raises(OSError, match=rf"^`{re.escape(url)}/dataset_info.json` cannot be read"):
        open_records(url, cache=cache)


def test_a_url_of_no_data_set_is_refused(tmp_path, cache):
    (tmp_path / "empty").mkdir()
    with (
        range_server(tmp_path / "empty") as sent,
        pytest.raises(
            FileNotFoundError,
            match="^There is no `dataset_info.json` in `http.*Name the versioned folder",
        ),
    ):
        open_records(sent.url, cache=cache)
    with pytest.raises(ValueError, match="nosuch"):
        open_records("nosuch://host/folder", cache=cache)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("missing", FileNotFoundError, "^Reading `http.*train.* failed 7 times: FileNotFoundError"),
        ("empty", FileNotFoundError, "is missing or empty, or its server does not report its"),
        ("cut", ValueError, "cannot be read by byte ranges: "),
        (
            "flipped",
            ValueError,
            r"^Records \[0\] of the shard `.*` cannot be decoded: .*hash mismatch",
        ),
        ("short", ValueError, "holds 3 records; `dataset_info.json` promises 40"),
    ],
)
def test_a_damaged_shard_is_named(folder, tmp_path, cache, monkeypatch, damage, error, message):
    monkeypatch.setattr(origin_module, "WAIT_S", 0.001)
    copy = shutil.copytree(folder, tmp_path / "copy")
    (shard,) = copy.glob("*train*")
    content = bytearray(shard.read_bytes())
    if damage == "missing":
        shard.unlink()
    elif damage == "flipped":
        content[300] ^= 1
        shard.write_bytes(content)
    elif damage == "short":
        write_shard(shard, [b"a", b"b", b"c"])
    else:
        shard.write_bytes(content[: {"empty": 0, "cut": 70_000}[damage]])
    with range_server(copy) as sent:
        records = open_records(sent.url, cache=cache)
        with pytest.raises(error, match=message):
            records.read(0)


def test_closing_ends_waiting_between_tries(folder, tmp_path, monkeypatch):
    """Retries after storage errors wait longer and longer, but closing the cache ends the wait."""
    monkeypatch.setattr(origin_module, "WAIT_S", 1e6)
    cache = Cache(tmp_path / "cache", disk_bytes=10**6)
    with range_server(folder) as sent:
        batches = train_batches(sent.url, cache=cache, **STREAM)
        sent.failures = 1000
        failed = threading.Event()

        def read():
            with pytest.raises((OSError, RuntimeError)):
                next(batches)
            failed.set()

        reader = threading.Thread(target=read)
        reader.start()
        with sent.lock:
            pass
        cache.close()
        reader.join()
        assert failed.is_set()


@pytest.mark.integration
def test_s3_has_the_same_bits(folder, tmp_path, monkeypatch):
    """Reads S3 byte ranges from a local moto server."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="bucket")
        for path in folder.iterdir():
            client.upload_file(str(path), "bucket", f"imagenet2012/5.1.0/{path.name}")
        options = {"endpoint_url": f"http://{host}:{port}"}
        with Cache(tmp_path / "cache", disk_bytes=10**6, storage_options=options) as cache:
            found = train_batches("s3://bucket/imagenet2012/5.1.0", steps=20, cache=cache, **STREAM)
            assert digests(found) == digests(train_batches(folder, steps=20, **STREAM))
            assert records_of(cache)["origin"] == IMAGES
    finally:
        server.stop()


def test_the_reader_agrees_on_the_number_of_records(folder):
    (shard,) = folder.glob("*train*")
    assert (
        footer_of(shard.read_bytes()).n_records
        == ArrayRecordReader(str(shard)).num_records()
        == IMAGES
    )
    assert np.all(np.diff(footer_of(shard.read_bytes()).chunks[0]) > 0)
