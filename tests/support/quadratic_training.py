"""Trains one quadratic per rank, with all ranks in one process, and compares the results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

RANKS = 3
SHAPES = {"w": (5, 3), "b": (3,), "s": (), "e": (0,)}


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in SHAPES.items()}


def quadratic(params, step):
    """Every rank's gradient. Parameters are stacked by rank."""

    def one(x):
        rank = np.arange(len(x), dtype=np.float32).reshape(-1, *[1] * (x.ndim - 1))
        return (1 + rank) * (x - rank) * np.float32(0.5 + step % 2)

    return jax.tree.map(lambda x: one(np.asarray(x, np.float32)).astype(x.dtype), params)


def zero(params, step):
    return jax.tree.map(np.zeros_like, params)


def train(tx, params, steps, ranks=RANKS, gradients=quadratic, state=None):
    """Returns all ranks' parameters after each step, and the final state."""
    params = jax.tree.map(lambda x: np.stack([x] * ranks), params)
    state = jax.vmap(lambda p: tx.init(p), axis_name="batch")(params) if state is None else state

    @jax.jit
    @lambda f: jax.vmap(f, axis_name="batch")
    def step(g, state, p):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    history = []
    for number in range(steps):
        params, state = jax.tree.map(np.asarray, step(gradients(params, number), state, params))
        history.append(params)
    return history, state


def assert_close(got, want, rtol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, want)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def distance(a, b):
    return max(
        float(np.abs(x - y).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        if x.size
    )


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(
        0.1, weight_decay=0.1, mask={"w": True, "b": False, "s": False, "e": True}
    ),
}
