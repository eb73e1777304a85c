"""Decoupled momentum against the authors' order of operations in SciPy, and what stays behind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

from jaxcross import exchange
from jaxcross.exchange.decoupled_momentum import dct_matrix
from tests.support.exchange_ranks import RANKS, normal, on_ranks, states


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_dct_matrix_is_scipys_and_orthonormal(size: int) -> None:
    matrix = np.asarray(dct_matrix(size), np.float64)
    expected: Any = scipy.fft.dct(np.eye(size), axis=0, norm="ortho")
    np.testing.assert_allclose(matrix, expected, atol=1e-7)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)


def authors_step(
    momentum: np.ndarray, grads: np.ndarray, decay: float, tile: tuple[int, int], k: int
) -> Any:
    """Returns (momenta, mean of what was sent) after one step of all ranks.

    Follows the paper: works tile by tile on a padded matrix.
    """
    momentum = decay * momentum + grads
    sent = np.zeros_like(momentum)
    high, wide = tile
    for rank in range(len(momentum)):
        for row in range(0, momentum.shape[1], high):
            for column in range(0, momentum.shape[2], wide):
                part = (rank, slice(row, row + high), slice(column, column + wide))
                found: Any = scipy.fft.dctn(momentum[part], norm="ortho")
                found[np.abs(found) < np.sort(np.abs(found), axis=None)[-k]] = 0
                sent[part] = scipy.fft.idctn(found, norm="ortho")
    return momentum - sent, sent.mean(0)


@pytest.mark.integration
def test_steps_equal_the_papers_order_of_operations() -> None:
    """Momentum, transform, selection, inverse, subtraction: over padded tiles, for three steps."""
    tx = exchange.decoupled_momentum(0.25, "batch", decay=0.9, chunk=4)
    every = [
        normal(RANKS, 10, 7, seed=n) for n in range(3)
    ]  # ten rows in parts of 4, 4 and 2; seven columns in 4 and 3
    step, state = on_ranks(tx), states(tx, every[0])
    momentum = np.zeros((RANKS, 12, 8))
    for grads in every:
        updates, state = step(grads, state)
        padded = np.pad(np.asarray(grads, np.float64), ((0, 0), (0, 2), (0, 1)))
        momentum, expected = authors_step(momentum, padded, 0.9, (4, 4), 4)
        np.testing.assert_allclose(
            updates, np.broadcast_to(expected[:10, :7], updates.shape), atol=1e-5
        )


@pytest.mark.integration
@pytest.mark.parametrize("wire_dtype", [None, jnp.bfloat16])
def test_what_is_kept_comes_later(wire_dtype: Any) -> None:
    """Without decay, steps without a gradient send what remains of the first gradient."""
    tx = exchange.decoupled_momentum(0.25, "batch", decay=1, chunk=4, wire_dtype=wire_dtype)
    grads = {"w": normal(RANKS, 9, 6), "bias": normal(RANKS, 6, seed=1)}
    step, state = on_ranks(tx), states(tx, grads)
    total, nothing = np.zeros((RANKS, 9, 6)), jax.tree.map(jnp.zeros_like, grads)
    for n in range(20 if wire_dtype else 5):
        updates, state = step(nothing if n else grads, state)
        total += updates["w"]
        assert (np.asarray(updates["bias"]) == 0).all() or n == 0
    np.testing.assert_allclose(total[0], np.asarray(grads["w"]).mean(0), atol=1e-5)
    left = np.abs(np.asarray(state.momentum["w"])).max()
    assert left == 0 if wire_dtype is None else left < 1e-5


@pytest.mark.integration
def test_momenta_that_other_ranks_cancel_leave_too() -> None:
    """A rank subtracts what it has sent itself rather than the mean over all ranks."""
    tx = exchange.decoupled_momentum(1.0, "batch", decay=1)
    grads = normal(1, 8, 8) * jnp.asarray([1.0, -1.0, 1.0, -1.0])[:, None, None]
    updates, state = on_ranks(tx)(grads, states(tx, grads))
    assert (np.asarray(updates) == 0).all() and (np.asarray(state.momentum) == 0).all()


@pytest.mark.integration
def test_sign_returns_signs_and_shows_infinity() -> None:
    tx = exchange.decoupled_momentum(0.5, "batch", sign=True)
    grads = {"w": normal(RANKS, 8, 4), "b": normal(RANKS, 4, seed=1), "n": jnp.ones((RANKS, 2))}
    updates, _ = on_ranks(tx)(grads, states(tx, grads))
    assert set(np.unique(np.concatenate([np.asarray(x).ravel() for x in updates.values()]))) == {
        -1,
        1,
    }
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf), grads)
    spoiled, _ = on_ranks(tx)(bad, states(tx, bad))
    assert all(not np.isfinite(np.asarray(x)).all() for x in spoiled.values())


@pytest.mark.parametrize(
    ("shape", "tiles", "width"), [((9, 6), 1, 54), ((100, 65), 4, 50 * 33), ((3, 3, 4, 5), 1, 180)]
)
def test_tiles_are_equal_and_as_few_as_fit(shape: tuple[int, ...], tiles: int, width: int) -> None:
    state: Any = exchange.decoupled_momentum(0.1, "batch").init(jnp.zeros(shape))
    assert state.momentum.shape == (tiles, width)


@pytest.mark.integration
def test_leaves_that_are_not_floats_keep_their_updates() -> None:
    tx = exchange.decoupled_momentum(0.5, "batch")
    grads = {"n": jnp.int32(3), "w": jnp.ones((4, 4))}
    step = jax.vmap(
        lambda g: tx.update(g, tx.init(g))[0], axis_name="batch", axis_size=2, in_axes=None
    )
    assert step(grads)["n"].dtype == jnp.int32 and step(grads)["n"].tolist() == [3, 3]
