"""Splitting, carriers and byte formulas, without sending a message."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.errors import ExchangeError
from jaxcross.program.ir import Exchange
from jaxcross.wire import wire_bytes
from jaxcross.wire.mpi_messages import MAX_COUNT, carrier, is_narrow_float, split_counts


@given(st.integers(0, 2**40), st.integers(1, 2**31 - 1))
def test_split_counts(count, max_count):
    if count // max_count > 10_000:
        max_count = MAX_COUNT
    counts = split_counts(count, max_count)
    assert sum(counts) == count
    assert len(counts) == -(-count // max_count)
    assert all(0 < c <= max_count for c in counts)
    assert not counts or max(counts) - min(counts) <= 1


def test_messages_of_two_to_the_31_are_split():
    assert split_counts(2**31 - 1) == (2**31 - 1,)
    assert split_counts(2**31) == (2**30, 2**30)
    assert split_counts(0) == ()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (jnp.float32, "float32"),
        (jnp.bfloat16, "uint16"),
        (jnp.float16, "uint16"),
        (jnp.float8_e5m2, "uint8"),
        (jnp.bool_, "bool"),
        (jnp.complex64, "complex64"),
        (jnp.int8, "int8"),
    ],
)
def test_carriers(dtype, name):
    assert carrier(jnp.dtype(dtype)).name == name
    assert is_narrow_float(jnp.dtype(dtype)) == (name.startswith("uint"))


@pytest.mark.parametrize("dtype", [jnp.dtype(jnp.int4), jax.random.key(0).dtype])
def test_types_that_mpi_lacks(dtype):
    with pytest.raises(
        ExchangeError,
        match=re.escape(f"Arrays of type `{dtype}` cannot be exchanged, because MPI has no"),
    ):
        carrier(dtype)


def exchange(op, dtype="float32", shape=(120,), **params):
    return Exchange(op=op, axes=("a", "b"), dtype=dtype, shape=shape, params=tuple(params.items()))


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (exchange("psum"), 2 * 5 * 480 // 6),
        (exchange("pmax", "bool"), 2 * 5 * 120 // 6),
        (exchange("psum", "bfloat16", (120_000,)), 2 * 5 * 20_000 * 2),
        (exchange("psum", "bfloat16", (120_001,)), 2 * 5 * 20_001 * 2),
        (exchange("psum", "bfloat16", (10,)), 5 * 20),
        (exchange("all_gather", dimension=0, tiled=False), 5 * 480),
        (exchange("reduce_scatter", dimension=0, tiled=True), 5 * 480 // 6),
        (exchange("all_to_all", split_axis=0, concat_axis=0), 5 * 480 // 6),
        (exchange("ppermute", perm=((0, 1), (1, 1))), 480),
        (exchange("ppermute", perm=((1, 1),)), 0),
        (exchange("pbroadcast", source=0), 480),
        (exchange("psum", groups=((0, 1), (2, 3), (4, 5))), 480),
        (exchange("mpi.allreduce", ranks=(0, 1), reduction="SUM"), 480),
        (exchange("mpi.barrier", shape=(0,), ranks=(0, 1)), 0),
        (exchange("pbroadcast", source=0, loop="scan 70"), 70 * 480),
        (
            replace(
                exchange("pmax"),
                params=(("loop", "while ?"), ("loop", "scan 2"), ("loop", "scan 3")),
            ),
            6 * 800,
        ),
    ],
)
def test_bytes(item, expected):
    assert wire_bytes(item, {"a": 2, "b": 3}) == expected


def test_one_rank_receives_nothing():
    for op in ("psum", "pmax"):
        assert wire_bytes(Exchange(op=op, axes=("a",), dtype="bfloat16", shape=(9,)), {"a": 1}) == 0
