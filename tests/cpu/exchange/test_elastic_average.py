"""Elastic averaging: its equations, the conserved sum, and springs that are rejected."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from jaxcross.exchange.elastic_average import elastic_average
from tests.support.decentralised_training import (
    RANKS,
    SGD,
    assert_close,
    distance,
    grads,
    per_rank,
    starts,
    train,
    zero,
)

pytestmark = pytest.mark.integration


def test_elastic_average_is_its_equations():
    alpha, beta, rate = 0.2, 0.1, 0.05
    tx = elastic_average(optax.sgd(rate), "batch", every=2, alpha=alpha, beta=beta)
    start = starts(RANKS)
    history, state = train(tx, start, 4)
    x = {k: v.astype(np.float64) for k, v in start.items()}
    centre = {k: v[0] for k, v in x.items()}
    for number in range(4):
        step = {k: -rate * g for k, g in grads(x, number).items()}
        if number % 2:
            step = {k: step[k] - alpha * (x[k] - centre[k]) for k in x}
            centre = {k: centre[k] + beta * (x[k] - centre[k]).sum(0) for k in x}
        x = {k: x[k] + step[k] for k in x}
        assert_close(history[number], x, 1e-5)
    assert_close(state.centre, {k: c[None] + 0 * x[k] for k, c in centre.items()}, 1e-5)
    assert all((c == c[:1]).all() for c in jax.tree.leaves(state.centre))


def test_parameters_and_centre_conserve_their_sum():
    start = starts(RANKS, equal=False)
    centre = jax.tree.map(lambda x: np.repeat(x[:1] * 3, RANKS, 0), start)
    tx = elastic_average(optax.sgd(0.1), "batch", every=1, alpha=0.2)
    state = jax.vmap(tx.init)(start)._replace(centre=centre)
    step = jax.vmap(lambda g, s, p: tx.update(g, s, p), axis_name="batch")
    updates, state = step(zero(start, 0), state, start)
    for k, x in start.items():
        before = x.sum(0) + centre[k][0]
        np.testing.assert_allclose(
            (x + updates[k]).sum(0) + state.centre[k][0], before, rtol=1e-5, atol=1e-5
        )
        assert distance(updates[k], 0 * x) > 0.01


def test_without_springs_ranks_train_alone():
    got, _ = train(elastic_average(optax.sgd(0.1), "batch", every=1, alpha=0.0), starts(RANKS), 3)
    want, _ = train(optax.sgd(0.1), starts(RANKS), 3)
    assert_close(got, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.25), (0.25, 0.0)])
def test_a_pull_of_zero_passes_nothing_on(alpha, beta, bad):
    tx = elastic_average(optax.sgd(0.1), "batch", every=1, alpha=alpha, beta=beta)
    start = starts(RANKS)
    broken = {k: np.where(per_rank(x, lambda r: r == 1), bad, x) for k, x in start.items()}
    state = jax.vmap(tx.init)(start)
    step = jax.vmap(tx.update, axis_name="batch")
    for _ in range(2):  # the first may corrupt the centre, the second what it pulls
        updates, state = step(zero(start, 0), state, broken)
    for k, u in updates.items():
        assert np.isfinite(np.asarray(u)[[0, 2, 3]]).all(), k
        assert beta or np.isfinite(state.centre[k]).all(), k


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1 / RANKS), (1, 1)])
def test_springs_that_swap_for_ever_are_refused(alpha, beta):
    ranks = round(1 / beta)
    tx = elastic_average(SGD, "batch", every=1, alpha=alpha, beta=beta)
    with pytest.raises(ValueError, match="swap in every exchange and never converge"):
        train(tx, starts(ranks), 1)
