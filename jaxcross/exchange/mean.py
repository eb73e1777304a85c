"""The mean of the gradients over ranks: synchronous data parallelism as everybody knows it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def mean(axis_name: Hashable | tuple[Hashable, ...], wire_dtype: Any = None) -> optax.GradientTransformation:
    """Replace each update by its mean over `axis_name`, the same on every rank of that axis. Stateless.

    It stands where `lax.pmean(grads, axis_name)` would stand in the step:

    ```python
    tx = optax.chain(jaxcross.exchange.mean("batch", wire_dtype=jnp.bfloat16), optax.sgd(0.1))
    ```

    Args:
        axis_name: One axis or several.
        wire_dtype: Element type on the wire for wider floats; `jnp.bfloat16` halves float32's bytes. Each rank rounds
            once before, the sum is made in float32 and rounded once, the division is made in the update's own type.

    Raises:
        ValueError: `wire_dtype` is no floating-point type.
    """
    if wire_dtype is not None and not jnp.issubdtype(wire_dtype, jnp.floating):
        raise ValueError(
            f"`wire_dtype` is {jnp.dtype(wire_dtype).name}: gradients need a floating-point type on the wire, "
            "for example `jnp.bfloat16`."
        )

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        return jax.tree.map(_mean, updates), state

    def _mean(x: jax.Array) -> jax.Array:
        if wire_dtype is None or not _narrows(jnp.asarray(x).dtype, wire_dtype):
            return jax.lax.pmean(x, axis_name)
        total = jax.lax.psum(x.astype(wire_dtype), axis_name).astype(x.dtype)
        return total / jax.lax.psum(1, axis_name)

    return optax.GradientTransformation(init, update)


def _narrows(dtype: Any, wire_dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits > jnp.finfo(wire_dtype).bits
