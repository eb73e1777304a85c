"""Trains all ranks in one process. Each rank has its own quadratic and its own parameters."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

RANKS = 4
RTOL = 2e-6


def starts(ranks, equal=True, seed=0):
    rng = np.random.default_rng(seed)
    shape = (1 if equal else ranks,)
    tree = {
        "w": rng.normal(size=(*shape, 3, 2)),
        "b": rng.normal(size=(*shape, 2)),
        "s": rng.normal(size=shape),
    }
    return {k: np.repeat(v, ranks // shape[0], 0).astype(np.float32) for k, v in tree.items()}


def grads(params, step):
    """Every rank's gradient of its own quadratic, stacked along the first axis."""
    return {
        k: per_rank(p, lambda r: 1 + r) * (p - per_rank(p, lambda r: step + (r - 1) ** 2))
        for k, p in params.items()
    }


def per_rank(like, number):
    """One number per rank, reshaped to as many dimensions as `like`."""
    return np.asarray(number(np.arange(len(like))), np.float32).reshape(-1, *[1] * (like.ndim - 1))


def train(tx: Any, params: Any, steps: int, gradients: Any = grads) -> tuple[Any, Any]:
    """Returns the parameters of all ranks after each step, and the final state."""
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
    return max(
        float(np.abs(x - y).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


SGD = optax.sgd(0.1)
