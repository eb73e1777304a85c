"""Splits trees into fragments of equal size, and encodes vectors as integers of a few bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.exchange.bits import BLOCK, dequantise, quantise, quantised_mean
from jaxcross.exchange.layouts import cut_fragments

TREE = {
    "a": np.arange(5.0),
    "b": np.arange(12.0).reshape(3, 4) + 10,
    "n": np.arange(3),
    "s": np.float32(50),
}


@pytest.mark.mostly_integration("1-25", "4-3")
@pytest.mark.parametrize("count", [1, 3, 25])
@pytest.mark.parametrize("multiple", [1, 4])
def test_fragments_are_even_and_cover_each_element_once(count, multiple):
    tree = jax.tree.map(jnp.asarray, TREE)
    cut = cut_fragments(tree, count, multiple=multiple)
    taken = [np.asarray(cut.take(tree, n)) for n in range(count)]
    sizes = [sum(p.stop - p.start for p in pieces) for pieces in cut.pieces]
    assert {len(x) for x in taken} == {cut.width} and cut.width % multiple == 0
    assert (
        sum(sizes) == 18 and max(sizes) == -(-18 // count) and sizes == sorted(sizes, reverse=True)
    )
    whole = np.concatenate([x[:n] for x, n in zip(taken, sizes, strict=True)])
    np.testing.assert_array_equal(whole, [*range(5), *range(10, 22), 50])
    for n, x in enumerate(taken):
        changed = cut.put(tree, n, cut.split(jnp.asarray(x) + 1, n))
        back = cut.put(tree, n, cut.parts(changed, n))
        moved = np.concatenate([np.ravel(changed[k] - tree[k]) for k in "abs"])
        assert moved.sum() == sizes[n] and set(moved.tolist()) <= {0.0, 1.0}
        assert (changed["n"] == tree["n"]).all()
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), back, changed))


def test_narrow_types_are_kept_wide_in_vectors():
    tree = {"h": jnp.ones(3, jnp.bfloat16), "f": jnp.ones(3, jnp.float16)}
    cut = cut_fragments(tree, 2)
    assert cut.dtype == jnp.float32
    back = cut.put(tree, 0, cut.split(cut.take(tree, 0) * 3, 0))
    assert jax.tree.map(lambda x: (x.dtype, x.tolist()), back) == {
        "f": (jnp.float16, [3.0] * 3), "h": (jnp.bfloat16, [1.0] * 3),
    }  # fmt: skip


@pytest.mark.mostly_integration("2", "3")
@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_fragments_of_odd_shapes_and_narrow_types_round_trip(count):
    shapes = {"a": (), "b": (0, 3), "c": (1,), "d": (1, 1), "e": (2, 3, 5)}
    tree = {name: jnp.ones(shape) for name, shape in shapes.items()} | {
        "h": jnp.ones((7, 3), jnp.bfloat16)
    }
    cut = cut_fragments(tree, count)

    def twice(tree):
        for n in range(count):
            tree = cut.put(tree, n, [2 * part for part in cut.parts(tree, n)])
        return tree

    doubled = jax.jit(twice)(tree)
    assert jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and (y == 2 * x).all(), tree, doubled)
    )


@pytest.mark.mostly_integration("4-7")
@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_an_element_is_off_by_half_a_unit_at_most(bits, levels):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4 * BLOCK) * np.repeat([1e-30, 1, 1e30, 0], BLOCK)).astype(np.float32)
    packed = quantise(jnp.asarray(x), bits)
    got = np.asarray(dequantise(packed, bits)).reshape(4, -1)
    unit = np.abs(x).reshape(4, -1).max(1, keepdims=True) / levels
    assert (np.abs(got - x.reshape(4, -1)) <= unit * (0.5 + 1e-5)).all()
    assert packed.codes.nbytes == x.size * bits // 8 and packed.units.nbytes == x.size // BLOCK * 4
    again = dequantise(quantise(jnp.asarray(got.reshape(-1)), bits), bits)
    np.testing.assert_allclose(np.asarray(again).reshape(4, -1), got, rtol=1e-6)


@pytest.mark.mostly_integration("-inf-8", "-inf-4")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_stays_so_for_its_block(bits, bad):
    x = jnp.ones(3 * BLOCK).at[BLOCK + 5].set(bad)
    finite = np.isfinite(np.asarray(dequantise(quantise(x, bits), bits)).reshape(3, -1))
    assert finite[0].all() and not finite[1].any() and finite[2].all()


@pytest.mark.integration
@pytest.mark.parametrize("bits", [8, 4])
def test_mean_is_that_of_the_rounded_vectors(bits):
    x = np.random.default_rng(1).normal(size=(3, 2 * BLOCK)).astype(np.float32)

    def both(mine):
        packed = quantise(mine, bits)
        return quantised_mean(packed, bits, ("ranks",)), dequantise(packed, bits)

    got, rounded = jax.vmap(both, axis_name="ranks")(jnp.asarray(x))
    np.testing.assert_allclose(
        got, np.broadcast_to(np.asarray(rounded).mean(0), x.shape), rtol=1e-5, atol=1e-6
    )
    assert (np.ptp(np.asarray(got), 0) == 0).all()
