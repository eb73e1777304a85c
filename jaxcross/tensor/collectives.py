"""The two halves of tensor parallelism, with derivatives of their own.

JAX transposes `psum` to `psum` where axes are bound by `vmap`, by `crossover`, or by
`shard_map(check_vma=False)`. There both directions are written out. Under `check_vma=True` JAX's
own transposes are these. So a gradient is the same everywhere: a rank's gradient is that of the one
global loss, of which every rank holds a copy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import jax

from jaxcross._jax_compat.shard_map import checks_varying, vary_over

Axes = tuple[str, ...]
Arrays = TypeVar("Arrays")


def copy_to(x: Arrays, axes: Axes) -> Arrays:
    """Returns `x`, equal on all ranks of `axes`, for ranks that go on differently; sums the
    gradient over them.

    Sends nothing forward and makes one all-reduce backward. Megatron-LM's operator f (arXiv
    1909.08053, section 3).

    Args:
        x: A tree of arrays.
        axes: Axis names; none for no communication at all.
    """
    copy: Any = vary_over if checks_varying() else _copy_to
    return jax.tree.map(lambda leaf: copy(leaf, axes), x) if axes else x


def reduce_from(x: Arrays, axes: Axes) -> Arrays:
    """Returns the sum of `x` over the ranks of `axes`, which all go on alike; each takes the whole
    gradient.

    Makes one all-reduce forward, sends nothing backward; the same on every rank of `axes`.
    Megatron-LM's operator g.

    Args:
        x: A tree of arrays.
        axes: Axis names; none for no communication at all.
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
