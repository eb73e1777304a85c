"""Tests axes over ranks, without MPI."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.wire.rank_grid import make_rank_grid


def test_a_name_is_an_axis_over_all_ranks():
    mesh = make_rank_grid("batch", rank=2, size=4)
    assert (mesh.names, mesh.shape, mesh.coords, mesh.rank) == (("batch",), (4,), (2,), 2)


def test_row_major_and_one_inferred_size():
    mesh = make_rank_grid({"depth": 2, "row": -1, "col": 2}, rank=5, size=8)
    assert mesh.sizes == {"depth": 2, "row": 2, "col": 2}
    assert mesh.coords == (1, 0, 1)
    assert mesh.group(("depth",)) == (1, 5)
    assert mesh.group(("row", "depth")) == (1, 5, 3, 7)
    assert mesh.group(("depth", "row")) == (1, 3, 5, 7)
    assert mesh.index("col") == 1


def test_groups_are_positions_within_the_axes():
    mesh = make_rank_grid({"a": 2, "b": 2}, rank=1, size=4)
    assert mesh.group(("a", "b"), [[0, 3], [1, 2]]) == (1, 2)
    # Flattened with b as the major axis, rank 1 is at position 2.
    assert mesh.group(("b", "a"), [[0, 3], [1, 2]]) == (
        2,
        1,
    )
    with pytest.raises(
        ValueError,
        match=r"^`axis_index_groups` must contain each index over \('a', 'b'\), but 1 is missing",
    ):
        mesh.group(("a", "b"), [[0, 2]])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_groups_partition_the_ranks(shape, data):
    names = [f"x{i}" for i in range(len(shape))]
    axes = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    size = int(np.prod(shape))
    sizes = dict(zip(names, shape, strict=True))
    groups = {make_rank_grid(sizes, rank=r, size=size).group(axes) for r in range(size)}
    assert sorted(r for g in groups for r in g) == list(range(size))


MESSAGES = [
    ({"a": 3, "b": 2}, "The axes {'a': 3, 'b': 2} multiply to 6, but there are 4 ranks."),
    (
        {"a": 3, "b": -1},
        "4 ranks cannot be split over {'a': 3, 'b': -1}: 4 is not a multiple of 3.",
    ),
    ({"a": -1, "b": -1}, "Only one size in `axes` may be -1, got -1 for 'a', 'b'."),
    (
        {"a": 0},
        (
            "`axes` must map strings to whole numbers, 1 or more, or -1 for the remaining ranks, "
            "got size 0 for axis 'a'."
        ),
    ),
    ({}, "`axes` must contain at least one axis, got `{}`."),
]


@pytest.mark.parametrize(("axes", "message"), MESSAGES)
def test_bad_axes(axes, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make_rank_grid(axes, rank=0, size=4)


def test_unknown_and_repeated_axes():
    mesh = make_rank_grid({"a": 2, "b": 2}, rank=0, size=4)
    with pytest.raises(ValueError, match=r"^Unknown axis 'c': the mesh has 'a', 'b'."):
        mesh.group(("c",))
    with pytest.raises(ValueError, match=r"^An exchange must name each axis once, got"):
        mesh.group(("a", "a"))
