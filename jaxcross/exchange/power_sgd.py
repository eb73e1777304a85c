"""PowerSGD: exchanges each gradient matrix as a product of two thin matrices.

A gradient matrix M of shape [n, m] is approximated as P Q^T, where P and Q have r columns each.
They're computed by a single step of power iteration: first P = M Q with Q from the previous step,
then Q = M^T P once P has been orthogonalised. Both products are linear in M, so they can be
averaged by an all-reduce, unlike the result of a selection such as `top_k`.

Since Q carries over from step to step (a warm start), iterations accumulate over time and the
approximation improves. Whatever it misses stays in the rank's residual and is added to its next
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives
from jaxcross.exchange.arithmetic import product
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.validation import as_number, check_float32, check_state, whole_number

# Orthogonalising a column means projecting out all earlier ones. If that leaves less than this
# fraction of its length, we consider the column a combination of the earlier ones, and the rest
# mere rounding noise.
_EPSILON = 1e-5


class PowerSGDState(NamedTuple):
    """Right factors for the next step and residuals; float32, in the tree of the parameters.

    Each compressed matrix of shape [n, m] has a factor of shape [m, r] and a residual of shape [n,
    m]. All other leaves have a placeholder (`optax.MaskedNode`). The factors are the same on every
    rank, but the residuals are rank-local.
    """

    factor: PyTree
    residual: PyTree

    rank_local = RankLocal(unsent=("residual",))


def power_sgd(
    rank: int, axes: collectives.Axes, *, min_ratio: float = 1.0, seed: int = 0
) -> optax.GradientTransformation:
    """Averages each leaf over ranks as a matrix of rank `rank`, with error feedback.

    Leaves with two or more dimensions are treated as matrices with n rows and m columns, where m is
    the last dimension. Vectors, scalars, and matrices that wouldn't shrink by `min_ratio` are
    averaged uncompressed.

    Updates are the same on every rank, but residuals are rank-local. Deterministic. If the mean of
    the ranks' matrices has rank `rank` or less, it's reproduced exactly as soon as the right
    factors from an earlier step cover its row space.

    Bytes received per rank: `2(P-1)/P 4 rank (n + m)` per matrix on P ranks. There are two
    consecutive all-reduces, one for each of the thin matrices. Together, they carry `rank (n + m)`
    elements instead of the full matrix's n m.

    Matrix products are computed in full float32, even on GPUs that would round their factors to
    TF32 by default. TF32 would introduce an error into the update that isn't part of the residual,
    and which error feedback therefore couldn't make up for later.

    ```python
    tx = optax.chain(jaxcross.exchange.power_sgd(4, "batch"), optax.sgd(0.1, momentum=0.9))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # grads are this rank's own
    ```

    Args:
        rank: Number of columns of the thin matrices, capped at the matrix's smaller side.
        axes: One axis name, or a tuple of names that act as a single axis.
        min_ratio: A matrix is compressed if `rank (n + m) min_ratio < n m`.
        seed: Seed for the initial right factors, and for the columns that replace all-zero ones.

    Raises:
        ValueError: `rank` is not a positive whole number; `min_ratio` is negative or not finite;
            or, at trace time, a compressed leaf is float64, or the state has different shapes than
            `init` makes.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Vogels et al., arXiv 1905.13727, algorithms 1 and 2, with a warm start. Ours differs in
    two details: we orthogonalise columns twice, and set a column to zero if it depends on earlier
    ones.
    """
    rank = whole_number(rank, "rank", "`power_sgd`")
    least = as_number(min_ratio)
    if not 0 <= least < math.inf:
        raise ValueError(
            "`min_ratio` of `power_sgd` is the least factor by which a compressed matrix shrinks, "
            f"and must be a finite number, 0 or more, got `{min_ratio!r}`."
        )
    names = collectives.axis_names(axes)

    def init(params: optax.Params) -> PowerSGDState:
        leaves, treedef = jax.tree.flatten(params)
        factors = []
        residuals = []
        for number, leaf in enumerate(leaves):
            found = _matrix_shape(leaf, rank, least)
            if found is None:
                factors.append(optax.MaskedNode())
                residuals.append(optax.MaskedNode())
                continue
            n, m, r = found
            key = jax.random.fold_in(jax.random.key(seed), number)
            factors.append(jax.random.normal(key, (m, r), jnp.float32))
            residuals.append(jnp.zeros((n, m), jnp.float32))
        return PowerSGDState(
            factor=jax.tree.unflatten(treedef, factors),
            residual=jax.tree.unflatten(treedef, residuals),
        )

    def update(
        updates: optax.Updates, state: PowerSGDState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, PowerSGDState]:
        del params
        check_state(state, init, updates, "`power_sgd`")
        paths, treedef = jax.tree.flatten_with_path(updates)
        factors = treedef.flatten_up_to(state.factor)
        residuals = treedef.flatten_up_to(state.residual)
        out: list[Any] = [None] * len(paths)
        for i, ((path, leaf), q, e) in enumerate(zip(paths, factors, residuals, strict=True)):
            shape = _matrix_shape(leaf, rank, least)
            if shape is None:
                out[i] = jax.lax.pmean(leaf, names)
                continue
            check_float32(path, leaf, "the factors of `power_sgd`")
            matrix = leaf.reshape(shape[:2]).astype(jnp.float32) + e
            out[i], factors[i], residuals[i] = _exchange(matrix, q, leaf, names)
        factor = jax.tree.unflatten(treedef, factors)
        return jax.tree.unflatten(treedef, out), PowerSGDState(
            factor=_directions(factor, seed), residual=jax.tree.unflatten(treedef, residuals)
        )

    return exchange_once("power_sgd", names, optax.GradientTransformation(init, update))  # type: ignore[arg-type]


def _matrix_shape(
    leaf: jax.typing.ArrayLike, rank: int, min_ratio: float
) -> tuple[int, int, int] | None:
    """Returns the rows, columns and rank of a leaf, or None if it isn't compressed."""
    if (
        jnp.ndim(leaf) < 2
        or jnp.size(leaf) == 0
        or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ):
        return None
    m = jnp.shape(leaf)[-1]
    n = math.prod(jnp.shape(leaf)[:-1])
    r = min(rank, n, m)
    return (n, m, r) if r * (n + m) * min_ratio < n * m else None


def _exchange(
    matrix: jax.Array, q: jax.Array, leaf: jax.Array, names: tuple[Hashable, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a leaf's update, the next right factors, and this rank's residual.

    Args:
        matrix: This rank's gradient plus residual, [n, m].
        q: Right factors to start with, [m, r].
        leaf: The gradient, which determines the update's shape and type.
        names: Axes of the exchange.
    """
    p = _orthogonalised(jax.lax.pmean(product(matrix, q), names))
    own = product(matrix.T, p)
    factor = jax.lax.pmean(own, names)
    found = product(p, factor.T)
    sent = collectives.saturate(found, leaf.dtype)
    update = sent.reshape(leaf.shape).astype(leaf.dtype)
    # The residual is this rank's matrix minus the product of the two factors, where we use this
    # rank's own right factor and not the mean over ranks. That way, the mean of all residuals is
    # exactly what the update leaves out.
    residual = matrix - product(p, own.T)
    # If the update's type has a smaller range than float32, large values have been clipped, so add
    # the excess to the residual. bfloat16 has the same range as float32, so nothing gets clipped
    # there.
    if jnp.finfo(leaf.dtype).nexp < jnp.finfo(jnp.float32).nexp:
        residual += found - sent
    return update, factor, residual


def _directions(factors: PyTree, seed: int) -> PyTree:
    """Normalises each column of the right factors to a maximum of 1, ready for the next step.

    The next step only cares about the columns' directions. If we kept their magnitudes, these would
    get multiplied from step to step and could eventually overflow.

    A column that has become zero would stay that way, so we replace it with a random column.
    Falling back to an older column wouldn't be good enough, since that might be orthogonal to all
    future gradients.
    """
    shapes = [new.shape for new in jax.tree.leaves(factors)]
    if not shapes:
        return factors
    largest = jax.tree.map(lambda new: jnp.max(jnp.abs(new), axis=0), factors)
    nothing = jnp.concatenate([x == 0 for x in jax.tree.leaves(largest)]).any()
    # Use a single draw for the random columns of all factors, because each draw gets compiled
    # separately. It's wrapped in a `cond` because it takes milliseconds, and few steps have a zero
    # column.
    shape = [*map(max, zip(*shapes, strict=True))]
    drawn = jax.lax.cond(
        nothing,
        lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32),
        lambda: jnp.zeros(shape, jnp.float32),
    )
    return jax.tree.map(
        lambda new, size: jnp.where(size == 0, drawn[: new.shape[0], : new.shape[1]], new / size),
        factors,
        largest,
    )


def _orthogonalised(p: jax.Array) -> jax.Array:
    """Returns orthonormal columns that span those of `p`. NaN stays NaN.

    Columns that depend on earlier ones become zero.
    """
    # Divide by the largest element first, because squared gradients can under- or overflow.
    largest = jnp.max(jnp.abs(p), axis=0)
    p = jnp.where(largest > 0, p / largest, p)
    columns: list[jax.Array] = []
    for i in range(p.shape[1]):
        column = p[:, i]
        before = jnp.linalg.norm(column)
        for _ in range(2):  # a single pass leaves rounding errors of large projections
            for other in columns:
                column = column - product(other, column) * other
        length = jnp.linalg.norm(column)
        columns.append(jnp.where(length <= _EPSILON * before, 0, column / length))
    return jnp.stack(columns, axis=1)
