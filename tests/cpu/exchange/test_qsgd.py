"""QSGD on ranks of different norms: its mean is right to within one level of each rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.exchange.qsgd import qsgd
from tests.support.exchange_ranks import RANKS, normal, on_ranks, states

pytestmark = pytest.mark.usefixtures("compiled_quickly")

NORMS = jnp.asarray([1.0, 10.0, 100.0, 1000.0])
GRADS = {
    "a": normal(RANKS, 7, 5) * NORMS[:, None, None],
    "b": normal(RANKS, 40, seed=1) * NORMS[::-1, None],
}


def level(grads: Any, levels: int) -> float:
    """Returns the mean over ranks of one level, which bounds the rounding error of the mean."""
    return (
        float(np.linalg.norm(np.asarray(grads, np.float64).reshape(RANKS, -1), axis=1).mean())
        / levels
    )


@pytest.mark.integration
@pytest.mark.parametrize("levels", [1, 7, 127])
def test_it_is_the_mean_to_a_level(levels: int) -> None:
    tx = qsgd(levels, "batch")
    step, state = on_ranks(tx), states(tx, GRADS)
    for _ in range(5):
        updates, state = step(GRADS, state)
        for name, g in GRADS.items():
            error = np.abs(
                np.asarray(updates[name][0], np.float64) - np.asarray(g, np.float64).mean(0)
            )
            assert error.max() <= level(g, levels) * (1 + 1e-5), name
            assert error.max() > 1e-3 * level(g, levels), "it rounds"


@pytest.mark.integration
def test_every_rank_has_its_part_in_it() -> None:
    """What only the rank with the smallest norm contributes arrives, accurate to its level."""
    alone = jax.tree.map(
        lambda g: g * (jnp.arange(RANKS) == 0).reshape(-1, *[1] * (g.ndim - 1)), GRADS
    )
    tx = qsgd(127, "batch")
    updates, _ = on_ranks(tx)(alone, states(tx, alone))
    for name, g in alone.items():
        assert np.abs(updates[name][0] - g.mean(0)).max() <= level(g, 127) * (1 + 1e-5)
        assert np.abs(updates[name][0]).max() > 10 * level(g, 127)


@pytest.mark.integration
def test_a_level_beyond_float16_is_its_largest_number() -> None:
    grads = jnp.full((RANKS, 100), 10000, jnp.float16)  # norm 100,000 is the only level
    tx = qsgd(1, "batch")
    step, state = on_ranks(tx), states(tx, grads)
    every = []
    for _ in range(20):
        updates, state = step(grads, state)
        assert np.isfinite(updates).all()
        every.append(np.asarray(updates[0]))
    assert np.max(every) == np.finfo(np.float16).max


@pytest.mark.exhaustive
def test_on_average_it_is_the_mean() -> None:
    draws, tx = 2000, qsgd(3, "batch")

    def draw(step: jax.Array) -> Any:
        state = jax.tree.map(lambda s: s + step, tx.init(GRADS))
        one = jax.vmap(lambda g: tx.update(g, state)[0], axis_name="batch")(GRADS)
        return jax.tree.map(lambda x: x[0], one)

    found = jax.jit(jax.vmap(draw))(jnp.arange(draws))
    for name, g in GRADS.items():
        deviation = jnp.std(found[name], axis=0) / draws**0.5
        assert bool(
            jnp.all(jnp.abs(found[name].mean(0) - g.mean(0)) <= 5 * deviation + 1e-6 * level(g, 3))
        )
