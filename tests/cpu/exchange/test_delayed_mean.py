"""The previous step's mean: bitwise equal to the simulator, and hidden by computation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import finish
from jaxcross.exchange.delayed_mean import delayed_mean
from jaxcross.exchange.staleness import asynchronous
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks
from tests.support.decentralised_training import RANKS, SGD, starts, train

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.mostly_integration("adamw")
@pytest.mark.parametrize("optimizer", [SGD, optax.adamw(0.1)], ids=["sgd", "adamw"])
def test_bits_are_those_of_a_delay_of_one(optimizer):
    got, state = train(delayed_mean(optimizer, "batch"), starts(RANKS), 5)
    want, _ = train(asynchronous(optimizer, "batch", delays=1), starts(RANKS), 5)
    for a, b in zip(got, want, strict=True):
        assert jax.tree.all(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), a, b))
    assert finish(got[-1], state) is got[-1]


def test_first_update_is_of_zeros_and_the_last_gradient_waits():
    start = starts(RANKS)
    (first, second), state = train(delayed_mean(SGD, "batch"), start, 2)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), first, start))
    assert np.ptp(second["w"], 0).max() == 0 and np.ptp(np.asarray(state.pending["w"]), 0).max() > 0


def test_its_exchange_is_carried():
    tx = delayed_mean(optax.adam(0.1), "batch")

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.tanh(x @ p).sum())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.ones((16, 16))
    args = ((params, tx.init(params)), jnp.ones((4, 16)))
    for donated, needs in (
        ((0,), "0,1"),
        ((), "1"),
    ):  # if allowed, the update overwrites what segment 0 reads
        program = stages.cut(
            trace(step, args, axes={"batch": 2}, wire=LocalRanks(), donate_argnums=donated)
        )
        assert str(program).splitlines()[1:] == [
            "0 compute <- inputs",
            "1 collective psum [1.0 kB], carried <- inputs",
            f"2 compute <- {needs}",
        ]
