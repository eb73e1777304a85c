"""The text of a checkpoint part: any change to it is detected, and a forged part does no harm."""

import json
from dataclasses import asdict, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross import _pytree
from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.folders import Folders
from jaxcross.checkpoint.part import (
    Part,
    SavedLeaf,
    UnknownFormatError,
    UnusableError,
    parse,
    to_text,
)
from tests.support.examples import scaled

FORM = _pytree.Form(kind="numpy", dtype="float32", shape=(2, 3))
PART_0 = Part(
    job="a",
    step=3,
    rank=0,
    ranks=2,
    leaves={"['w']": SavedLeaf(form=FORM, digest="d", common=True)},
    files={"manifest.ocdbt": (3, "d")},
    places=((3, None), (2, '{"value": 1}')),
    cuts={"x": 4},
    environment={"jax": "0"},
    notes={"evaluated eval": "3"},
    best_step=3,
)


def test_part_parsed_from_its_text_is_equal():
    assert parse(to_text(PART_0)) == PART_0


def test_a_part_of_a_rank_that_its_run_did_not_have_is_rejected():
    with pytest.raises(UnusableError, match="rank 2 of 2"):
        parse(to_text(replace(PART_0, rank=2)))


@pytest.mark.parametrize("path", [(), ("leaves", "['w']"), ("leaves", "['w']", "form")])
def test_a_part_with_an_unknown_or_a_missing_field_is_rejected(path):
    """Also if the field has a default, since then the part is of another format."""
    for change in (lambda inner: inner.update(more=1), dict.popitem):
        body = asdict(PART_0)
        inner = body
        for key in path:
            inner = inner[key]
        change(inner)
        with mock.patch("jaxcross.checkpoint.part.asdict", return_value=body):
            text = to_text(PART_0)
        with pytest.raises(UnusableError, match="has invalid contents"):
            parse(text)


def parsed(text):
    try:
        return parse(text)
    except (UnusableError, UnknownFormatError):
        return None


@given(st.data())
@settings(deadline=None, max_examples=scaled(100))
def test_any_change_to_a_part_is_noticed(data):
    text = to_text(PART_0)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    assert parsed(changed) in (None, PART_0)  # an extra space changes nothing


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@given(st.text() | JSON.map(json.dumps))
@settings(deadline=None, max_examples=scaled(100))
def test_other_texts_are_no_parts(text):
    assert parsed(text) is None


def places_in(tree, path=()):
    yield path
    for key, value in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        yield from places_in(value, (*path, key))


@given(st.data())
@settings(deadline=None, max_examples=scaled(200))
def test_forged_part_is_rejected_or_has_valid_types(data):
    """The forged part has a valid digest. It's rejected, or its leaves have valid types."""
    body = json.loads(to_text(PART_0))
    del body["digest"], body["format"]
    path = data.draw(st.sampled_from([path for path in places_in(body) if path]))
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(
        JSON | st.sampled_from([-1, 2**63, 2**70, "O", "V8", "f4,f4", "../x", "object", 1e300])
    )
    with mock.patch("jaxcross.checkpoint.part.asdict", return_value=body):
        part = parsed(to_text(PART_0))
    if part is not None:
        for saved in part.leaves.values():
            assert all(0 <= size < 2**48 for size in saved.form.shape)
            assert _pytree.numeric(np.dtype(saved.form.dtype))


def test_too_deep_or_too_long_texts_are_rejected(tmp_path):
    assert parsed("[" * 100_000) is None
    assert parsed('{"digest": ' + "9" * 10_000 + "}") is None
    folders = Folders(tmp_path, rank=0, ranks=1)
    folders.part_path("000000000003-0000000000000000").mkdir(parents=True)
    with (folders.part_path("000000000003-0000000000000000") / "part.json").open("wb") as file:
        file.truncate(2**40)  # sparse: occupies no blocks
    with pytest.raises(UnusableError, match="no part has more than"):
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
    with pytest.raises(UnusableError, match="does not hold the arrays"):
        arrays.read(tmp_path / "state", {"y": form})
