"""The two collectives of 1-D tensor parallelism, with custom derivatives.

Every rank computes its own copy of the same global loss, and we want the gradient of that single
loss. JAX computes something else if the axes are bound by `vmap`, by `crossover`, or by
`shard_map(check_vma=False)`: it transposes `psum` to `psum`, as if the copies were separate losses
to be added up. In these cases, we define the forward and backward passes ourselves. Under
`check_vma=True`, JAX gets the transposes right, so we leave them alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import jax

from jaxcross._jax_compat import checks_varying, vary_over

Axes = tuple[str, ...]
Arrays = TypeVar("Arrays")


def copy_to(x: Arrays, axes: Axes) -> Arrays:
    """Returns `x`, which is equal on all ranks of `axes`, and sums its gradient over these ranks.

    Use it in front of a computation that's divided among the ranks, such as a dense layer where
    each rank computes part of the output. The forward pass doesn't send anything. In the backward
    pass, each rank only knows its own part's contribution to the gradient of `x`, so the
    contributions are summed by an all-reduce. This is the operator f in Megatron-LM (arXiv
    1909.08053, section 3).

    Args:
        x: A tree of arrays.
        axes: Axis names. If empty, there's no communication at all.
    """
    copy: Any = vary_over if checks_varying() else _copy_to
    return jax.tree.map(lambda leaf: copy(leaf, axes), x) if axes else x


def reduce_from(x: Arrays, axes: Axes) -> Arrays:
    """Returns the sum of `x` over the ranks of `axes`, each of which receives the whole gradient.

    Use it after a computation that's divided among the ranks, to add up their partial results. The
    forward pass performs an all-reduce, after which all ranks of `axes` continue with the same sum.
    The backward pass doesn't send anything, because every rank already has the gradient of the sum.
    This is the operator g in Megatron-LM.

    Args:
        x: A tree of arrays.
        axes: Axis names. If empty, there's no communication at all.
    """
    reduce: Any = jax.lax.psum if checks_varying() else _reduce_from
    return jax.tree.map(lambda leaf: reduce(leaf, axes), x) if axes else x


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copy_to(x: jax.Array, axes: Axes) -> jax.Array:
    del axes
    return x


def _copy_to_forward(x: jax.Array, axes: Axes) -> tuple[jax.Array, None]:
    del axes
    return x, None


def _copy_to_backward(axes: Axes, residual: None, g: jax.Array) -> tuple[jax.Array]:
    del residual
    return (jax.lax.psum(g, axes),)


_copy_to.defvjp(_copy_to_forward, _copy_to_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reduce_from(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(x, axes)


def _reduce_from_forward(x: jax.Array, axes: Axes) -> tuple[jax.Array, None]:
    return jax.lax.psum(x, axes), None


def _reduce_from_backward(axes: Axes, residual: None, g: jax.Array) -> tuple[jax.Array]:
    del axes, residual
    return (g,)


_reduce_from.defvjp(_reduce_from_forward, _reduce_from_backward)
