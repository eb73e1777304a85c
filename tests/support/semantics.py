"""One gradient as a plain function and as a `jax.shard_map`, and runs of both on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, run_program

RANKS = 4
AXES = {"batch": RANKS}
W = np.linspace(0.5, 1.5, 3, dtype=np.float32)
X = np.random.default_rng(0).normal(size=(RANKS, 3)).astype(np.float32)


def gradient(w: Any, x: Any) -> Any:
    """The gradient of a loss that is summed over ranks, for weights that are identical on all."""
    return jax.grad(lambda w: lax.psum(jnp.sum(jnp.sin(w * x)), "batch"))(w)


def body(cast: bool) -> Callable[..., Any]:
    """The same gradient for `shard_map`. With `cast`, it marks the weights as varying itself."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            own = lax.pcast(w, "batch", to="varying") if cast else w
            return lax.psum(jnp.sum(jnp.sin(own * x)), "batch")

        return jax.grad(loss)(w)

    return step


def mapped(step: Callable[..., Any], check_vma: bool, **mesh: Any) -> Any:
    spec = PartitionSpec("batch")
    out = PartitionSpec() if check_vma else spec
    return jax.shard_map(
        step, in_specs=(PartitionSpec(), spec), out_specs=out, check_vma=check_vma, **mesh
    )


def on_ranks(step: Callable[..., Any], rows: Any) -> list[np.ndarray]:
    args = [(W, row) for row in rows]
    program = stages.cut(trace(step, args[0], axes=AXES, wire=LocalRanks()))
    return [np.asarray(out) for (out,) in run_program(program, args)]


def true_gradient() -> np.ndarray:
    return np.sum(X * np.cos(W * X), 0)
