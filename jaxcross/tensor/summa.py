"""SUMMA's three products A B, A B^T and A^T B, for matrices that are cut into q x q blocks.

**Problem.** On a grid of q x q ranks, the rank in row i and column j holds block (i, j) of each
matrix. Block (i, j) of C = A B is the sum of A_it B_tj over all t. So the rank needs all blocks in
row i of A and in column j of B, but holds only one of each.

**Algorithm.** The original SUMMA loops over t. In each iteration, the owners of A_it and B_tj
broadcast these blocks along their row and column, and each rank adds their product to its block of
C. Instead, we gather row i of A and column j of B all at once and multiply them in a single
product. Each rank receives the same elements in q times fewer messages, and since a single float32
accumulator is enough, we round only once. The price is memory: during the product, its operands
take up q times as much. To keep this to one product at a time, we don't hold on to the gathered
operands for the backward pass, but gather them again.

**Derivatives.** Let G be the gradient of the loss with respect to C = A B. Then the gradients with
respect to A and B are G B^T and A^T G, which are again products of matrices that are cut into q x q
blocks. In general, the derivatives of each of the three products are given by the other two, so
these three are all we need.

**2.5-D.** A [q, q, d] mesh is a stack of d grids, the layers. Every layer holds all weights, but
works on its own part of the batch. So layers don't communicate with each other in these products,
and the axis `depth` doesn't appear in this module. Only the weights' gradients are summed over
`depth`, which `layers.parameter` takes care of.

Sources: SUMMA, by van de Geijn and Watts (1997); Optimus, by Xu et al. (arXiv 2104.05343,
algorithms 1 to 3); Wang et al. (arXiv 2105.14500) for the 2.5-D mesh.
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

    For an M x K matrix A and a K x N matrix B, a rank receives (q-1)/q (M K / q + K N / q) elements
    in the forward pass, in two all-gathers, and twice as many in the backward pass. Accumulates at
    least in float32, and rounds only once.

    Args:
        a: This rank's block of A, whose rows are its leading dimensions taken together. It must
            have the same type as `b`.
        b: This rank's block of B.
        row: The axis along which the row i of the grid varies.
        col: The axis along which the column j of the grid varies.
    """
    # The rank in row i and column j of the grid needs row i of A and column j of B. The blocks in a
    # row of A differ in j, so they're gathered along `col`; the blocks in a column of B differ in
    # i, so they're gathered along `row`.
    return _dot(_gather(a, col, a.ndim - 1), _gather(b, row, 0), ((a.ndim - 1,), (0,)))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def abt(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """Computes this rank's block of C = A B^T: `[..., N/q]`, `[K/q, N/q]` -> `[..., K/q]`.

    For a K x N matrix B and an M x K matrix C, a rank receives (q-1)/q (K N / q + M K / q) elements
    in an all-gather and a reduce-scatter. Partial products are sent in the type of the operands.
    """
    # Each element of C is a sum over N, but this rank only has N/q columns of A and B, so `part` is
    # just one term of that sum, for all K columns of C. The reduce-scatter adds up the ranks' terms
    # and leaves each rank with its own columns of C.
    part = _dot(a, _gather(b, row, 0), ((a.ndim - 1,), (1,)))
    return _sum_scatter(part, col, part.ndim - 1)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def atb(a: jax.Array, b: jax.Array, row: Axes, col: Axes) -> jax.Array:
    """Computes this rank's block of C = A^T B: `[..., K/q]`, `[..., N/q]` -> `[K/q, N/q]`.

    For an M x K matrix A and an M x N matrix B, a rank receives (q-1)/q (M K / q + K N / q)
    elements in an all-gather and a reduce-scatter.
    """
    # Each element of C is a sum over M, but this rank only has M/q rows of A and B, so `part` is
    # just one term of that sum, for all K rows of C. The reduce-scatter adds up the ranks' terms
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
