"""Gossip over a topology: its mixing matrix, the mean it preserves, and how fast ranks converge."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from jaxcross.exchange import mean
from jaxcross.exchange.gossip import gossip, mixing_matrix
from jaxcross.exchange.gossip import rounds as rounds_of
from tests.support.decentralised_training import (
    RANKS,
    assert_close,
    distance,
    grads,
    starts,
    train,
    zero,
)

pytestmark = pytest.mark.integration


TOPOLOGIES = [
    (t, n)
    for t in ("ring", "torus", "exponential", "complete")
    for n in (1, 2, 3, 4, 6, 8, 9, 12, 16)
]
TOPOLOGIES = [(t, n) for t, n in TOPOLOGIES if t != "torus" or n not in (2, 3)]


@pytest.mark.parametrize(("topology", "ranks"), TOPOLOGIES)
def test_mixing_matrices_are_doubly_stochastic(topology, ranks):
    for found in rounds_of(topology, ranks):
        matrix = mixing_matrix(found, ranks)
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(0), 1)
        np.testing.assert_allclose(matrix.sum(1), 1)
        assert len({hop.to for hop in found}) == len(found)


@pytest.mark.parametrize("adapt_first", [False, True])
@pytest.mark.parametrize(
    ("topology", "ranks"), [("ring", 2), ("ring", 5), ("torus", 6), ("exponential", 6)]
)
def test_gossip_is_its_matrix(topology, ranks, adapt_first):
    start, rate = starts(ranks, equal=False), 0.05
    history, _ = train(
        gossip(optax.sgd(rate), "batch", topology, adapt_first=adapt_first), start, 4
    )
    rounds = rounds_of(topology, ranks)
    x = {k: v.astype(np.float64) for k, v in start.items()}
    for number, got in enumerate(history):
        matrix = mixing_matrix(rounds[number % len(rounds)], ranks)
        step = {k: -rate * g for k, g in grads(x, number).items()}
        if adapt_first:
            x = {k: np.tensordot(matrix, x[k] + step[k], 1) for k in x}
        else:
            x = {k: np.tensordot(matrix, x[k], 1) + step[k] for k in x}
        assert_close(got, x, 1e-5)


@pytest.mark.parametrize("topology", ["ring", "torus", "exponential", "complete"])
def test_gossip_keeps_the_mean_and_what_agrees(topology):
    start = starts(6, equal=False)
    (*_, got), _ = train(gossip(optax.sgd(0.1), "batch", topology), start, 5, zero)
    assert_close(
        jax.tree.map(lambda x: x.mean(0), got), jax.tree.map(lambda x: x.mean(0), start), 1e-5
    )
    assert distance(got, start) > 0.1
    equal = starts(6)
    (*_, same), _ = train(gossip(optax.sgd(0.1), "batch", topology), equal, 3, zero)
    # Equal neighbours leave each other unchanged; `complete`, a sum over all rounds, does up to
    # rounding.
    assert distance(same, equal) <= (1e-6 if topology == "complete" else 0)


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_ring_converges_at_its_second_eigenvalue(ranks):
    rate = (1 + 2 * np.cos(2 * np.pi / ranks)) / 3
    found = rounds_of("ring", ranks)[0]
    eigenvalues = np.sort(np.linalg.eigvalsh(mixing_matrix(found, ranks)))
    assert eigenvalues[-2] == pytest.approx(rate)
    slowest = {"w": np.cos(2 * np.pi * np.arange(ranks) / ranks)[:, None].astype(np.float32)}
    history, _ = train(gossip(optax.sgd(0.1), "batch", "ring"), slowest, 4, zero)
    errors = [np.linalg.norm(h["w"]) for h in (slowest, *history)]
    np.testing.assert_allclose(np.divide(errors[1:], errors[:-1]), rate, rtol=1e-5)


@pytest.mark.parametrize(("ranks", "agree"), [(2, True), (4, True), (8, True), (6, False)])
def test_exponential_graph_agrees_after_one_turn(ranks, agree):
    """An exponential graph agrees after one turn if the number of ranks is a power of two."""
    start = starts(ranks, equal=False)
    turn = (ranks - 1).bit_length()
    (*_, got), _ = train(gossip(optax.sgd(0.1), "batch", "exponential"), start, turn, zero)
    apart = distance(got, jax.tree.map(lambda x: x.mean(0, keepdims=True), start))
    assert (apart < 1e-6) == agree


def test_complete_graph_adapting_first_is_synchronous():
    tx = gossip(optax.sgd(0.1, momentum=0.9), "batch", "complete", adapt_first=True)
    (*_, got), _ = train(tx, starts(RANKS), 4)
    (*_, want), _ = train(
        optax.chain(mean("batch"), optax.sgd(0.1, momentum=0.9)), starts(RANKS), 4
    )
    assert_close(got, want)
