"""Arithmetic on updates and parameters: moves, means over ranks, weights, and types.

With weights, a mean counts every token or example equally, even if ranks (in `mean`) or batches (in
`accumulate`) contain different numbers of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxcross._pytree import PyTree
from jaxcross.errors import quoted
from jaxcross.exchange.collectives import Axes


def updates_towards(
    updates: optax.Updates, params: optax.Params, targets: optax.Params
) -> optax.Updates:
    """Returns updates that move `params` to `targets`, up to rounding.

    Non-floating-point leaves keep their updates.
    """

    def one(u: jax.Array, p: jax.Array, target: jax.Array) -> jax.Array:
        return (target - p).astype(u.dtype) if is_float(p) else u

    return jax.tree.map(one, updates, params, targets)


def add_moves(updates: optax.Updates, moves: optax.Params) -> optax.Updates:
    """Adds `moves`, a tree like the parameters, to the updates of all floating-point leaves."""
    return jax.tree.map(lambda u, m: (u + m).astype(u.dtype) if is_float(m) else u, updates, moves)


def mean_of(tree: PyTree, axes: Axes) -> PyTree:
    """Averages each floating-point leaf over `axes`; other leaves are unchanged."""
    return jax.tree.map(lambda x: jax.lax.pmean(x, axes) if is_float(x) else x, tree)


def sum_of(tree: PyTree, axes: Axes) -> PyTree:
    """Sums each floating-point leaf over `axes`; other leaves are unchanged."""
    return jax.tree.map(lambda x: jax.lax.psum(x, axes) if is_float(x) else x, tree)


def accumulation_dtype(dtype: DTypeLike) -> DTypeLike:
    """Returns the type to sum in: at least float32 for floats, any other type unchanged."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def is_float(x: jax.typing.ArrayLike) -> bool:
    """Whether a leaf can be trained, i.e. is floating-point or complex."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def typed_like(new: jax.typing.ArrayLike, old: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """Casts a new state leaf to the type of the old leaf, since branches of a `cond` must match."""
    return (
        new
        if jnp.result_type(new) == jnp.result_type(old)
        else jnp.asarray(new, jnp.result_type(old))
    )


def varying_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """Marks a leaf as varying over every axis that `old` varies over.

    With `shard_map(check_vma=True)`, JAX tracks the axes over which each value varies. A mean over
    ranks is identical on all of them, so it doesn't vary. But we may store it in a state field that
    held a rank's own values until now, and JAX insists that the field keep varying as before, so
    the mean has to be marked first. Without `check_vma`, this is a no-op.
    """
    before, after = (jax.eval_shape(lambda x: x, leaf).manual_axis_type for leaf in (old, new))
    axes = () if before is None or after is None else tuple(before.varying - after.varying)
    return jax.lax.pcast(new, axes, to="varying") if axes else new


def product(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
    """Returns the matrix product in full float32.

    By default, GPUs round the operands of a matrix product to ten mantissa bits (TF32), which isn't
    accurate enough for our exchanges: a cosine transform would no longer be orthonormal, and an
    error-feedback residual would no longer be exactly what the update leaves out.
    """
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def as_weight(weight: jax.typing.ArrayLike, what: str) -> jax.Array:
    """Converts a weight to a scalar of type float32 or wider.

    Raises:
        ValueError: It is not a single real number.
    """
    dtype = jnp.result_type(weight)
    if jnp.ndim(weight) or not (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    ):
        raise ValueError(
            f"`weight` of {what} must be one real number, for example how many tokens of this "
            f"rank's batch count (`mask.sum()`), got an array of shape {list(jnp.shape(weight))} "
            f"and type {dtype.name}."
        )
    return jnp.asarray(weight, accumulation_dtype(jnp.promote_types(dtype, jnp.float32)))


def weighed(updates: optax.Updates, weight: jax.Array, what: str) -> optax.Updates:
    """Multiplies each update by the weight, in float32 or wider.

    With a weight of 0, the result is zero regardless of the update. A rank without any tokens has
    weight 0, but its mean gradient is often NaN. Since 0 times NaN is NaN, such a rank would
    otherwise poison the mean over all ranks.

    Raises:
        ValueError: Under `shard_map(check_vma=True)`, if JAX has already summed the updates over
            ranks with different weights.
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
    """Divides a weighted sum of updates by the total weight; returns zeros if all weights are 0."""
    return (total / jnp.where(weight == 0, 1, weight)).astype(total.dtype)


def _check_own(
    path: jax.tree_util.KeyPath, update: jax.Array, weight: jax.Array, what: str
) -> None:
    own, its = (jax.eval_shape(lambda x: x, leaf).manual_axis_type for leaf in (update, weight))
    axes = () if own is None or its is None else sorted(its.varying - own.varying, key=str)
    if axes:
        raise ValueError(
            f"{what} weights this rank's own gradients, but the update "
            f"`{jax.tree_util.keystr(path)}` is the same on all ranks of "
            f"{quoted(axes)}, because in `shard_map(check_vma=True)` JAX sums gradients of "
            "parameters that are the same on all ranks. Differentiate with respect to "
            '`jax.lax.pcast(params, axes, to="varying")`, or divide the sum by the sum of the '
            "weights in the step."
        )
