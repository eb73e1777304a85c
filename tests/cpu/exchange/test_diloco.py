"""DiLoCo against its algorithm in NumPy and against local SGD, and what it rejects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import finish
from jaxcross.exchange.diloco import DiLoCoState, diloco
from jaxcross.exchange.local_sgd import local_sgd
from tests.support.decentralised_training import RANKS, assert_close, distance, grads, starts, train

pytestmark = pytest.mark.usefixtures("compiled_quickly")
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.mark.integration
def test_an_outer_rate_of_one_is_local_sgd():
    inner = optax.sgd(0.1, momentum=0.9)
    got, state = train(diloco(inner, optax.sgd(1.0), "batch", every=3), starts(RANKS), 7)
    want, plain = train(local_sgd(inner, "batch", every=3), starts(RANKS), 7)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=1e-5)
    assert (state.since == plain.since).all()


def test_rounds_are_those_of_the_algorithm():
    """Two rounds written out by hand, with inner SGD and outer Nesterov momentum."""
    every, rate = 2, 0.05
    history, state = train(
        diloco(optax.sgd(rate), NESTEROV, "batch", every=every), starts(RANKS), 2 * every
    )
    anchor, x = starts(RANKS), starts(RANKS)
    trace = jax.tree.map(np.zeros_like, anchor)
    for number in range(2 * every):
        x = {
            k: v - rate * g for (k, v), g in zip(x.items(), grads(x, number).values(), strict=True)
        }
        if (number + 1) % every == 0:
            back = jax.tree.map(lambda a, v: (a - v).mean(0, keepdims=True) + 0 * v, anchor, x)
            trace = jax.tree.map(lambda t, d: 0.9 * t + d, trace, back)
            anchor = jax.tree.map(lambda a, t, d: a - 0.7 * (0.9 * t + d), anchor, trace, back)
            x = anchor
        assert_close(history[number], x, rtol=1e-5)
    assert_close(state.anchor, anchor, rtol=1e-5)
    assert distance(history[0], jax.tree.map(lambda v: v[:1], history[0])) > 0.1


def growth(rates, every, momentum=0.9, outer_momentum=0.9):
    """Returns the asymptotic growth factor per round on the parabola x**2 / 2, for each rate.

    A round is a linear map there.
    """
    outer = optax.sgd(0.7, momentum=outer_momentum, nesterov=True)

    def matrix(rate):
        tx = diloco(optax.sgd(rate, momentum=momentum), outer, "batch", every=every)
        leaves, treedef = jax.tree.flatten((jnp.zeros(()), tx.init(jnp.zeros(()))))
        floats = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

        def step(_, carry):
            x, state = carry
            updates, state = tx.update(x, state, x)
            return optax.apply_updates(x, updates), state

        def a_round(start):
            given = [
                start[floats.index(n)] if n in floats else leaf for n, leaf in enumerate(leaves)
            ]
            ended = jax.tree.leaves(
                jax.lax.fori_loop(0, every, step, jax.tree.unflatten(treedef, given))
            )
            return jnp.stack([ended[n] for n in floats])

        return jax.jacfwd(a_round)(jnp.zeros(len(floats)))

    on_ranks = jax.vmap(
        lambda _, rates: jax.vmap(matrix)(rates), axis_name="batch", in_axes=(0, None)
    )
    return abs(np.linalg.eigvals(jax.jit(on_ranks)(jnp.zeros(1), jnp.array(rates))[0])).max(-1)


@pytest.mark.integration
def test_two_momenta_diverge_in_short_rounds():
    """Two momenta diverge at rates in an interval that vanishes as rounds get longer.

    The inner optimizer alone converges at all of these rates.
    """
    assert (growth([0.005, 0.02, 0.1, 0.2], 4) > 1).all() and (
        growth([0.004, 0.22, 1.0], 4) < 1
    ).all()
    assert (growth([0.011, 0.02, 0.029], 6) > 1).all() and (
        growth([0.01, 0.032, 0.1, 0.6], 6) < 1
    ).all()
    rates = np.geomspace(1e-3, 1.9, 100)
    assert (growth(rates, 7) < 1).all() and (growth(rates, 8) < 1).all()
    assert (growth(rates, 4, outer_momentum=0.5) < 1).all() and (
        growth(rates, 4, momentum=0.0) < 1
    ).all()


def test_finish_drops_the_steps_of_an_open_round():
    """Within a round ranks differ, and their model is the anchor, even inside a chain.

    With another optimizer, the model is the parameters.
    """
    tx = optax.chain(optax.clip(10.0), diloco(optax.sgd(0.05), NESTEROV, "batch", every=2))
    history, state = train(tx, starts(RANKS), 5)
    last = finish(history[-1], state)
    assert distance(history[-1], jax.tree.map(lambda x: x[:1], history[-1])) > 1e-3
    assert distance(last, jax.tree.map(lambda x: x[:1], last)) == 0
    assert distance(last, history[3]) < 1e-5
    plain = optax.adam(0.1).init(history[-1])
    assert finish(history[-1], plain) is history[-1]
    with pytest.raises(ValueError, match=r"`finish` contains 2 strategies with an anchor each"):
        finish(history[-1], (state, state))


def test_leaves_that_are_not_floats_keep_their_updates():
    params = {"n": jnp.int32(3), "w": jnp.ones(2)}
    tx = diloco(optax.identity(), optax.sgd(0.5), "batch", every=1)
    step = jax.vmap(
        lambda g, p: tx.update(g, tx.init(p), p)[0], axis_name="batch", axis_size=1, in_axes=None
    )
    updates = step({"n": jnp.int32(4), "w": jnp.ones(2)}, params)
    assert updates["n"].tolist() == [4] and updates["w"].tolist() == [[0.5, 0.5]]
    assert finish({"n": jnp.int32(7), "w": jnp.zeros(2)}, tx.init(params)) == {
        "n": 7,
        "w": pytest.approx([1.0, 1.0]),
    }


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: diloco(optax.sgd(1), optax.sgd(1), "batch", every=0),
            "`every` of `diloco` must be .*, got `0`",
        ),
        (
            lambda: diloco(0.1, optax.sgd(1), "batch", every=1),
            r"the optimizer of `diloco` must be .*, got `0.1`",
        ),
        (
            lambda: diloco(optax.sgd(1), None, "batch", every=1),
            r"the optimizer of `diloco` must be .*, got `None`",
        ),
        (
            lambda: diloco(optax.sgd(1), optax.sgd(1), "batch", every=1).update({}, None),
            "got no `params`",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_parameters_and_anchor_share_no_array():
    params = {"w": jnp.ones(3)}
    state = diloco(optax.sgd(0.1), NESTEROV, "batch", every=2).init(params)
    assert isinstance(state, DiLoCoState)
    assert state.anchor["w"].unsafe_buffer_pointer() != params["w"].unsafe_buffer_pointer()
