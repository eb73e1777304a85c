"""Local SGD and federated averaging against NumPy; what decentralised exchanges reject."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import mean
from jaxcross.exchange.elastic_average import elastic_average
from jaxcross.exchange.federated_average import _shares, federated_average
from jaxcross.exchange.gossip import gossip
from jaxcross.exchange.local_sgd import local_sgd
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide
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

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("compiled_quickly")]


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
def test_local_sgd_of_every_step_is_synchronous(optimizer):
    (*_, got), _ = train(local_sgd(optimizer, "batch", every=1), starts(RANKS), 4)
    (*_, want), _ = train(optax.chain(mean("batch"), optimizer), starts(RANKS), 4)
    assert_close(got, want)
    assert all((x == x[:1]).all() for x in jax.tree.leaves(got))


def test_for_adam_it_is_not():
    (*_, got), _ = train(local_sgd(optax.adam(0.1), "batch", every=1), starts(RANKS), 4)
    (*_, want), _ = train(optax.chain(mean("batch"), optax.adam(0.1)), starts(RANKS), 4)
    assert distance(got, want) > 1e-3


def test_local_steps_differ_and_exchange_averages():
    """Local steps are independent on each rank, and the exchange takes the mean."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    history, state = train(local_sgd(optimizer, "batch", every=3), starts(RANKS), 6)
    alone, _ = train(optimizer, starts(RANKS), 3)
    for got, want in zip(history[:2], alone[:2], strict=True):
        assert_close(got, want)
        assert distance(got, jax.tree.map(lambda x: x[:1], got)) > 0.1
    assert_close(history[2], jax.tree.map(lambda x: x.mean(0, keepdims=True) + 0 * x, alone[2]))
    assert (state.since == 0).all()
    assert distance(history[5], jax.tree.map(lambda x: x[:1], history[5])) < 1e-6
    assert distance(history[4], jax.tree.map(lambda x: x[:1], history[4])) > 1e-2


def test_exchange_preserves_the_parameter_mean():
    start = starts(RANKS, equal=False)
    (got,), _ = train(local_sgd(optax.sgd(0.1), "batch", every=1), start, 1, zero)
    assert_close(got, jax.tree.map(lambda x: x.mean(0, keepdims=True) + 0 * x, start))


@pytest.mark.parametrize(
    "tx",
    [
        local_sgd(optax.sgd(0.1), "batch", every=2),
        federated_average(optax.sgd(0.1), "batch", every=2, participation=0.5),
        elastic_average(optax.sgd(0.1), "batch", every=2, alpha=0.25),
    ],
)
def test_between_exchanges_nothing_is_sent(tx):
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, sent = tx.init(params), []
    for _ in range(4):
        args = (params, state, params)
        traced = decide(
            trace(step, args, axes={"batch": 1}, wire=LocalRanks()), jax.tree.leaves(args)
        )
        program = stages.cut(traced)
        sent.append(sum(len(s.exchanges) for s in program.segments))
        params, state = jax.vmap(step, axis_name="batch")(*jax.tree.map(lambda x: x[None], args))
        params, state = jax.tree.map(lambda x: x[0], (params, state))
    assert sent == [0, 2, 0, 2]


def test_full_federated_average_is_local_sgd():
    """With full participation and equal weights, `federated_average` equals `local_sgd`."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    (*_, got), _ = train(
        federated_average(optimizer, "batch", every=2, weights=[7.0] * RANKS), starts(RANKS), 4
    )
    (*_, want), _ = train(local_sgd(optimizer, "batch", every=2), starts(RANKS), 4)
    assert_close(got, want)


def test_weights_weigh():
    start, weights = starts(RANKS, equal=False), [1, 2, 3, 10]
    (got,), _ = train(
        federated_average(optax.sgd(0.1), "batch", every=1, weights=weights), start, 1, zero
    )
    assert_close(got, jax.tree.map(lambda x: np.average(x, 0, weights)[None] + 0 * x, start))


@pytest.mark.parametrize("weights", [[1, 1e-46], [1e-300, 1e300]])
def test_share_too_small_for_float32_still_counts(weights):
    alone = [np.asarray(_shares(jnp.int32(n), 2, 0.5, weights, 0)) for n in range(8)]
    assert {tuple(shares) for shares in alone} == {(1, 0), (0, 1)}
    few = jax.jit(lambda n: _shares(n, 4, 0.75, [*weights, max(weights), max(weights)], 0))
    for n in range(8):
        shares = np.asarray(few(jnp.int32(n)))
        assert (shares > 0).sum() == 3 and shares.sum() == pytest.approx(1), (
            "who is chosen does not stand still"
        )


@pytest.mark.parametrize(("participation", "chosen"), [(0.5, 4), (0.01, 1), (0.9, 7)])
def test_who_is_not_chosen_stands_still(participation, chosen):
    ranks, every, rounds = 8, 2, 5
    tx = federated_average(
        optax.sgd(0.1, momentum=0.9), "batch", every=every, participation=participation, seed=3
    )
    start = starts(ranks)
    history, state = train(tx, start, every * rounds)
    who = []
    for number in range(rounds):
        first, last = history[number * every], history[number * every + 1]
        moved = np.abs(first["w"] - start["w"]).max((1, 2)) > 1e-7
        assert moved.sum() == chosen
        # All ranks have the mean of the chosen ranks alone, each of which took one more local step.
        assert distance(last, jax.tree.map(lambda x: x[:1], last)) < 1e-5
        who.append(tuple(moved))
        start = last
    assert len(set(who)) > 1
    assert (state.round == rounds).all()


def test_a_round_is_the_weighted_mean_of_the_chosen():
    ranks, every, rounds, rate = 8, 2, 4, 0.05
    weights = [1.0, 2, 3, 4, 5, 6, 7, 20]
    tx = federated_average(
        optax.sgd(rate), "batch", every=every, participation=0.5, weights=weights, seed=1
    )
    history, _ = train(tx, starts(ranks), every * rounds)
    x = starts(ranks)
    for number in range(rounds):
        moved = np.abs(history[number * every]["w"] - x["w"]).max((1, 2)) > 1e-7
        assert moved.sum() == ranks // 2
        shares = np.where(moved, weights, 0)
        for step in range(number * every, (number + 1) * every):
            x = {
                k: v - rate * g
                for (k, v), g in zip(x.items(), grads(x, step).values(), strict=True)
            }
        x = {k: np.average(v, 0, shares)[None] + 0 * v for k, v in x.items()}
        assert_close(history[(number + 1) * every - 1], x, 1e-5)
        uniform = {k: v.mean(0) for k, v in history[number * every].items()}
        assert distance(uniform, {k: v[0] for k, v in x.items()}) > 1e-3
        x = history[(number + 1) * every - 1]


def test_another_seed_chooses_others():
    def who(seed):
        tx = federated_average(optax.sgd(0.1), "batch", every=1, participation=0.25, seed=seed)
        return tuple(float(h["w"][0, 0, 0]) for h in train(tx, starts(8), 4)[0])

    assert who(0) == who(0)
    assert len({who(seed) for seed in range(4)}) > 1


def test_unchosen_rank_is_excluded_from_the_average():
    """Even non-finite parameters are excluded: the share is 0, but 0 times NaN would be NaN."""
    tx = federated_average(optax.sgd(0.1), "batch", every=1, participation=0.5, seed=0)
    start = starts(RANKS)
    chosen = np.asarray(_shares(jnp.int32(0), RANKS, 0.5, None, 0)) > 0
    (want,), _ = train(tx, start, 1)
    (got,), _ = train(
        tx, {k: np.where(per_rank(x, lambda r: chosen[r]), x, np.nan) for k, x in start.items()}, 1
    )
    for k, x in got.items():
        np.testing.assert_array_equal(x[chosen], want[k][chosen])


def test_integer_parameters_stay_local_to_each_rank():
    params = {"w": np.ones((RANKS, 2), np.float32), "n": np.arange(RANKS, dtype=np.int32)}
    start = {
        "w": np.arange(RANKS, dtype=np.float32)[:, None] * np.ones((RANKS, 2), np.float32),
        "n": params["n"],
    }
    for tx in (
        local_sgd(optax.identity(), "batch", every=1),
        federated_average(optax.identity(), "batch", every=1),
        elastic_average(optax.identity(), "batch", every=1, alpha=0.1),
        gossip(optax.identity(), "batch"),
    ):
        (got,), _ = train(tx, start, 1, zero)
        assert (got["n"] == params["n"]).all()
        assert got["n"].dtype == np.int32


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: local_sgd(SGD, "batch", every=0),
            r"^`every` of `local_sgd` must be a whole number, 1 or more, got `0`",
        ),
        (
            lambda: local_sgd(SGD, "batch", every=True),
            r"^`every` of `local_sgd` must be a .*, got `True`",
        ),
        (
            lambda: elastic_average(SGD, "batch", every=2.0, alpha=0.1),
            r"^`every` of `elastic_average` must be a .*, got `2.0`",
        ),
        (
            lambda: federated_average(SGD, "batch", every=1, participation=0),
            r"^`participation` of `federated_average`",
        ),
        (
            lambda: federated_average(SGD, "batch", every=1, weights=[1, 0]),
            r"^`weights` of `federated_average` must be",
        ),
        (
            lambda: federated_average(SGD, ("a", "b"), every=1),
            r"^`axes` of `federated_average` must be",
        ),
        (
            lambda: elastic_average(SGD, "batch", every=1, alpha=1.5),
            r"^`alpha` of `elastic_average` must be .*, got `1.5`",
        ),
        (
            lambda: elastic_average(SGD, "batch", every=1, alpha=0.1, beta=-1),
            r"^`beta` of `elastic_average` must be .*, got `-1`",
        ),
        (
            lambda: gossip(SGD, "batch", "star"),
            r"^`topology` of `gossip` must be one of 'ring', .*, got 'star'",
        ),
    ],
)
def test_arguments_are_refused_when_it_is_made(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            federated_average(SGD, "batch", every=1, weights=[1, 1]),
            r"^`weights` of `federated_average` contains 2 numbers, but the",
        ),
        (
            elastic_average(SGD, "batch", every=1, alpha=0.3),
            r"^`beta` of `elastic_average` is `0.3` and the axis",
        ),
        (
            gossip(SGD, "batch", "torus"),
            r"^`topology` of `gossip` is `torus`, but 5 ranks do not fit a grid",
        ),
    ],
)
def test_worlds_are_refused_before_the_first_step(tx, message):
    with pytest.raises(ValueError, match=message):
        train(tx, starts(5), 1)


@pytest.mark.parametrize(
    "tx",
    [
        local_sgd(SGD, "batch", every=1),
        federated_average(SGD, "batch", every=1),
        elastic_average(SGD, "batch", every=1, alpha=0.1),
        gossip(SGD, "batch"),
    ],
)
def test_parameters_must_be_handed_over(tx):
    with pytest.raises(
        ValueError, match=r"^`\w+` exchanges parameters, but its `update` got no `params`"
    ):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
