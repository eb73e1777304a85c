"""Top-k and global top-k converge with error feedback, and stall without it."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.mean import mean
from jaxcross.exchange.top_k import top_k
from tests.support.exchange_ranks import RANKS, normal, on_ranks, states

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("compiled_quickly")]


@pytest.mark.parametrize("density", [0.01, 0.05, 0.5])
def test_top_k_is_a_contraction(density: float) -> None:
    """The bound is tight if all elements have the same magnitude."""
    tx = top_k(density, "batch", error_feedback=False)
    for x in (
        normal(1, 30, 20),
        normal(1, 30, 20, seed=1) ** 9,
        jnp.ones((1, 30, 20)),
        -1e-30 * jnp.ones((1, 30, 20)),
    ):
        updates, _ = on_ranks(tx, {"batch": 1})(x, states(tx, x))
        left, all_ = (float(np.sum(np.square(np.asarray(v, np.float64)))) for v in (x - updates, x))
        assert left <= (1 - density) * all_ * (1 + 1e-6)
        assert left > 0


def opposing(
    tx: optax.GradientTransformation, axes: dict[str, int] | None = None, rate: float = 0.02
) -> float:
    """Returns the distance to the optimum over the last quarter of training.

    Each rank's loss is quadratic around a centre that all ranks share, shifted by a large offset in
    one row. The offset is positive on half of the ranks and negative on the others, so it cancels
    in the mean, but each rank's sparse selection sees little else. We train for 400 steps at the
    default rate. At a different rate, the number of steps is scaled so that rate times steps stays
    the same.
    """
    centre = np.full((8, 8), 0.1, np.float32)
    offset = np.zeros((RANKS, 8, 8), np.float32)
    offset[:, 0] = np.array([0.5, 0.5, -0.5, -0.5])[:, None]  # so it cancels between nodes too
    tx, sizes = optax.chain(tx, optax.sgd(rate)), tuple((axes or {"batch": RANKS}).values())
    params = jnp.zeros((*sizes, 8, 8))
    step, state = on_ranks(tx, axes), states(tx, params, axes=len(sizes))
    steps, far = round(8 / rate), []
    for n in range(steps):
        updates, state = step(params - centre - offset.reshape(params.shape), state)
        params = optax.apply_updates(params, updates)
        if n >= steps * 3 // 4:
            far.append(np.linalg.norm(params.reshape(RANKS, 8, 8)[0] - centre))
    return float(np.mean(far))


def converges(tx: optax.GradientTransformation, axes: dict[str, int] | None = None) -> bool:
    """Returns whether the distance falls with the rate, as delays are counted in steps.

    At a sixteenth of the rate, it should be about a sixteenth.
    """
    coarse, usual, fine = (opposing(tx, axes, rate=rate) for rate in (0.08, 0.02, 0.005))
    return usual < 0.05 and usual < 0.4 * coarse and fine < 0.1 * coarse


def test_top_k_converges_only_with_error_feedback() -> None:
    assert opposing(mean("batch")) < 1e-3
    assert converges(top_k(0.125, "batch"))
    for rate in (0.02, 0.005):
        assert opposing(top_k(0.125, "batch", error_feedback=False), rate=rate) > 0.7


def test_so_do_hierarchical_and_global_top_k() -> None:
    axes = {"node": 2, "local": 2}
    hierarchical = functools.partial(
        top_k, 0.125, tuple(axes), pattern="hierarchical", inner_ranks=2
    )
    assert converges(hierarchical(), axes)
    assert opposing(hierarchical(error_feedback=False), axes) > 0.45
    tx = gtop_k(0.125, "batch")
    forgetful = optax.GradientTransformation(
        tx.init, lambda g, s, p=None: (tx.update(g, tx.init(g), p)[0], s)
    )
    assert converges(tx)
    assert opposing(forgetful) > 0.7
