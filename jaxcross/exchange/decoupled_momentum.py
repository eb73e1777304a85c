"""Decoupled momentum (DeMo): ranks keep their momenta apart and send the largest frequencies of
them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jaxcross._pytree import PyTree
from jaxcross.exchange import chunks, collectives, sparse
from jaxcross.exchange.chunks import Chunks
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.validation import (
    check_float32,
    check_state,
    mean_of,
    part_kept,
    whole_number,
)


class DecoupledMomentumState(NamedTuple):
    """Attributes: `momentum`, of each compressed leaf what this rank has not sent, by tile and
    frequency, float32.
    """

    momentum: PyTree

    rank_local = RankLocal(unsent=("momentum",))


def decoupled_momentum(
    density: float,
    axes: collectives.Axes,
    *,
    decay: float = 0.999,
    chunk: int = 64,
    sign: bool = False,
    skip: sparse.Skip = sparse.bias_or_norm,
    wire_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """DeMo: averages over ranks the `density` largest frequencies of each rank's momentum, and
    takes them out of it.

    A rank adds its gradient to `decay` times its momentum. Leaves are cut into tiles of at most
    `chunk` by `chunk` elements of the matrix `[all other dimensions, last dimension]`, and each
    tile goes through an orthonormal DCT-II along both sides. Of each tile the k largest
    coefficients are sent, averaged over all ranks and transformed back. What a rank has sent leaves
    its momentum, which so keeps the error as well. The momentum is stored by frequency: the
    transform is linear, so that the rule is the same, what was sent is exactly zero, and a step
    needs one inverse transform instead of two.

    Updates are the same on every rank; momenta are the rank's own, and must be saved for each rank.
    Deterministic.

    ```python
    exchange = jaxcross.exchange.decoupled_momentum(0.01, "batch", sign=True)
    tx = optax.chain(exchange, optax.sgd(1e-3))
    updates, opt_state = tx.update(grads, opt_state, params)  # grads are this rank's own
    ```

    A rank of P receives `(P-1) k (v + b/8)` bytes a tile, v bytes a value and b bits an index (12
    in a tile of 64 by 64), by one all-gather of all values and one of all indices; and `2(P-1)/P n`
    for skipped leaves of n bytes.

    Args:
        density: Share of a tile's coefficients that is sent, rounded, one at least. The authors
            send 32 of 4,096.
        axes: One axis name, or a tuple of several that count as one.
        decay: Factor of the momentum in each step, in [0, 1]. With `density=1` it has no effect:
            nothing is left.
        chunk: Longest side of a tile. A side is cut into equal parts, so that padding is less than
            one element a part.
        sign: Return the signs of the updates, as in the paper: take a small learning rate.
        skip: (path, leaf) -> whether a leaf is averaged as it is, without a momentum. By default
            scalars, vectors, and leaves of any shape whose name is `bias` or `scale`.
        wire_dtype: Element type of the coefficients on the wire, for example `jnp.bfloat16`. The
            rest of the rounding stays in the momentum.

    Raises:
        ValueError: An argument is out of range; (when traced) the state has other shapes than
            `init` makes, or a leaf that is compressed has 2^31 elements or more, or is float64.

    `init` warns where it compresses nothing, unless `skip` is your own.

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: after Peng et al., DeMo: Decoupled momentum optimization, arXiv 2411.19870, and the
    authors' code. There the learning rate is part of the momentum, vectors are compressed as well,
    and a coefficient is averaged over those ranks that have sent it.
    """
    density = sparse.check_density(density)
    kept = part_kept(decay, "`decoupled_momentum`", "momentum")
    chunk = whole_number(chunk, "chunk", "`decoupled_momentum`")
    if wire_dtype is not None and not jnp.issubdtype(wire_dtype, jnp.floating):
        raise ValueError(
            f"`wire_dtype` is {jnp.dtype(wire_dtype).name}: values need a floating-point type."
        )
    names = collectives.axis_names(axes)

    def init(params: optax.Params) -> DecoupledMomentumState:
        sparse.warn_if_none(params, skip, "`decoupled_momentum`")
        found, treedef = jax.tree.flatten_with_path(params)
        momenta = [
            _tiles(leaf, chunk, density).zeros() if chosen else optax.MaskedNode()
            for (_, leaf), chosen in zip(found, sparse.compressed_leaves(found, skip), strict=True)
        ]
        return DecoupledMomentumState(jax.tree.unflatten(treedef, momenta))

    def update(
        updates: optax.Updates, state: DecoupledMomentumState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, DecoupledMomentumState]:
        del params
        check_state(state, init, updates, "`decoupled_momentum`")
        found, treedef = jax.tree.flatten_with_path(updates)
        chosen, out, momenta = (
            sparse.compressed_leaves(found, skip),
            [],
            treedef.flatten_up_to(state.momentum),
        )
        for (path, leaf), compressed in zip(found, chosen, strict=True):
            if compressed:
                check_float32(path, leaf, "the momenta of `decoupled_momentum`")
        where = [i for i, compressed in enumerate(chosen) if compressed]
        big = [found[i][1] for i in where]
        averaged = iter(())
        if big:
            layouts = [_tiles(leaf, chunk, density) for leaf in big]
            grown = [
                kept * momenta[i] + lay.frequencies(x)
                for i, x, lay in zip(where, big, layouts, strict=True)
            ]
            means, rests = _exchange(grown, [lay.chunks for lay in layouts], names, wire_dtype)
            averaged = iter(
                [lay.leaf(mean, x) for mean, x, lay in zip(means, big, layouts, strict=True)]
            )
            for i, rest in zip(where, rests, strict=True):
                momenta[i] = rest
        out = [
            next(averaged) if c else mean_of(x, names)
            for (_, x), c in zip(found, chosen, strict=True)
        ]
        if sign:
            out = [_sign(x) for x in out]
        rest = DecoupledMomentumState(jax.tree.unflatten(treedef, momenta))
        return jax.tree.unflatten(treedef, out), rest

    return exchange_once("decoupled_momentum", names, optax.GradientTransformation(init, update))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """A leaf as tiles of a matrix, and their frequencies.

    Attributes:
        shape: Rows and columns of the matrix.
        tile: Rows and columns of a tile.
        chunks: The tiles, each as a vector, and what they send.
    """

    shape: tuple[int, int]
    tile: tuple[int, int]
    chunks: Chunks

    def zeros(self) -> jax.Array:
        return jnp.zeros((self.chunks.rows, self.chunks.width), jnp.float32)

    def frequencies(self, leaf: jax.Array) -> jax.Array:
        """Returns the coefficients of each tile, `[tiles, elements of a tile]`, float32."""
        (rows, columns), (high, wide) = self.shape, self.tile
        padding = [(0, -rows % high), (0, -columns % wide)]
        matrix = jnp.pad(leaf.reshape(self.shape).astype(jnp.float32), padding)
        tiles = matrix.reshape(matrix.shape[0] // high, high, -1, wide).swapaxes(1, 2)
        return _product(_product(dct_matrix(high), tiles), dct_matrix(wide).T).reshape(
            self.chunks.rows, -1
        )

    def leaf(self, coefficients: jax.Array, like: jax.Array) -> jax.Array:
        """Returns the leaf of these coefficients, in the shape and type of `like`."""
        (rows, columns), (high, wide) = self.shape, self.tile
        tiles = coefficients.reshape(-(-rows // high), -1, high, wide)
        tiles = _product(_product(dct_matrix(high).T, tiles), dct_matrix(wide))
        matrix = tiles.swapaxes(1, 2).reshape(tiles.shape[0] * high, -1)[:rows, :columns]
        return collectives.saturate(matrix, like.dtype).reshape(like.shape).astype(like.dtype)


def _tiles(leaf: jax.typing.ArrayLike, chunk: int, density: float) -> _Tiles:
    chunks.check_size(jnp.size(leaf), "`decoupled_momentum`")
    shape = (math.prod(jnp.shape(leaf)[:-1]), jnp.shape(leaf)[-1]) if jnp.ndim(leaf) else (1, 1)
    high, wide = (chunks.length(side, chunk) for side in shape)
    number = -(-shape[0] // high) * -(-shape[1] // wide)
    return _Tiles(
        shape=shape, tile=(high, wide), chunks=chunks.chunked(number, high * wide, density)
    )


def dct_matrix(size: int) -> np.ndarray:
    """Returns the orthonormal matrix of the DCT-II, `[frequency, element]`, float32."""
    frequency, element = np.arange(size)[:, None], np.arange(size)[None]
    matrix = np.cos(np.pi * (2 * element + 1) * frequency / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    matrix[np.abs(matrix) < 1e-12] = 0  # rounding of a zero, whose sign `sign` would return
    return matrix.astype(np.float32)


def _exchange(
    momenta: list[jax.Array],
    layouts: list[Chunks],
    names: tuple[Hashable, ...],
    wire_dtype: DTypeLike | None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the mean over ranks of what each rank sends, and what is left of this rank's
    momenta.
    """
    pairs = [chunks.largest(x, lay) for x, lay in zip(momenta, layouts, strict=True)]
    sent = [
        (v if wire_dtype is None else sparse.rounded(v, wire_dtype), columns)
        for v, columns in pairs
    ]
    rests = [chunks.without(x, *pair) for x, pair in zip(momenta, sent, strict=True)]
    return chunks.mean_over_ranks(sent, layouts, names), rests


def _sign(x: jax.Array) -> jax.Array:
    # The sign of infinity is 1: it would hide an overflow.
    return jnp.where(jnp.isfinite(x), jnp.sign(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _product(a: jax.typing.ArrayLike, b: jax.typing.ArrayLike) -> jax.Array:
    # By default GPUs round the factors to ten bits, and the transform would not be orthonormal.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
