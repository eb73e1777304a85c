"""Decoupled momentum (DeMo): ranks keep separate momenta and exchange the largest frequencies.

Instead of gradients, ranks exchange parts of their momenta. Each rank maintains its own momentum,
runs it through a discrete cosine transform (DCT), and sends only the few largest coefficients.

Whatever a rank has sent is subtracted from its momentum. The rest stays there and may be sent on a
later step, so nothing is lost: the momentum doubles as an error-feedback residual.
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
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives, sparse
from jaxcross.exchange.arithmetic import mean_of, product
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.layouts import Chunks, chunk_length
from jaxcross.exchange.validation import check_float32, check_state, part_kept, whole_number


class DecoupledMomentumState(NamedTuple):
    """State of `decoupled_momentum`.

    Attributes:
        momentum: The part of each compressed leaf's momentum that this rank hasn't sent yet, by
            tile and frequency, float32.
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
    """DeMo: averages the largest frequency components of the ranks' momenta.

    Each rank adds its gradient to `decay` times its momentum. To decide what to send, we view each
    leaf as a matrix, with the last dimension as columns and all others flattened into rows, and cut
    it into tiles of at most `chunk` by `chunk` elements. Each tile goes through an orthonormal
    DCT-II along both sides.

    The k largest coefficients of each tile are sent, averaged over all ranks, and transformed back
    into an update. Each rank then subtracts what it has sent from its momentum, which therefore
    also carries the compression error.

    The state holds the momentum's DCT coefficients rather than its elements. Since the transform is
    linear, the update rule stays the same, but this has two advantages: a coefficient that was sent
    becomes exactly zero, and a step needs just one inverse transform instead of two.

    Updates are the same on every rank. Momenta are rank-local, so save them per rank.
    Deterministic.

    ```python
    exchange = jaxcross.exchange.decoupled_momentum(0.01, "batch", sign=True)
    tx = optax.chain(exchange, optax.sgd(1e-3))
    updates, opt_state = tx.update(grads, opt_state, params)  # grads are this rank's own
    ```

    Bytes received per rank: `(P-1) k (v + b/8)` per tile, where P is the number of ranks, k the
    number of coefficients sent, v the bytes per value, and b the bits per index (12 for a 64-by-64
    tile). All values share one all-gather, and all indices share another. A skipped leaf of n bytes
    costs `2(P-1)/P n`.

    Args:
        density: Fraction of each tile's coefficients to send, rounded, but at least one
            coefficient. The authors send 32 out of 4,096.
        axes: One axis name, or a tuple of names that act as a single axis.
        decay: Factor by which the momentum decays on each step, in [0, 1]. It has no effect with
            `density=1`, because nothing is left in the momentum in that case.
        chunk: Maximum side length of a tile. Each side of the matrix is cut into equal parts, which
            takes less than one element of padding per part.
        sign: Return the signs of the updates, as in the paper. You'll want a small learning rate
            with this.
        skip: (path, leaf) -> whether a leaf is averaged uncompressed and without momentum. Defaults
            to scalars, vectors, and leaves of any shape that are named `bias` or `scale`.
        wire_dtype: Element type of the coefficients on the wire, e.g. `jnp.bfloat16`. The rounding
            error stays in the momentum.

    Raises:
        ValueError: An argument is out of range; or, at trace time, the state doesn't have the
            shapes that `init` creates, or a compressed leaf has 2^31 elements or more, or is
            float64.

    `init` warns if nothing would be compressed, unless you pass your own `skip`.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: after Peng et al., DeMo: Decoupled momentum optimization, arXiv 2411.19870, and the
    authors' code. The latter differs from ours in three ways: its momentum includes the learning
    rate, it compresses vectors as well, and it averages each coefficient only over the ranks that
    have sent it, whereas we divide by the total number of ranks.
    """
    density = sparse.check_density(density)
    kept = part_kept(decay, "`decoupled_momentum`", "momentum")
    chunk = whole_number(chunk, "chunk", "`decoupled_momentum`")
    sparse.check_wire_dtype(wire_dtype)
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
        chosen = sparse.compressed_leaves(found, skip)
        momenta = treedef.flatten_up_to(state.momentum)
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
    """Converts a leaf to the frequencies of its tiles, and back.

    Attributes:
        shape: Rows and columns of the matrix.
        tile: Rows and columns of a tile.
        chunks: The tiles, each flattened to a vector, and how much of each is sent.
    """

    shape: tuple[int, int]
    tile: tuple[int, int]
    chunks: Chunks

    def zeros(self) -> jax.Array:
        return jnp.zeros((self.chunks.rows, self.chunks.width), jnp.float32)

    def frequencies(self, leaf: jax.Array) -> jax.Array:
        """Returns the coefficients of all tiles, `[tiles, elements per tile]`, float32."""
        rows, columns = self.shape
        high, wide = self.tile
        padding = [(0, -rows % high), (0, -columns % wide)]
        matrix = jnp.pad(leaf.reshape(self.shape).astype(jnp.float32), padding)
        tiles = matrix.reshape(matrix.shape[0] // high, high, -1, wide).swapaxes(1, 2)
        return product(product(dct_matrix(high), tiles), dct_matrix(wide).T).reshape(
            self.chunks.rows, -1
        )

    def leaf(self, coefficients: jax.Array, like: jax.Array) -> jax.Array:
        rows, columns = self.shape
        high, wide = self.tile
        tiles = coefficients.reshape(-(-rows // high), -1, high, wide)
        tiles = product(product(dct_matrix(high).T, tiles), dct_matrix(wide))
        matrix = tiles.swapaxes(1, 2).reshape(tiles.shape[0] * high, -1)[:rows, :columns]
        return collectives.saturate(matrix, like.dtype).reshape(like.shape).astype(like.dtype)


def _tiles(leaf: jax.typing.ArrayLike, chunk: int, density: float) -> _Tiles:
    sparse.check_size(jnp.size(leaf), "`decoupled_momentum`")
    shape = (math.prod(jnp.shape(leaf)[:-1]), jnp.shape(leaf)[-1]) if jnp.ndim(leaf) else (1, 1)
    high, wide = (chunk_length(side, chunk) for side in shape)
    number = -(-shape[0] // high) * -(-shape[1] // wide)
    return _Tiles(
        shape=shape, tile=(high, wide), chunks=sparse.chunked(number, high * wide, density)
    )


def dct_matrix(size: int) -> np.ndarray:
    """Returns the orthonormal DCT-II matrix, `[frequency, element]`, float32."""
    frequency = np.arange(size)[:, None]
    element = np.arange(size)[None]
    matrix = np.cos(np.pi * (2 * element + 1) * frequency / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    matrix[np.abs(matrix) < 1e-12] = 0  # rounding noise, which `sign` would turn into 1 or -1
    return matrix.astype(np.float32)


def _exchange(
    momenta: list[jax.Array],
    layouts: list[Chunks],
    names: tuple[Hashable, ...],
    wire_dtype: DTypeLike | None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the mean of what the ranks have sent, and what's left of this rank's momenta."""
    pairs = [sparse.largest_of_chunks(x, lay) for x, lay in zip(momenta, layouts, strict=True)]
    sent = [
        (v if wire_dtype is None else sparse.rounded(v, wire_dtype), columns)
        for v, columns in pairs
    ]
    rests = [sparse.residual_of_chunks(x, *pair) for x, pair in zip(momenta, sent, strict=True)]
    return sparse.mean_of_chunks(sent, layouts, names), rests


def _sign(x: jax.Array) -> jax.Array:
    # Keep NaN and infinity: the sign of infinity is 1, which would hide an overflow.
    return jnp.where(jnp.isfinite(x), jnp.sign(x), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
