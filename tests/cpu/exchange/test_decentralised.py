"""Local SGD, federated and elastic averaging, gossip: against NumPy, and what their averages conserve."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import mean
from jaxcross.exchange.elastic_average import elastic_average
from jaxcross.exchange.federated_average import _shares, federated_average
from jaxcross.exchange.gossip import gossip, mixing_matrix
from jaxcross.exchange.gossip import rounds as rounds_of
from jaxcross.exchange.local_sgd import local_sgd
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide

pytestmark = pytest.mark.exhaustive

RANKS = 4
RTOL = 2e-6


def starts(ranks, equal=True, seed=0):
    rng = np.random.default_rng(seed)
    shape = (1 if equal else ranks,)
    tree = {"w": rng.normal(size=(*shape, 3, 2)), "b": rng.normal(size=(*shape, 2)), "s": rng.normal(size=shape)}
    return {k: np.repeat(v, ranks // shape[0], 0).astype(np.float32) for k, v in tree.items()}


def grads(params, step):
    """Each rank's gradient of its own quadratic, of all ranks at once."""
    return {
        k: per_rank(p, lambda r: 1 + r) * (p - per_rank(p, lambda r: step + (r - 1) ** 2)) for k, p in params.items()
    }


def per_rank(like, number):
    """A number a rank, with as many dimensions as `like`."""
    return np.asarray(number(np.arange(len(like))), np.float32).reshape(-1, *[1] * (like.ndim - 1))


def train(tx, params, steps, gradients=grads):
    """Parameters after each step, of all ranks at once, and the last state."""
    init = jax.vmap(tx.init, axis_name="batch")

    @jax.jit
    @lambda f: jax.vmap(f, axis_name="batch")
    def step(g, state, p):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    state, history = init(params), []
    for number in range(steps):
        params, state = jax.tree.map(np.asarray, step(gradients(params, number), state, params))
        history.append(params)
    return history, state


def zero(params, step):
    return jax.tree.map(np.zeros_like, params)


def assert_close(got, want, rtol=RTOL):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, want)


def distance(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


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


def test_local_steps_are_alone_and_the_exchange_is_the_mean():
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


def test_the_exchange_keeps_the_mean_of_different_parameters():
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
        traced = decide(trace(step, args, axes={"batch": 1}, wire=LocalRanks()), jax.tree.leaves(args))
        program = stages.cut(traced)
        sent.append(sum(len(s.exchanges) for s in program.segments))
        params, state = jax.vmap(step, axis_name="batch")(*jax.tree.map(lambda x: x[None], args))
        params, state = jax.tree.map(lambda x: x[0], (params, state))
    assert sent == [0, 2, 0, 2]


def test_full_participation_and_equal_weights_is_local_sgd():
    optimizer = optax.sgd(0.1, momentum=0.9)
    (*_, got), _ = train(federated_average(optimizer, "batch", every=2, weights=[7.0] * RANKS), starts(RANKS), 4)
    (*_, want), _ = train(local_sgd(optimizer, "batch", every=2), starts(RANKS), 4)
    assert_close(got, want)


def test_weights_weigh():
    start, weights = starts(RANKS, equal=False), [1, 2, 3, 10]
    (got,), _ = train(federated_average(optax.sgd(0.1), "batch", every=1, weights=weights), start, 1, zero)
    assert_close(got, jax.tree.map(lambda x: np.average(x, 0, weights)[None] + 0 * x, start))


@pytest.mark.parametrize("weights", [[1, 1e-46], [1e-300, 1e300]])
def test_a_share_that_float32_cannot_hold_is_still_a_share(weights):
    alone = [np.asarray(_shares(jnp.int32(n), 2, 0.5, weights, 0)) for n in range(8)]
    assert {tuple(shares) for shares in alone} == {(1, 0), (0, 1)}
    few = jax.jit(lambda n: _shares(n, 4, 0.75, [*weights, max(weights), max(weights)], 0))
    for n in range(8):
        shares = np.asarray(few(jnp.int32(n)))
        assert (shares > 0).sum() == 3 and shares.sum() == pytest.approx(1), "who is chosen does not stand still"


@pytest.mark.parametrize(("participation", "chosen"), [(0.5, 4), (0.01, 1), (0.9, 7)])
def test_who_is_not_chosen_stands_still(participation, chosen):
    ranks, every, rounds = 8, 2, 5
    tx = federated_average(optax.sgd(0.1, momentum=0.9), "batch", every=every, participation=participation, seed=3)
    start = starts(ranks)
    history, state = train(tx, start, every * rounds)
    who = []
    for number in range(rounds):
        first, last = history[number * every], history[number * every + 1]
        moved = np.abs(first["w"] - start["w"]).max((1, 2)) > 1e-7
        assert moved.sum() == chosen
        # The mean over the chosen alone, which one more local step of theirs leads to.
        assert distance(last, jax.tree.map(lambda x: x[:1], last)) < 1e-5
        who.append(tuple(moved))
        start = last
    assert len(set(who)) > 1
    assert (state.round == rounds).all()


def test_a_round_is_the_weighted_mean_of_the_chosen():
    ranks, every, rounds, rate = 8, 2, 4, 0.05
    weights = [1.0, 2, 3, 4, 5, 6, 7, 20]
    tx = federated_average(optax.sgd(rate), "batch", every=every, participation=0.5, weights=weights, seed=1)
    history, _ = train(tx, starts(ranks), every * rounds)
    x = starts(ranks)
    for number in range(rounds):
        moved = np.abs(history[number * every]["w"] - x["w"]).max((1, 2)) > 1e-7
        assert moved.sum() == ranks // 2
        shares = np.where(moved, weights, 0)
        for step in range(number * every, (number + 1) * every):
            x = {k: v - rate * g for (k, v), g in zip(x.items(), grads(x, step).values(), strict=True)}
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
        np.testing.assert_allclose((x + updates[k]).sum(0) + state.centre[k][0], before, rtol=1e-5, atol=1e-5)
        assert distance(updates[k], 0 * x) > 0.01


def test_without_springs_ranks_train_alone():
    got, _ = train(elastic_average(optax.sgd(0.1), "batch", every=1, alpha=0.0), starts(RANKS), 3)
    want, _ = train(optax.sgd(0.1), starts(RANKS), 3)
    assert_close(got, want)


def test_a_rank_that_is_not_chosen_is_no_part_of_the_average():
    """Nor are parameters of its own that are not finite: its share is 0, and 0 times NaN is NaN."""
    tx = federated_average(optax.sgd(0.1), "batch", every=1, participation=0.5, seed=0)
    start = starts(RANKS)
    chosen = np.asarray(_shares(jnp.int32(0), RANKS, 0.5, None, 0)) > 0
    (want,), _ = train(tx, start, 1)
    (got,), _ = train(tx, {k: np.where(per_rank(x, lambda r: chosen[r]), x, np.nan) for k, x in start.items()}, 1)
    for k, x in got.items():
        np.testing.assert_array_equal(x[chosen], want[k][chosen])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.25), (0.25, 0.0)])
def test_a_pull_of_zero_passes_nothing_on(alpha, beta, bad):
    tx = elastic_average(optax.sgd(0.1), "batch", every=1, alpha=alpha, beta=beta)
    start = starts(RANKS)
    broken = {k: np.where(per_rank(x, lambda r: r == 1), bad, x) for k, x in start.items()}
    state = jax.vmap(tx.init)(start)
    step = jax.vmap(tx.update, axis_name="batch")
    for _ in range(2):  # the first may spoil the centre, the second what is pulled towards it
        updates, state = step(zero(start, 0), state, broken)
    for k, u in updates.items():
        assert np.isfinite(np.asarray(u)[[0, 2, 3]]).all(), k
        assert beta or np.isfinite(state.centre[k]).all(), k


TOPOLOGIES = [(t, n) for t in ("ring", "torus", "exponential", "complete") for n in (1, 2, 3, 4, 6, 8, 9, 12, 16)]
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
@pytest.mark.parametrize(("topology", "ranks"), [("ring", 2), ("ring", 5), ("torus", 6), ("exponential", 6)])
def test_gossip_is_its_matrix(topology, ranks, adapt_first):
    start, rate = starts(ranks, equal=False), 0.05
    history, _ = train(gossip(optax.sgd(rate), "batch", topology, adapt_first=adapt_first), start, 4)
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
    assert_close(jax.tree.map(lambda x: x.mean(0), got), jax.tree.map(lambda x: x.mean(0), start), 1e-5)
    assert distance(got, start) > 0.1
    equal = starts(6)
    (*_, same), _ = train(gossip(optax.sgd(0.1), "batch", topology), equal, 3, zero)
    # Where neighbours agree nothing moves; a sum over all rounds.
    assert distance(same, equal) <= (1e-6 if topology == "complete" else 0)


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_a_ring_agrees_at_the_rate_of_its_second_eigenvalue(ranks):
    rate = (1 + 2 * np.cos(2 * np.pi / ranks)) / 3
    found = rounds_of("ring", ranks)[0]
    eigenvalues = np.sort(np.linalg.eigvalsh(mixing_matrix(found, ranks)))
    assert eigenvalues[-2] == pytest.approx(rate)
    slowest = {"w": np.cos(2 * np.pi * np.arange(ranks) / ranks)[:, None].astype(np.float32)}
    history, _ = train(gossip(optax.sgd(0.1), "batch", "ring"), slowest, 4, zero)
    errors = [np.linalg.norm(h["w"]) for h in (slowest, *history)]
    np.testing.assert_allclose(np.divide(errors[1:], errors[:-1]), rate, rtol=1e-5)


@pytest.mark.parametrize(("ranks", "agree"), [(2, True), (4, True), (8, True), (6, False)])
def test_an_exponential_graph_of_a_power_of_two_agrees_after_one_turn(ranks, agree):
    start = starts(ranks, equal=False)
    turn = (ranks - 1).bit_length()
    (*_, got), _ = train(gossip(optax.sgd(0.1), "batch", "exponential"), start, turn, zero)
    apart = distance(got, jax.tree.map(lambda x: x.mean(0, keepdims=True), start))
    assert (apart < 1e-6) == agree


def test_a_complete_graph_that_adapts_first_is_synchronous():
    tx = gossip(optax.sgd(0.1, momentum=0.9), "batch", "complete", adapt_first=True)
    (*_, got), _ = train(tx, starts(RANKS), 4)
    (*_, want), _ = train(optax.chain(mean("batch"), optax.sgd(0.1, momentum=0.9)), starts(RANKS), 4)
    assert_close(got, want)


def test_whole_numbers_among_the_parameters_stay_the_rank_s_own():
    params = {"w": np.ones((RANKS, 2), np.float32), "n": np.arange(RANKS, dtype=np.int32)}
    start = {"w": np.arange(RANKS, dtype=np.float32)[:, None] * np.ones((RANKS, 2), np.float32), "n": params["n"]}
    for tx in (
        local_sgd(optax.identity(), "batch", every=1),
        federated_average(optax.identity(), "batch", every=1),
        elastic_average(optax.identity(), "batch", every=1, alpha=0.1),
        gossip(optax.identity(), "batch"),
    ):
        (got,), _ = train(tx, start, 1, zero)
        assert (got["n"] == params["n"]).all()
        assert got["n"].dtype == np.int32


SGD = optax.sgd(0.1)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1 / RANKS), (1, 1)])
def test_springs_that_swap_for_ever_are_refused(alpha, beta):
    ranks = round(1 / beta)
    tx = elastic_average(SGD, "batch", every=1, alpha=alpha, beta=beta)
    with pytest.raises(ValueError, match="change places at every exchange and never meet"):
        train(tx, starts(ranks), 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: local_sgd(SGD, "batch", every=0), r"^`every` of `local_sgd` is `0`: it counts and must be a whole"),
        (lambda: local_sgd(SGD, "batch", every=True), r"^`every` of `local_sgd` is `True`"),
        (lambda: elastic_average(SGD, "batch", every=2.0, alpha=0.1), r"^`every` of `elastic_average` is `2.0`"),
        (lambda: federated_average(SGD, "batch", every=1, participation=0), r"^`participation` of `federated_average`"),
        (lambda: federated_average(SGD, "batch", every=1, weights=[1, 0]), r"^`weights` of `federated_average` are"),
        (lambda: federated_average(SGD, ("a", "b"), every=1), r"^`axis_name` of `federated_average` is"),
        (lambda: elastic_average(SGD, "batch", every=1, alpha=1.5), r"^`alpha` of `elastic_average` is `1.5`"),
        (lambda: elastic_average(SGD, "batch", every=1, alpha=0.1, beta=-1), r"^`beta` of `elastic_average` is `-1`"),
        (lambda: gossip(SGD, "batch", "star"), r"^`topology` of `gossip` is `'star'`: it is one of ring, torus"),
    ],
)
def test_arguments_are_refused_when_it_is_made(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (federated_average(SGD, "batch", every=1, weights=[1, 1]), r"^`weights` of `federated_average` are 2, but the"),
        (
            elastic_average(SGD, "batch", every=1, alpha=0.3),
            r"^`beta` of `elastic_average` is `0.3` and the axis",
        ),
        (gossip(SGD, "batch", "torus"), r"^`topology` of `gossip` is `torus`, but 5 ranks make no grid"),
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
    with pytest.raises(ValueError, match=r"^`\w+` got no `params`, but parameters are what it exchanges"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
