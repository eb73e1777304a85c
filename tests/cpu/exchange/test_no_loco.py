"""NoLoCo against NumPy: its pairs, its outer step, and what it shares with local SGD."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange.local_sgd import local_sgd
from jaxcross.exchange.no_loco import draw, no_loco, pairings
from tests.support.decentralised_training import assert_close, distance, grads, starts, train, zero

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.mostly_integration("5", "6", "8", "14", "17")
@pytest.mark.parametrize("ranks", range(1, 18))
def test_every_rank_meets_every_other_once(ranks: int) -> None:
    met = Counter((r, partners[r]) for partners in pairings(ranks) for r in range(ranks))
    assert all(partners[partners[r]] == r for partners in pairings(ranks) for r in range(ranks))
    assert {pair: n for pair, n in met.items() if pair[0] != pair[1]} == {
        (a, b): 1 for a in range(ranks) for b in range(ranks) if a != b
    }
    assert sum(n for (a, b), n in met.items() if a == b) == (ranks if ranks % 2 else 0)


@pytest.mark.mostly_integration("3", "7", "15")
@pytest.mark.parametrize("count", [1, 3, 7, 15])
def test_rounds_are_drawn_evenly_and_in_no_order(count: int) -> None:
    for seed in (0, 1, 12345):
        drawn = np.asarray(jax.vmap(lambda n, seed=seed: draw(seed, n, count))(jnp.arange(3000)))
        seen = np.bincount(drawn, minlength=count)
        expected = 3000 / count
        assert len(seen) == count and np.abs(seen - expected).max() < 5 * np.sqrt(expected)
        after = np.bincount(drawn[:-1] * count + drawn[1:], minlength=count**2)
        assert np.abs(after - 3000 / count**2).max() < 6 * np.sqrt(3000 / count**2)
    others = [np.asarray(jax.vmap(lambda n, s=s: draw(s, n, 15))(jnp.arange(64))) for s in (0, 1)]
    assert (others[0] != others[1]).any()


def mean_with(partner: np.ndarray, x: np.ndarray) -> np.ndarray:
    return (x + x[partner]) / 2


@pytest.mark.mostly_integration("1-0.3", "2-0.3")
@pytest.mark.parametrize("pull", [None, 0.3])
@pytest.mark.parametrize("ranks", [1, 2, 5, 6])
def test_outer_steps_equal_numpy(ranks: int, pull: float | None) -> None:
    """Pairs, progress, pull and momentum over three exchanges; initial parameters differ."""
    rate, momentum, seed, sgd = 0.7, 0.5, 3, 0.05
    start = starts(ranks, equal=False)
    tx = no_loco(
        optax.sgd(sgd), "batch", every=2, rate=rate, momentum=momentum, pull=pull, seed=seed
    )
    history, state = train(tx, start, 6)
    slow = {k: v.astype(np.float64) for k, v in start.items()}
    fast, velocity = dict(slow), {k: np.zeros_like(v) for k, v in slow.items()}
    for step, got in enumerate(history):
        fast = {k: fast[k] - sgd * g for k, g in grads(fast, step).items()}
        if step % 2:
            meetings = pairings(ranks)
            partner = np.asarray(meetings[int(draw(seed, jnp.int32(step // 2), len(meetings)))])
            pair_mean = partial(mean_with, partner)
            for k in slow:
                strength = rate if pull is None else pull
                velocity[k] = (
                    momentum * velocity[k]
                    + rate * pair_mean(fast[k] - slow[k])
                    + strength * (pair_mean(slow[k]) - slow[k])
                )
                slow[k] = fast[k] = slow[k] + velocity[k]
        assert_close(got, fast, 1e-5)
    assert_close(state.anchor, slow, 1e-5)
    assert (state.round == 3).all() and (state.since == 0).all()


def test_two_ranks_at_rate_one_are_local_sgd() -> None:
    tx = no_loco(optax.sgd(0.1), "batch", every=3, rate=1, momentum=0)
    (*_, got), _ = train(tx, starts(2), 6)
    (*_, want), _ = train(local_sgd(optax.sgd(0.1), "batch", every=3), starts(2), 6)
    assert_close(got, want)


def test_mean_is_kept_and_ranks_draw_together() -> None:
    """With no gradients or momentum, the mean over ranks stays fixed and distances to it shrink."""
    start = starts(6, equal=False)
    history, _ = train(
        no_loco(optax.sgd(0.1), "batch", every=1, rate=1, momentum=0), start, 40, zero
    )
    middle: Any = jax.tree.map(lambda x: x.mean(0, keepdims=True), start)
    assert_close(jax.tree.map(lambda x: x.mean(0, keepdims=True), history[-1]), middle, 1e-5)
    assert distance(history[-1], middle) < 1e-2 * distance(start, middle)


def test_ranks_that_agree_stay_where_they_are() -> None:
    start = starts(6)
    (*_, got), _ = train(no_loco(optax.sgd(0.1), "batch", every=1), start, 5, zero)
    assert distance(got, start) == 0
