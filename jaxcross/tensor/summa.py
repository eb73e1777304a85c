"""SUMMA's three products A B, A B^T and A^T B, for matrices that are cut into q x q blocks.

**Problem.** On a grid of q x q ranks, the rank in row i and column j holds block (i, j) of each
matrix. Block (i, j) of C = A B is the sum of A_it B_tj over all t. So a rank needs all blocks in
row i of A and in column j of B, but holds only one of each.

**Algorithm.** The original SUMMA is a loop over t. In each iteration, the owners of A_it and B_tj
broadcast these blocks along their row and column, and each rank adds the blocks' product to its
part of C. We gather row i of A and column j of B at once instead, and multiply them in a single
product. A rank receives the same elements in q times fewer messages, and a single float32
accumulator is enough, so we round only once. The price is memory: while the product is computed,
its operands take q times as much. So that this concerns only one product at a time, we don't keep
the gathered operands for the backward pass, but gather them again.

**Derivatives.** Let G be the gradient of the loss with respect to C = A B. Then the gradients with
respect to A and B are G B^T and A^T G. These are again products of matrices that are cut into q x q
blocks. In the same way, the derivative of each of the three products consists of the other two, so
we need no further products.

**2.5-D.** A mesh [q, q, d] is a stack of d grids, the layers. Every layer holds all weights, but
works on its own part of the batch. So the layers don't communicate with each other in these
products, and the axis `depth` doesn't occur in this module. Only the gradients of the weights are
summed over `depth`, which is done in `layers.parameter`.

Sources: van de Geijn and Watts, SUMMA (1997); Xu et al., Optimus, arXiv 2104.05343, algorithms 1 to
3; Wang et al., arXiv 2105.14500, for the 2.5-D mesh.
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
    """Computes this rank's block of C = A B: `[..., K/q]`, `[K/q, N/q]` -> `[..., N/q]`.

    If A is an M x K matrix and B a K x N matrix, a rank receives (q-1)/q (M K / q + K N / q)
    elements in the forward pass, which makes two all-gathers. In the backward pass, it receives
    twice as many. Accumulates at least in float32, and rounds once.

    Args:
        a: This rank's block of A. Its leading dimensions together are the rows. It must have the
            same type as `b`.
        b: This rank's block of B.
        row: The axis along which the number i of the grid's row varies.
        col: The axis along which the number j of the grid's column varies.
    """
    # The rank in row i and column j of the grid needs row i of A and column j of B. The blocks in a
    # row of A differ in j, so they're gathered along `col`. The blocks in a column of B differ in
    # i, so they're gathered along `row`.
    return _dot(_gather(a, col, a.ndim - 1), _gather(b, row, 0), ((a.ndim - 1,), (0,)))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def abt(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """Computes this rank's block of C = A B^T: `[..., N/q]`, `[K/q, N/q]` -> `[..., K/q]`.

    If B is a K x N matrix and C an M x K matrix, a rank receives (q-1)/q (K N / q + M K / q)
    elements in an all-gather and a reduce-scatter. The partial products are sent in the operands'
    type.
    """
    # Each element of C is a sum over N, but this rank only has N/q columns of A and of B. So `part`
    # is just one term of that sum, for all K columns of C. The reduce-scatter adds up the ranks'
    # terms, and leaves each rank with its own columns of C.
    part = _dot(a, _gather(b, row, 0), ((a.ndim - 1,), (1,)))
    return _sum_scatter(part, col, part.ndim - 1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def atb(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """Computes this rank's block of C = A^T B: `[..., K/q]`, `[..., N/q]` -> `[K/q, N/q]`.

    If A is an M x K matrix and B an M x N matrix, a rank receives (q-1)/q (M K / q + K N / q)
    elements in an all-gather and a reduce-scatter.
    """
    # Each element of C is a sum over M, but this rank only has M/q rows of A and of B. So `part` is
    # just one term of that sum, for all K rows of C. The reduce-scatter adds up the ranks' terms,
    # and leaves each rank with its own rows of C.
    rows = tuple(range(a.ndim - 1))
    part = _dot(_gather(a, col, a.ndim - 1), b, (rows, rows))
    return _sum_scatter(part, row, 0)


def _differentiable(product: Any, backward: Callable[..., tuple[jax.Array, jax.Array]]) -> None:
    """Sets a product's derivative to `backward(a, b, g, row, col)`, where g is the cotangent."""
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
