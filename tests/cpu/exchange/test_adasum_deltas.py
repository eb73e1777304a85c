"""Adasum of optimizer updates rather than gradients.

The optimizers' states are compared bit for bit with those of the optimizers alone, so everything is
compiled as it is for users.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange.adasum import adasum
from jaxcross.testing import vmapped
from tests.support.adasum_tree import EPS, grads, norm, tree

pytestmark = pytest.mark.integration


@pytest.mark.mostly_exhaustive("lamb")
@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1), optax.lamb(0.1)],
    ids=["sgd", "momentum", "adam", "lamb"],
)
def test_deltas_come_from_each_rank_s_own_optimizer(optimizer):
    tx, ranks = adasum("batch", optimizer=optimizer), 4
    params = jax.tree.map(lambda x: x[0], grads(1))
    state = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * ranks), tx.init(params))
    alone = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * ranks), optimizer.init(params))
    step = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, params), axis_name="batch"))
    own = jax.jit(jax.vmap(lambda g, s: optimizer.update(g, s, params)))
    for number in range(2):
        given = grads(ranks, number)
        updates, state = step(given, state)
        deltas, alone = own(given, alone)
        for name, delta in deltas.items():
            want = tree(delta)
            assert norm(updates[name][0] - want) <= 50 * EPS * norm(want)
            assert (updates[name] == updates[name][:1]).all()
    jax.tree.map(np.testing.assert_array_equal, state[0].per_rank, alone)


def test_deltas_are_averaged_in_nodes_before_combining():
    optimizer, axes = optax.adam(0.1), {"node": 2, "local": 2}
    tx = adasum(("node", "local"), optimizer=optimizer)
    params = jax.tree.map(lambda x: x[0], grads(1))
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, 2, *jnp.shape(x))), tx.init(params))
    alone = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (2, 2, *jnp.shape(x))), optimizer.init(params)
    )
    step = jax.jit(vmapped(lambda g, s: tx.update(g, s, params), axes))
    own = jax.jit(vmapped(lambda g, s: optimizer.update(g, s, params), axes))
    for number in range(2):
        given = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), grads(4, number))
        updates, state = step(given, state)
        deltas, alone = own(given, alone)
        for name, delta in deltas.items():
            want = tree(np.asarray(delta, np.float64).mean(1))
            assert norm(updates[name][0, 0] - want) <= 50 * EPS * norm(want)
            assert (updates[name] == updates[name][:1, :1]).all()
    jax.tree.map(np.testing.assert_array_equal, state[0].per_rank, alone)
