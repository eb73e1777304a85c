"""PowerSGD: exchanges each gradient matrix as a product of two thin matrices.

A gradient matrix M of shape [n, m] is approximated as P Q^T, where P and Q have r columns each. One
step of power iteration computes the two: first P = M Q with the Q of the previous step, then, after
orthogonalising P, Q = M^T P. Both products are linear in M, so an all-reduce can average them. With
a selection such as `top_k`, that isn't possible.

Since Q is kept from step to step (a warm start), the iterations add up over steps, and the
approximation gets better. What it leaves out stays in the rank's residual and is added to the
rank's next gradient.
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

# When we orthogonalise a column, we project out all earlier columns. If less than this fraction of
# its length is left, we conclude that the column is a combination of the earlier ones, and that
# what is left is rounding noise.
_EPSILON = 1e-5


class PowerSGDState(NamedTuple):
    """Right factors for the next step, and residuals; float32, in the tree of the parameters.

    For each matrix of shape [n, m] that is compressed, there's a factor of shape [m, r] and a
    residual of shape [n, m]. Leaves that aren't compressed have a placeholder instead
    (`optax.MaskedNode`). The factors are the same on every rank, but the residuals are rank-local.
    """

    factor: PyTree
    residual: PyTree

    rank_local = RankLocal(unsent=("residual",))


def power_sgd(
    rank: int, axes: collectives.Axes, *, min_ratio: float = 1.0, seed: int = 0
) -> optax.GradientTransformation:
    """Averages each leaf over ranks as a matrix of rank `rank`, with error feedback.

    A leaf with two or more dimensions is treated as a matrix of n rows and m columns, where m is
    its last dimension. Vectors, scalars, and matrices that wouldn't shrink by `min_ratio` are
    averaged uncompressed.

    Updates are the same on every rank, but residuals are rank-local. Deterministic. If the mean of
    the ranks' matrices has rank `rank` or less, it's reproduced without any error, as soon as the
    right factors from an earlier step cover its row space.

    Bytes received per rank: `2(P-1)/P 4 rank (n + m)` per matrix on P ranks. There are two
    all-reduces, one after the other, one for each of the two thin matrices. Together, they carry
    `rank (n + m)` elements instead of the n m elements of the whole matrix.

    Matrix products are computed in full float32, even if a GPU would by default round their factors
    to TF32. Rounding to TF32 would add an error to the update that the residual doesn't contain, so
    error feedback couldn't correct it later.

    ```python
    tx = optax.chain(jaxcross.exchange.power_sgd(4, "batch"), optax.sgd(0.1, momentum=0.9))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # grads are this rank's own
    ```

    Args:
        rank: Columns of the thin matrices, capped at the matrix's smaller side.
        axes: One axis name, or a tuple of names that act as a single axis.
        min_ratio: A matrix is compressed if `rank (n + m) min_ratio < n m`.
        seed: Seed of the first right factors, and of the columns that replace zero ones.

    Raises:
        ValueError: `rank` is not a positive whole number; `min_ratio` is negative or not finite;
            or, at trace time, a compressed leaf is float64, or the state has different shapes than
            `init` makes.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Vogels et al., arXiv 1905.13727, algorithms 1 and 2, with a warm start. We differ from
    these in two details: columns are orthogonalised twice, and a column that depends on earlier
    ones becomes zero.
    """
    rank = whole_number(rank, "rank", "`power_sgd`")
    least = as_number(min_ratio)
    if not 0 <= least < math.inf:
        raise ValueError(
            f"`min_ratio` of `power_sgd` is `{min_ratio!r}`: it is the least factor by which a "
            "compressed matrix shrinks, and must be a finite number that is not negative."
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
    """Returns rows, columns and rank of a leaf that is compressed, None for other leaves."""
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
        matrix: Gradient plus residual of this rank, [n, m].
        q: Right factors to start with, [m, r].
        leaf: Gradient; the update gets its shape and type.
        names: Axes of the exchange.
    """
    p = _orthogonalised(jax.lax.pmean(product(matrix, q), names))
    own = product(matrix.T, p)
    factor = jax.lax.pmean(own, names)
    found = product(p, factor.T)
    sent = collectives.saturate(found, leaf.dtype)
    update = sent.reshape(leaf.shape).astype(leaf.dtype)
    # The residual is this rank's matrix minus the product of the two factors. We use this rank's
    # own right factor rather than the mean over ranks. Averaged over ranks, the residuals are then
    # exactly what the update leaves out.
    residual = matrix - product(p, own.T)
    # If the update's type has a smaller range than float32, large values have been clipped. We add
    # what was cut off to the residual. bfloat16 has float32's range, so nothing is clipped there.
    if jnp.finfo(leaf.dtype).nexp < jnp.finfo(jnp.float32).nexp:
        residual += found - sent
    return update, factor, residual


def _directions(factors: PyTree, seed: int) -> PyTree:
    """Scales right factors to a largest element of 1 per column, for the next step.

    The next step only needs the directions of the columns. If we kept their magnitudes, these would
    multiply from step to step and could overflow.

    A column that has become zero would stay zero, so we replace it by a random one. It wouldn't be
    enough to fall back to an older column, since that may be orthogonal to all later gradients.
    """
    shapes = [new.shape for new in jax.tree.leaves(factors)]
    if not shapes:
        return factors
    largest = jax.tree.map(lambda new: jnp.max(jnp.abs(new), axis=0), factors)
    nothing = jnp.concatenate([x == 0 for x in jax.tree.leaves(largest)]).any()
    # The random columns of all factors come from a single draw, because each draw would be compiled
    # separately. The draw takes milliseconds, and few steps have a zero column, so it's in a
    # `cond`.
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

    A column that depends on earlier ones becomes zero.
    """
    # Divide by the largest element first, because the squares of gradients under- and overflow.
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
