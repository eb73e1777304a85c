"""Warm-up before DiLoCo: identical to `mean` until it ends; with no warm-up, DiLoCo throughout."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import diloco_gap
from strategies import AXIS, OUTER

from jaxcross import exchange

STEPS, RANKS = 18, 2


def _trained(tx: optax.GradientTransformation) -> np.ndarray:
    targets = jnp.arange(RANKS * 3.0).reshape(RANKS, 3)

    def step(carry, _, target):
        params, state = carry
        updates, state = tx.update(2 * (params - target), state, params)
        return (optax.apply_updates(params, updates), state), None

    def rank(target):
        params = jnp.ones(3)
        (params, _), _ = jax.lax.scan(
            lambda c, x: step(c, x, target), (params, tx.init(params)), None, length=STEPS
        )
        return params

    return np.asarray(jax.vmap(rank, axis_name=AXIS)(targets))


@pytest.mark.integration
@pytest.mark.parametrize(("warm_up", "other"), [(STEPS, "mean"), (0, "diloco")])
def test_a_warm_up_is_the_mean_and_then_diloco(warm_up, other):
    inner = optax.adam(0.05)
    others = {
        "mean": optax.chain(exchange.mean(AXIS), inner),
        "diloco": exchange.diloco(inner, OUTER, AXIS, every=diloco_gap.EVERY),
    }
    found = _trained(diloco_gap.after_warm_up(inner, OUTER, steps=warm_up))
    np.testing.assert_allclose(found, _trained(others[other]), rtol=1e-6)
    assert not np.allclose(
        found, _trained(others["diloco" if other == "mean" else "mean"]), rtol=1e-3
    )
