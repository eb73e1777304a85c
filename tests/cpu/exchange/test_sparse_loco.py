"""SparseLoCo against NumPy, its two bits, and what it shares with DiLoCo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import diloco, finish, sparse_loco
from jaxcross.exchange.sparse_loco import _coded, _decoded
from tests.support.decentralised_training import RANKS, assert_close, grads, starts, train

pytestmark = pytest.mark.usefixtures("compiled_quickly")

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.mark.integration
def test_all_elements_in_float32_are_diloco() -> None:
    everything = sparse_loco(
        optax.sgd(0.05), NESTEROV, "batch", every=2, density=1, bits=32, chunk=4
    )
    (*_, got), state = train(everything, starts(RANKS), 6)
    (*_, want), other = train(diloco(optax.sgd(0.05), NESTEROV, "batch", every=2), starts(RANKS), 6)
    assert_close(got, want, 1e-5)
    assert_close(state.anchor, other.anchor, 1e-5)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(state.residual))


def quantised(x: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """Returns each sent element of a rank's leaf as its sign times its half's mean magnitude."""
    size = np.abs(x)
    above = sent & (size > size[sent].mean())
    levels = [size[half].mean() if half.any() else 0 for half in (sent & ~above, above)]
    return np.where(sent, np.sign(x) * np.where(above, levels[1], levels[0]), 0)


def test_rounds_equal_numpy() -> None:
    """Residual, chunks' largest, two bits, mean, outer step: three rounds of two steps."""
    rate, decay = 0.05, 0.9
    tx = sparse_loco(
        optax.sgd(rate), optax.sgd(0.8), "batch", every=2, density=0.5, decay=decay, chunk=3,
        skip=lambda path, leaf: leaf.ndim < 2,
    )  # fmt: skip
    start = {"w": starts(RANKS)["w"], "b": starts(RANKS)["b"]}
    history, state = train(tx, start, 6)
    mine = {k: v.astype(np.float64) for k, v in start.items()}
    anchor, residual = (
        {k: v[:1] for k, v in mine.items()},
        np.zeros((RANKS, 2, 3)),
    )  # w has six elements, so two chunks
    for step, got in enumerate(history):
        mine = {k: mine[k] - rate * g for k, g in grads(mine, step).items()}
        if step % 2:
            residual = decay * residual + (anchor["w"] - mine["w"]).reshape(RANKS, 2, 3)
            size = np.abs(residual)
            sent = size >= np.sort(size, axis=-1)[..., -2:-1]  # half of three is rounded to two
            values = np.stack([quantised(*both) for both in zip(residual, sent, strict=True)])
            residual = residual - values
            way = {
                "w": values.mean(0).reshape(1, 3, 2),
                "b": (anchor["b"] - mine["b"]).mean(0, keepdims=True),
            }
            anchor = {k: anchor[k] - 0.8 * way[k] for k in way}
            mine = {k: np.repeat(anchor[k], RANKS, 0) for k in way}
        assert_close(got, mine, 1e-5)
    assert_close(state.anchor, {k: np.repeat(v, RANKS, 0) for k, v in anchor.items()}, 1e-5)
    assert_close(state.residual["w"], residual, 1e-5)


@pytest.mark.integration
def test_two_bits_are_signs_and_two_means() -> None:
    codes, levels = _coded(jnp.asarray([[1.0, -1.0], [4.0, -6.0]]))
    assert np.asarray(levels).tolist() == [1, 5] and np.asarray(codes).tolist() == [[1, 0], [3, 2]]
    assert np.asarray(_decoded(codes, levels)).tolist() == [[1, -1], [5, -5]]


@pytest.mark.parametrize("values", [[2.0, -2.0], [0.0, 0.0], [3e38, -3e38]])
def test_equal_sizes_lose_nothing(values: list[float]) -> None:
    x = jnp.asarray(values, jnp.float32)
    assert (np.asarray(_decoded(*_coded(x))) == np.asarray(x)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_in_a_level(bad: float) -> None:
    codes, levels = _coded(jnp.asarray([1.0, bad, 2.0]))
    assert (
        not np.isfinite(np.asarray(levels)).all()
        and not np.isfinite(np.asarray(_decoded(codes, levels))).all()
    )


def test_a_chunk_leaves_room_for_codes() -> None:
    """An index and its code share 31 bits, however long the chunks are."""
    tx = sparse_loco(optax.sgd(0.1), optax.sgd(1.0), "batch", every=1, chunk=2**31 - 1)
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct((2**15, 2**15), jnp.float32)})
    assert state.residual["w"].shape == (2, 2**29)  # pyright: ignore[reportAttributeAccessIssue]


def test_finish_returns_the_anchor() -> None:
    tx = sparse_loco(optax.sgd(0.1), optax.sgd(1.0), "batch", every=4)
    state: Any = tx.init(jnp.ones((3, 4)))
    assert finish(jnp.zeros((3, 4)), (state, optax.EmptyState())) is state.anchor
