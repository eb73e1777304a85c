"""SUMMA's three products A B, A B^T and A^T B, for matrices that are cut into q x q blocks.

Rank (i, j) of a grid over the axes (row, col) holds block (i, j) of each matrix. The three products
are closed under differentiation: the derivative of each consists of the other two.

Sources: van de Geijn and Watts, SUMMA (1997); Xu et al., Optimus, arXiv 2104.05343, algorithms 1 to
3; Wang et al., arXiv 2105.14500, for the 2.5-D mesh, whose depth layers don't communicate with each
other in these products.

The original algorithm is a loop over t that broadcasts one block per iteration. Here, a rank
gathers its row of A and its column of B, and contracts over all t at once. It receives the same
elements in q times fewer messages, and accumulates at least in float32. The price is q times the
memory for the operands while the product is being computed. We don't keep the gathered operands for
the backward pass, but gather them again.
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
    """Computes C = A B: `[..., K/q]`, `[K/q, N/q]` -> `[..., N/q]`.

    Makes two all-gathers: for A of M x K, a rank receives (q-1)/q (M K / q + K N / q) elements. The
    backward pass receives twice as many. The result is the rank's own block. Accumulates at least
    in float32, and rounds once.

    Args:
        a: Block of A. Its leading dimensions together are the rows. Same type as `b`.
        b: Block of B.
        row: The axis along which `i` varies.
        col: The axis along which `j` varies.
    """
    return _dot(_gather(a, col, a.ndim - 1), _gather(b, row, 0), ((a.ndim - 1,), (0,)))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def abt(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """Computes C = A B^T: `[..., N/q]`, `[K/q, N/q]` -> `[..., K/q]`.

    Makes an all-gather and a reduce-scatter: for C of M x K, a rank receives (q-1)/q (K N / q + M K
    / q) elements. The partial products are sent in the operands' type.
    """
    part = _dot(a, _gather(b, row, 0), ((a.ndim - 1,), (1,)))
    return _sum_scatter(part, col, part.ndim - 1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def atb(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """Computes C = A^T B: `[..., K/q]`, `[..., N/q]` -> `[K/q, N/q]`, summed over `...`.

    Makes an all-gather and a reduce-scatter: for A of M x K, a rank receives (q-1)/q (M K / q + K N
    / q) elements.
    """
    rows = tuple(range(a.ndim - 1))
    part = _dot(_gather(a, col, a.ndim - 1), b, (rows, rows))
    return _sum_scatter(part, row, 0)


def _differentiable(product: Any, backward: Callable[..., tuple[jax.Array, jax.Array]]) -> None:
    """Sets `product`'s derivative to `backward(a, b, g, row, col)`; g is the cotangent."""
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
