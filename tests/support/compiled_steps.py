"""A train step with two exchanges, cut and compiled for ranks in one process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcross.program import stages
from jaxcross.program.execution import Compiled
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks

AXES = {"batch": 2}
N = 64


def train_step(state: Any, x: Any) -> Any:
    """A step with two dependent exchanges and a state with momentum."""
    w, m = state["w"], state["m"]
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    grads = lax.pmean(grads, "batch")
    m = 0.9 * m + jnp.linalg.qr(grads)[0]
    m = lax.pmean(m, "batch")
    return {"w": w - 0.1 * m, "m": m}, jnp.sum(grads)


def compiled(
    step: Any = train_step, *, donate: tuple[int, ...] = (0,), cut: Any = "whole", args: Any = None
) -> tuple[Compiled, Any]:
    args = args or (
        {"w": jnp.ones((N, N)), "m": jnp.zeros((N, N))},
        jnp.arange(N * N, dtype=jnp.float32).reshape(N, N) / N,
    )
    traced = trace(step, args, axes=AXES, wire=LocalRanks(), donate_argnums=donate)
    return stages.compile(stages.cut(traced, cut), jax.tree.leaves((args, {}))), args
