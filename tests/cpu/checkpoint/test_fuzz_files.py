"""Files and states from outside are read, rejected with a clear error, or safely ignored."""

import json

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxcross.data.augment import decode, eval_image
from jaxcross.data.batches import Batches
from jaxcross.data.records import INFO_FILE, NAME, find_folder, open_records
from jaxcross.step import cut_tuner
from tests.support.examples import scaled

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FILES = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())


def quick(examples):
    """Returns settings for a few examples with no time limit on any of them."""
    return settings(
        max_examples=scaled(examples),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Returns a cache of found cuts whose folder doesn't exist yet."""
    monkeypatch.setattr(cut_tuner, "compilation_cache_dir", lambda: tmp_path / "cache")
    return cut_tuner.CutCache("key")


@quick(60)
@given(FILES | JSON.map(lambda value: json.dumps({"key": value}).encode()))
@example(b'{"key": true}')
@example(b'{"key": 1e400}')
@example(b"[" * 100_000)
@example(b'{"key": 3}')
@example(b'{"key": [true, 1.0]}')
@example(b'{"key": [4, NaN]}')
@example(b'{"key": [4, 2.0, 3]}')
@example(b'{"key": "44"}')
def test_a_damaged_book_of_cuts_is_measured_again(book, content):
    book._file.parent.mkdir(exist_ok=True)
    book._file.write_bytes(content)
    if (found := book.read()) is not None:
        pieces, uncut_s = found
        assert (
            type(pieces) is int
            and pieces in (1, 2, 4, 8, 16)
            and type(uncut_s) is float
            and uncut_s > 0
        )
    book.write(4, 0.5)
    assert book.read() == (4, 0.5)


def test_invalid_cut_file_is_left_alone(book, monkeypatch, caplog):
    """A cut cache that isn't a regular file, or is too large, isn't touched."""
    book._file.mkdir(parents=True)
    assert book.read() is None
    book.write(4, 0.5)
    assert caplog.messages[0].startswith("The cut that was found cannot be stored in `")
    book._file.rmdir()
    book.write(4, 0.5)
    monkeypatch.setattr(cut_tuner, "_LARGEST_BYTES", 3)
    assert book.read() is None


@quick(30)
@given(st.lists(st.text("0123456789.²٣xv-", min_size=1, max_size=6), max_size=4))
@example(["1.²"])
def test_newest_version_is_found_among_other_entries(tmp_path_factory, names):
    root = tmp_path_factory.mktemp("data")
    names = [name for name in names if name not in (".", "..")]
    for name in (*names, "5.1.0"):
        (root / NAME / name).mkdir(parents=True, exist_ok=True)
        (root / NAME / name / INFO_FILE).write_text("{}")
    assert find_folder(root).parent == root / NAME


@quick(15)
@given(FILES)
@example(
    b'{"name": "imagenet2012", "version": "5.1.0", '
    b'"fileFormat": "array_record", "splits": [{"name": "train"}]}'
)
def test_a_damaged_manifest_is_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("data")
    (folder / INFO_FILE).write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"TFDS cannot read the data set in|The data set in `|is not a TFDS data set",
    ):
        open_records(folder)


def picture():
    return cv2.imencode(".jpg", np.full((20, 30, 3), 90, np.uint8))[1].tobytes()


@quick(60)
@given(st.data())
def test_a_damaged_picture_is_decoded_or_refused(data):
    jpeg = bytearray(picture())
    for _ in range(data.draw(st.integers(1, 8))):
        jpeg[data.draw(st.integers(0, len(jpeg) - 1))] = data.draw(st.integers(0, 255))
    jpeg = bytes(jpeg[: data.draw(st.integers(0, len(jpeg)))])
    try:
        decode(jpeg)
    except ValueError as error:
        why = str(error)
    else:
        why = ""
        assert eval_image(jpeg, 8).shape == (8, 8, 3)
    assert why == "" or "cannot be decoded" in why


def test_a_picture_that_says_it_is_enormous_is_refused():
    jpeg = bytearray(picture())
    at = jpeg.index(b"\xff\xc0") + 5  # height and width in the frame header
    jpeg[at : at + 4] = b"\xff\xdc\xff\xdc"
    with pytest.raises(ValueError, match="cannot be decoded"):
        decode(bytes(jpeg))


class NoStream:
    """A stand-in for the stream that a position is checked against."""

    batch_size = image_size = 1
    rank = seed = 0
    size = 1
    train = True
    split = "train"
    records = property(lambda self: self)

    def __len__(self):
        return 7


@quick(60)
@given(st.dictionaries(st.sampled_from(["step", "rank", "batch_size", "x"]), JSON, max_size=3))
@example({"step": -1})
@example({"step": True})
def test_data_position_must_belong_to_the_stream(changes):
    batches = Batches(NoStream(), threads=1)
    state = batches.get_state() | changes
    try:
        batches.set_state(state)
    except ValueError as error:
        assert batches.step == 0
        why = str(error)
    else:
        why = ""
        assert batches.step == state["step"] >= 0
    assert why == "" or "data state" in why
