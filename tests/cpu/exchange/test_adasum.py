"""Adasum against a tree of float64 NumPy vectors, and the algebraic properties of the operator."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange.adasum import adasum, chunk
from jaxcross.testing import vmapped
from tests.support.adasum_tree import EPS, grads, norm, tree

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("compiled_quickly")]


@functools.cache
def compiled(axes):
    names = tuple(name for name, _ in axes)
    tx = adasum(names)
    return jax.jit(vmapped(lambda g: tx.update(g, optax.EmptyState())[0], dict(axes)))


def combine(gradients, ranks=None):
    ranks = len(jax.tree.leaves(gradients)[0]) if ranks is None else ranks
    return jax.tree.map(np.asarray, compiled((("batch", ranks),))(gradients))


@pytest.mark.mostly_exhaustive("1", "5")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_adasum_matches_the_tree_with_equal_bits(ranks):
    """Adasum equals the tree layer by layer, and is bitwise identical across ranks."""
    given = grads(ranks)
    got = combine(given)
    for name, layer in given.items():
        assert got[name].shape == layer.shape
        assert got[name].dtype == np.float32
        assert (got[name] == got[name][:1]).all()
        want = tree(layer)
        assert norm(got[name][0] - want) <= 20 * EPS * norm(want), name


@pytest.mark.mostly_exhaustive("3-2")
@pytest.mark.parametrize(
    ("nodes", "local"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 3), (5, 2)]
)
def test_hierarchical_is_the_tree_over_means_of_nodes(nodes, local):
    flat = grads(nodes * local)
    given = jax.tree.map(lambda x: x.reshape(nodes, local, *x.shape[1:]), flat)
    got = jax.tree.map(np.asarray, compiled((("node", nodes), ("local", local)))(given))
    for name, layer in given.items():
        want = tree(layer.astype(np.float64).mean(1))
        assert (got[name] == got[name][:1, :1]).all()
        assert norm(got[name][0, 0] - want) <= 20 * EPS * norm(want), name


@pytest.mark.mostly_exhaustive("3-1", "2-3")
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (3, 1), (4, 1), (8, 1), (2, 3)])
def test_layers_that_are_cut_in_chunks(nodes, local):
    shapes = {"a": (70, 60), "b": (9001,), "one": (1,)}
    assert chunk(list(shapes.values()), (1 << (nodes.bit_length() - 1)) * local) > 1
    given = jax.tree.map(
        lambda x: x.reshape(nodes, local, *x.shape[1:]), grads(nodes * local, 8, shapes)
    )
    got = jax.tree.map(np.asarray, compiled((("node", nodes), ("local", local)))(given))
    for name, layer in given.items():
        want = tree(layer.astype(np.float64).mean(1))
        assert (got[name] == got[name][:1, :1]).all()
        assert norm(got[name][0, 0] - want) <= 20 * EPS * norm(want), name


@pytest.mark.mostly_exhaustive("4")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equal_gradients_stay_as_they_are(ranks):
    g = grads(1)
    got = combine(jax.tree.map(lambda x: np.repeat(x, ranks, 0), g))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b[0], rtol=4 * EPS), got, g)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_finite_values_near_the_maximum_stay_finite(dtype):
    g = jnp.asarray([[2e38, -3e38, 1e38]], dtype)
    for sign, want in ((1, g[0]), (-1, 0 * g[0])):
        np.testing.assert_array_equal(combine(jnp.concatenate([g, sign * g]))[1], want)


@pytest.mark.mostly_exhaustive("2", "3")
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_orthogonal_gradients_add_and_parallel_average(ranks):
    rng = np.random.default_rng(1)
    q, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    orthogonal = np.asarray(q[:ranks] * rng.uniform(1, 5, (ranks, 1)), np.float32)
    np.testing.assert_allclose(combine(orthogonal)[0], orthogonal.sum(0), atol=1e-5)
    if ranks & (ranks - 1) == 0:
        factors = np.asarray([3.0, -1.0, 0.5, 7.0, -2.0, 1.0, 1.0, 4.0][:ranks], np.float32)[
            :, None
        ]
        along = factors * np.asarray(q[:1], np.float32)
        np.testing.assert_allclose(combine(along)[0], along.mean(0), atol=1e-6)


def test_symmetry_scaling_rotation_zero():
    rng = np.random.default_rng(2)
    a, b = np.asarray(rng.normal(size=(2, 12)), np.float32)
    q, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    ab = combine(np.stack([a, b]))[0]
    np.testing.assert_allclose(combine(np.stack([b, a]))[0], ab, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        combine(np.stack([-3 * a, -3 * b]))[0], -3 * ab, rtol=1e-5, atol=1e-5
    )
    rotated = np.asarray(np.stack([a, b]) @ q, np.float32)
    np.testing.assert_allclose(combine(rotated)[0], ab @ q, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(combine(np.stack([np.zeros_like(b), b]))[0], b)
    assert (combine(np.zeros((4, 12), np.float32)) == 0).all()
    # Scaling only one argument doesn't scale the result.
    assert norm(combine(np.stack([3 * a, b]))[0] - (ab + 2 * a)) > 0.1


@pytest.mark.mostly_exhaustive("0")
@pytest.mark.parametrize("seed", range(3))
def test_norms(seed):
    layer = grads(8, seed, {"x": (40,)})["x"].astype(np.float64)
    a, b = layer[:2]
    aa, bb, c = a @ a, b @ b, a @ b
    two = combine(np.asarray(layer[:2], np.float32))[0].astype(np.float64)
    assert two @ two == pytest.approx(
        aa + bb - 0.75 * c**2 * (1 / aa + 1 / bb) + c**3 / (2 * aa * bb), rel=1e-5
    )
    assert two @ (a + b) >= 0.5 * (norm(a) - norm(b)) ** 2 - 1e-4
    assert norm(combine(np.asarray(layer, np.float32))[0]) ** 2 <= (layer**2).sum() * (1 + 1e-5)


def test_which_rank_brings_what_matters():
    g = grads(4, 3, {"x": (20,)})["x"]
    assert norm(combine(g)[0] - combine(g[[0, 2, 1, 3]])[0]) > 0.01 * norm(combine(g)[0])


def test_each_layer_has_coefficients_of_its_own():
    g = grads(2, 4, {"a": (10,), "b": (10,)})
    whole = combine(np.concatenate([g["a"], 5 * g["b"]], axis=1))[0]
    layers = combine({"a": g["a"], "b": 5 * g["b"]})
    assert norm(whole - np.concatenate([layers["a"][0], layers["b"][0]])) > 0.01 * norm(whole)


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4))]
)
@pytest.mark.parametrize(
    "magnitudes", [(1e-33, 1e-33), (1e-30, 1.0), (1e-33, 1e18), (1e18, 1e18), (1e30, 1e30)]
)
def test_any_magnitude(ranks, magnitudes):
    rng = np.random.default_rng(5)
    scales = np.resize(magnitudes, ranks)[:, None]
    layer = np.asarray((rng.normal(size=(ranks, 30)) + rng.normal(size=30)) * scales, np.float32)
    want = tree(layer)
    assert norm(combine(layer)[0] - want) <= 100 * EPS * norm(want)


def test_tiny_numbers_alongside_large_ones_are_combined():
    tiny = float(jnp.finfo(jnp.float32).tiny)
    layer = np.asarray(
        [[tiny, -tiny, 0], [1e19, 1e19, 1e19], [3 * tiny, tiny, tiny], [tiny / 4, 0, 0]], np.float32
    )
    assert np.isfinite(combine(layer)).all()
    # Half of the smallest number counts as zero, but slightly above it the operator works again.
    np.testing.assert_allclose(combine(8 * layer[[0, 0]])[0], 8 * layer[0], rtol=4 * EPS)


def test_magnitudes_may_differ_within_a_layer():
    layer = np.asarray(np.random.default_rng(6).normal(size=(4, 64)), np.float32)
    layer[:, :16] *= 1e-30
    layer[:, 32:48] *= 1e15
    want = tree(layer)
    assert norm(combine(layer)[0] - want) <= 100 * EPS * norm(want)


def test_narrow_floats_are_combined_in_float32():
    layer = jnp.asarray(np.random.default_rng(7).normal(size=(4, 300)) * 300, jnp.bfloat16)
    got = combine({"b": layer, "h": layer.astype(jnp.float16)})
    assert got["b"].dtype == jnp.bfloat16
    assert got["h"].dtype == np.float16
    want = tree(layer)
    assert (
        got["b"][0].astype(np.float32) == np.asarray(want, np.float32).astype(jnp.bfloat16)
    ).mean() > 0.98
    np.testing.assert_allclose(got["h"][0].astype(np.float64), want, rtol=2e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "ranks", [5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3))]
)
def test_what_is_not_finite_shows_on_every_rank(ranks, bad):
    given = grads(ranks)
    given["matrix"][-1, 2, 1] = bad
    got = combine(given)
    assert not np.isfinite(got["matrix"]).all(axis=(1, 2)).any()
    assert np.isfinite(got["long"]).all()


def test_deltas_of_plain_sgd_are_raw_gradients():
    given = grads(4)
    delta = adasum("batch", optimizer=optax.sgd(0.5))
    params = jax.tree.map(lambda x: x[0], given)
    state = delta.init(params)
    updates = jax.vmap(lambda g: delta.update(g, state, params)[0], axis_name="batch")(given)
    raw = combine(given)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -0.5 * g, rtol=1e-6), updates, raw)


def test_a_tree_without_elements():
    for empty in ({}, {"x": jnp.zeros((2, 0)), "n": None}):
        got = jax.vmap(
            lambda g: adasum("batch").update(g, optax.EmptyState())[0],
            axis_name="batch",
            axis_size=2,
        )(empty)
        assert jax.tree.structure(got) == jax.tree.structure(empty)


def test_messages():
    with pytest.raises(
        ValueError,
        match=r"^the update `\['i'\]` is int32, but Adasum's dot products need real floating",
    ):
        combine({"i": np.ones((2, 3), np.int32)}, 2)
