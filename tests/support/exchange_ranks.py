"""Runs an exchange on all ranks in one process, to test what its docstring promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.testing import vmapped

RANKS = 4


def on_ranks(
    tx: optax.GradientTransformation, axes: dict[str, int] | None = None
) -> Callable[..., Any]:
    """`tx.update(grads, state)` on all ranks. Arrays have one leading dimension per axis."""
    return jax.jit(vmapped(lambda grads, state: tx.update(grads, state), axes or {"batch": RANKS}))


def states(tx: optax.GradientTransformation, grads: Any, axes: int = 1) -> Any:
    """The initial state of every rank."""
    shape = jax.tree.leaves(grads)[0].shape[:axes]
    state = tx.init(jax.tree.map(lambda g: g[(0,) * axes], grads))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), state)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
