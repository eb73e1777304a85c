"""The three products of SUMMA, closed under differentiation: A B, A B^T and A^T B of matrices cut
into q x q blocks.

Rank (i, j) of a grid over the axes (row, col) holds block (i, j) of each matrix. Source: van de
Geijn and Watts, SUMMA (1997); Xu et al., Optimus, arXiv 2104.05343, algorithms 1 to 3; Wang et al.,
arXiv 2105.14500, for the 2.5-D mesh, whose depth layers never talk to each other here.

SUMMA's loop over t broadcasts one block a turn. Here a rank gathers its row of A and its column of
B and contracts over all t at once: the same elements arrive, q times fewer messages, one
accumulator in float32 at least; q times the memory for the operands while the product is made.
Nothing gathered is kept for the backward pass, which gathers again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Axes = tuple[str, ...]  # one axis, or none on a grid of side 1


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def ab(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """C = A B: `[..., K/q]`, `[K/q, N/q]` -> `[..., N/q]`.

    Two all-gathers: a rank receives (q-1)/q (M K / q + K N / q) elements for A of M x K; the
    backward pass receives twice as many. The result is the rank's own block. Accumulates in float32
    at least, and rounds once.

    Args:
        a: Block of A; leading dimensions together are its rows. Of the type of `b`.
        b: Block of B.
        row: The axis along which `i` varies.
        col: The axis along which `j` varies.
    """
    return _dot(_gather(a, col, a.ndim - 1), _gather(b, row, 0), ((a.ndim - 1,), (0,)))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def abt(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """C = A B^T: `[..., N/q]`, `[K/q, N/q]` -> `[..., K/q]`.

    An all-gather and a reduce-scatter: a rank receives (q-1)/q (K N / q + M K / q) elements for C
    of M x K. The partial products travel in the operands' type.
    """
    part = _dot(a, _gather(b, row, 0), ((a.ndim - 1,), (1,)))
    return _sum_scatter(part, col, part.ndim - 1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def atb(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """C = A^T B: `[..., K/q]`, `[..., N/q]` -> `[K/q, N/q]`, a sum over all leading dimensions.

    An all-gather and a reduce-scatter: a rank receives (q-1)/q (M K / q + K N / q) elements for A
    of M x K.
    """
    rows = tuple(range(a.ndim - 1))
    part = _dot(_gather(a, col, a.ndim - 1), b, (rows, rows))
    return _sum_scatter(part, row, 0)


def _differentiable(product: Any, backward: Callable[..., tuple[jax.Array, jax.Array]]) -> None:
    """Gives `product` its derivative: `backward(a, b, g, row, col)`, g being the cotangent of the
    result.
    """
    product.defvjp(
        lambda a, b, row, col: (product(a, b, row, col), (a, b)),
        lambda row, col, saved, g: backward(*saved, g, row, col),
    )


_differentiable(ab, lambda a, b, g, *axes: (abt(g, b, *axes), atb(a, g, *axes)))
_differentiable(abt, lambda a, b, g, *axes: (ab(g, b, *axes), atb(g, a, *axes)))
_differentiable(atb, lambda a, b, g, *axes: (abt(b, g, *axes), ab(a, g, *axes)))


def _dot(
    a: jax.Array, b: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]
) -> jax.Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=wide).astype(
        a.dtype
    )


def _gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    return jax.lax.all_gather(x, *axes, axis=dim, tiled=True) if axes else x


def _sum_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    return jax.lax.psum_scatter(x, *axes, scatter_dimension=dim, tiled=True) if axes else x
