"""Weights of gradients, to average over tokens or examples if their numbers differ.

The numbers may differ between ranks (`mean`) or between batches (`accumulate`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange.validation import accumulation_dtype


def as_weight(weight: jax.typing.ArrayLike, what: str) -> jax.Array:
    """Returns a weight as a scalar, float32 at least.

    Raises:
        ValueError: It is not one real number.
    """
    dtype = jnp.result_type(weight)
    if jnp.ndim(weight) or not (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    ):
        raise ValueError(
            f"`weight` of {what} is of shape {list(jnp.shape(weight))} and type {dtype.name}: it "
            "is one real number, for example how many tokens of this rank's batch count, "
            "`mask.sum()`."
        )
    return jnp.asarray(weight, accumulation_dtype(jnp.promote_types(dtype, jnp.float32)))


def weighed(updates: optax.Updates, weight: jax.Array, what: str) -> optax.Updates:
    """Returns each update times the weight, in float32 at least.

    A weight of 0 gives zeros whatever the update is, because the mean over no tokens is often NaN.

    Raises:
        ValueError: In `shard_map(check_vma=True)`, if JAX has already summed the updates over ranks
            with different weights.
    """

    def one(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
        _check_own(path, x, weight, what)
        return jnp.where(
            weight == 0,
            0,
            jnp.asarray(x, jnp.promote_types(jnp.result_type(x), weight.dtype)) * weight,
        )

    return jax.tree.map_with_path(one, updates)


def divided(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Divides a sum of weighted updates by the sum of the weights; zeros if all weights are 0."""
    return (total / jnp.where(weight == 0, 1, weight)).astype(total.dtype)


def _check_own(
    path: jax.tree_util.KeyPath, update: jax.Array, weight: jax.Array, what: str
) -> None:
    own, its = (jax.eval_shape(lambda x: x, leaf).manual_axis_type for leaf in (update, weight))
    axes = () if own is None or its is None else sorted(its.varying - own.varying, key=str)
    if axes:
        raise ValueError(
            f"{what} weighs this rank's own gradients, but the update "
            f"`{jax.tree_util.keystr(path)}` is the same on all ranks of "
            f"{', '.join(f'`{axis}`' for axis in axes)}: in `shard_map(check_vma=True)` JAX sums "
            "gradients of parameters that are the same on all ranks. Differentiate with respect to "
            '`jax.lax.pcast(params, axes, to="varying")`, or divide the sum by the sum of the '
            "weights in the step."
        )
