"""Packs integers of a few bits into bytes, and selects the largest elements of each chunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.exchange import bits, layouts, sparse


@pytest.mark.parametrize(("width", "count"), [(1, 8), (7, 3), (12, 29), (20, 1)])
def test_packed_integers_come_back(width: int, count: int) -> None:
    numbers = np.random.default_rng(width).integers(0, 1 << width, (3, count))
    numbers[0] = (1 << width) - 1

    def there_and_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        packed = bits.pack_integers(x, width)
        return packed, bits.unpack_integers(packed, width, count)

    packed, unpacked = jax.jit(there_and_back)(numbers)
    assert packed.shape == (3, bits.packed_bytes(width, count)) and packed.dtype == jnp.uint8
    assert (np.asarray(unpacked) == numbers).all()


def test_packed_integers_lie_lowest_bit_first() -> None:
    packed = bits.pack_integers(jnp.asarray([1, 2**12 - 1]), 12)
    assert np.asarray(packed).tolist() == [0x01, 0xF0, 0xFF]


@pytest.mark.parametrize("most", [1, 4, 64])
def test_chunks_are_equal_and_nearly_all_used(most: int) -> None:
    for size in range(1, 100):
        width = layouts.chunk_length(size, most)
        rows = -(-size // width)
        assert 1 <= width <= most and 0 <= rows * width - size < rows
        assert rows == -(-size // most)


@pytest.mark.integration
def test_largest_of_each_row_are_found_and_taken_out() -> None:
    x = jnp.asarray([[1.0, -5, 2, 4], [0, 0, jnp.nan, 3], [0, 0, 0, 0]])
    layout = sparse.chunked(3, 4, 0.5)
    values, columns = sparse.largest_of_chunks(x, layout)
    assert [set(row.tolist()) for row in np.asarray(columns)[:2]] == [{1, 3}, {2, 3}]
    left = np.asarray(sparse.residual_of_chunks(x, values, columns))
    assert left[0].tolist() == [1, 0, 2, 0] and left[2].tolist() == [0, 0, 0, 0]
    assert np.isnan(left[1, 2]) and left[1, 3] == 0


@pytest.mark.integration
def test_ranks_elements_are_summed_where_they_belong() -> None:
    layout = sparse.chunked(2, 3, 0.3)
    values, columns = (
        jnp.asarray([[1.0, 2.0], [10.0, 20.0]]),
        jnp.asarray([[0, 2], [0, 1]], jnp.int32),
    )
    assert np.asarray(sparse.sum_of_chunks(values, columns, layout)).tolist() == [
        [11, 0, 0],
        [0, 20, 2],
    ]


@pytest.mark.integration
def test_columns_of_several_leaves_share_one_message() -> None:
    layouts = [sparse.chunked(3, 5, 0.4), sparse.chunked(1, 4096, 0.001)]
    columns = [jnp.asarray([[4, 0], [1, 2], [3, 4]]), jnp.asarray([[4095, 0, 17, 1]])]
    packed = sparse.pack_columns(columns, layouts)
    assert packed.shape == (3 + 6,)  # six 3-bit indices, four 12-bit ones
    found = sparse.unpack_columns(jnp.stack([packed, packed]), layouts)
    for got, want in zip(found, columns, strict=True):
        assert (np.asarray(got) == np.asarray(want).reshape(1, -1)).all()
