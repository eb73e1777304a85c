"""SparseLoCo: DiLoCo that only sends each chunk's largest elements, at two bits per value.

DiLoCo's exchanges are few and far between, but each of them still sends the whole model. SparseLoCo
shrinks these messages too: by default, a rank only sends one element in 64, at 14 bits each. In our
digits task on four ranks, with an exchange every 16 steps, a rank receives 0.14% of the bytes that
a mean on every step would take, and ends up one point of accuracy behind it
(benchmarks/results/exchanges.md).

**Error feedback.** Ranks don't discard what they don't send. At the end of a round of local steps,
a rank adds the change of its parameters (the delta) to a residual, and sends the residual's largest
elements. The residual decays from round to round, much like a momentum. That's why it can take the
place of DiLoCo's outer momentum, and the outer optimizer can be plain SGD.

**Chunks.** We select the largest elements within chunks of at most 4,096 elements instead of whole
leaves. That way, an index takes 12 bits instead of 32, and no part of a layer is starved because
its elements are smaller than those elsewhere.

**Two bits per value.** A value is reduced to its sign and another bit that says whether its
magnitude is large or small. Along with that, a rank sends two float32 numbers per leaf: the
magnitudes that large and small stand for.

Each rank also decodes its own message, and subtracts the decoded values from its residual instead
of the exact ones. That way, the rounding error stays in the residual as well.

A value's code is stored in the bits above its index, so both travel as a single integer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._arguments import is_whole
from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives, sparse
from jaxcross.exchange.arithmetic import mean_of
from jaxcross.exchange.layouts import Chunks, chunk_length, leaf_blocks
from jaxcross.exchange.local_rounds import (
    Round,
    copied,
    local_rounds,
    model_of,
    outer_step,
    pseudo_gradient,
    to_merged,
)
from jaxcross.exchange.validation import (
    check_float32,
    check_state,
    optimizer_in,
    part_kept,
    whole_number,
)

_CODE_BITS = 2
_LONGEST_CHUNK = 1 << (31 - _CODE_BITS)  # an index and its code must fit one int32


class SparseLoCoState(NamedTuple):
    """State of SparseLoCo.

    Attributes:
        since: Local steps since the last exchange, int32.
        anchor: The parameters at the start of this round, bitwise identical on every rank. This is
            the model to evaluate.
        residual: The part of this rank's deltas that it hasn't sent yet, float32, by chunk.
        outer: State of the outer optimizer, bitwise identical on every rank.
        inner: State of this rank's own optimizer.
    """

    since: jax.Array
    anchor: optax.Params
    residual: PyTree
    outer: optax.OptState
    inner: optax.OptState

    rank_local = RankLocal(
        unsent=("residual",), model=("inner",), maybe_empty=("residual", "outer", "inner")
    )

    def model(self, params: optax.Params) -> optax.Params:
        """Returns the model to evaluate: the anchor."""
        return model_of(self.anchor, params)


def sparse_loco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    axes: collectives.Axes,
    *,
    every: int,
    density: float = 1 / 64,
    decay: float = 0.95,
    chunk: int = 4096,
    bits: int = 2,
    skip: sparse.Skip = sparse.bias_or_norm,
) -> optax.GradientTransformationExtraArgs:
    """Takes `every` local steps per rank, then one `outer` step on the mean of sparse deltas.

    As in `diloco`, each rank trains by itself for `every` steps before the ranks exchange how far
    their parameters have moved from their common starting point, the anchor. But instead of sending
    this delta as a whole, a rank adds it to a residual, `residual <- decay * residual + (anchor -
    mine)`. From each chunk of the residual, the largest elements (a fraction `density`) are sent
    and removed.

    Each element is sent as its index within the chunk plus two bits. One of them is the sign; the
    other says whether its magnitude is above the mean magnitude of all elements this rank sends for
    that leaf.

    Receivers never see the exact magnitudes. Instead, they use two means per leaf and rank, one for
    the large elements and one for the small ones. The rounding error stays in the sender's
    residual.

    Since the residual plays the role of DiLoCo's outer momentum, `outer` can be plain
    `optax.sgd(1.0)`.

    During a round, each rank has different parameters. At the end of the round, they become equal
    up to rounding. The inner optimizer's state and the residual never get averaged. Checkpoints
    must store both of them, as well as the parameters, separately for each rank.

    The model to evaluate is the anchor (`state.anchor`), which is what `jaxcross.exchange.finish`
    returns. All ranks must start from the same parameters. Deterministic.

    ```python
    tx = jaxcross.exchange.sparse_loco(optax.adamw(4e-4), optax.sgd(1.0), "batch", every=30)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Bytes received per rank: on a step that exchanges, `(P-1) (k (b + 2)/8 + 8)` for a leaf from
    which each rank sends k elements, where b is the number of bits per index (12 for a chunk of
    4,096). One all-gather carries indices and codes, another the two magnitudes per leaf. If values
    are sent as float32 instead of two bits, a leaf costs `(P-1) k (b/8 + 4)`. Skipped leaves of n
    bytes cost `2(P-1)/P n`. All other steps are free.

    Args:
        inner: Steps on this rank's gradients.
        outer: Steps on the mean of what was sent, once per round. Any schedule in it counts rounds.
        axes: One axis name, or a tuple of names that act as a single axis.
        every: Steps per round; the first exchange is on step `every`.
        density: Fraction of a chunk's elements to send, rounded, but at least one.
        decay: Factor applied to the residual in each round, in [0, 1].
        chunk: Maximum number of elements per chunk. Leaves are cut into equal chunks, at the cost
            of less than one element of padding per chunk.
        bits: Bits per value on the wire: 2, or 32 for float32.
        skip: (path, leaf) -> whether to average a leaf's delta uncompressed. By default, this
            applies to scalars, vectors, and leaves of any shape called `bias` or `scale`.

    Raises:
        ValueError: An argument is out of range, or `inner` or `outer` is not an optimizer; `update`
            got no `params`; or, at trace time, the state has different shapes than `init` makes, or
            a compressed leaf has 2^31 elements or more, or is float64.

    Warns in `init` if there's nothing to compress, unless you pass your own `skip`.

    Memory on top of the inner optimizer's: the anchor, the residual and the outer state.

    Communicates only in `update`, on every `every`-th step, over its axes. All ranks must call it
    on the same step.

    Source: based on Sarfi et al., arXiv 2508.15706, and the authors' code for an earlier version,
    CCLoco. That code averages an element only over the ranks that have sent it, whereas we always
    divide by the number of all ranks. We also choose the two magnitudes differently.
    """
    every = whole_number(every, "every", "`sparse_loco`")
    if not is_whole(bits) or bits not in (_CODE_BITS, 32):
        raise ValueError(
            "`bits` of `sparse_loco` is the number of bits that are sent per value, and must be 2 "
            f"or 32, got `{bits!r}`."
        )
    deltas = _SparseExchange(
        names=collectives.axis_names(axes),
        density=sparse.check_density(density),
        decay=part_kept(decay, "`sparse_loco`", "residual"),
        chunk=min(whole_number(chunk, "chunk", "`sparse_loco`"), _LONGEST_CHUNK),
        bits=bits,
        skip=skip,
    )
    inner_optimizer = optimizer_in(inner, "`sparse_loco`")
    outer_optimizer = optimizer_in(outer, "`sparse_loco`")

    def init(params: optax.Params) -> SparseLoCoState:
        sparse.warn_if_none(params, skip, "`sparse_loco`")
        zero = jnp.zeros((), jnp.int32)
        residual = deltas.residual(params)
        return SparseLoCoState(
            zero,
            copied(params),
            residual,
            outer_optimizer.init(params),
            inner_optimizer.init(params),
        )

    def merge(mine: optax.Params, state: SparseLoCoState) -> tuple[optax.Params, SparseLoCoState]:
        gradient, residual = deltas.exchange(pseudo_gradient(state.anchor, mine), state.residual)
        anchor, outer_state = outer_step(outer_optimizer, gradient, state.anchor, state.outer)
        return anchor, state._replace(anchor=anchor, residual=residual, outer=outer_state)

    def begin(state: SparseLoCoState, params: optax.Params) -> Round:
        check_state(state, init, params, "`sparse_loco`")
        return Round(merges=[to_merged(merge)])

    return local_rounds(
        "sparse_loco", deltas.names, inner_optimizer, every=every, init=init, begin=begin
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SparseExchange:
    """Settings for the exchange at the end of a round, as in `sparse_loco`."""

    names: tuple[Hashable, ...]
    density: float
    decay: float
    chunk: int
    bits: int
    skip: sparse.Skip

    def residual(self, params: optax.Params) -> PyTree:
        found, treedef = jax.tree.flatten_with_path(params)
        zeros = [
            jnp.zeros((lay.rows, lay.width), jnp.float32) if lay else optax.MaskedNode()
            for lay in self._layouts(found)
        ]
        return jax.tree.unflatten(treedef, zeros)

    def exchange(self, gradient: optax.Updates, residual: PyTree) -> tuple[optax.Updates, PyTree]:
        """Returns the mean of what all ranks have sent, and this rank's next residual.

        The mean has the gradient's types.
        """
        found, treedef = jax.tree.flatten_with_path(gradient)
        layouts = self._layouts(found)
        rests = treedef.flatten_up_to(residual)
        where = [i for i, lay in enumerate(layouts) if lay]
        for i in where:
            check_float32(*found[i], "the residuals of `sparse_loco`")
        # Average uncompressed leaves as they are.
        out = [
            x if lay else mean_of(x, self.names) for (_, x), lay in zip(found, layouts, strict=True)
        ]
        used = [lay for lay in layouts if lay]
        if used:
            # Exchange all compressed leaves together, to make the number of messages independent of
            # the number of leaves.
            grown = [
                self.decay * rests[i] + leaf_blocks(out[i].astype(jnp.float32), lay.rows)
                for i, lay in zip(where, used, strict=True)
            ]
            means, left = self._send(grown, used)
            for i, mean, rest in zip(where, means, left, strict=True):
                x = out[i]
                # Residuals accumulate deltas in float32, so the mean can be too large for a 16-bit
                # leaf.
                flat = collectives.saturate(mean.reshape(-1)[: x.size], x.dtype)
                out[i] = flat.reshape(x.shape).astype(x.dtype)
                rests[i] = rest
        return jax.tree.unflatten(treedef, out), jax.tree.unflatten(treedef, rests)

    def _layouts(self, found: list[tuple[Any, Any]]) -> list[Chunks | None]:
        chosen = sparse.compressed_leaves(found, self.skip)
        sizes = [jnp.size(leaf) for _, leaf in found]
        for size, compressed in zip(sizes, chosen, strict=True):
            if compressed:
                sparse.check_size(size, "`sparse_loco`")
        widths = [
            chunk_length(size, self.chunk) if c else 0
            for size, c in zip(sizes, chosen, strict=True)
        ]
        return [
            sparse.chunked(-(-size // width), width, self.density) if width else None
            for size, width in zip(sizes, widths, strict=True)
        ]

    def _send(
        self, grown: list[jax.Array], layouts: list[Chunks]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        pairs = [sparse.largest_of_chunks(x, lay) for x, lay in zip(grown, layouts, strict=True)]
        if self.bits == 32:
            means = sparse.mean_of_chunks(pairs, layouts, self.names)
            sent = [values for values, _ in pairs]
        else:
            coded = [_coded(values) for values, _ in pairs]
            # The receivers get rounded values. So decode our own codes in the same way and subtract
            # the result from the residual, which then keeps exactly what the receivers don't get.
            sent = [_decoded(codes, levels) for codes, levels in coded]
            # Put the code above the bits of the index, so that both get packed as one integer.
            both = [
                c + (codes << lay.index_bits)
                for (_, c), (codes, _), lay in zip(pairs, coded, layouts, strict=True)
            ]
            packed = sparse.pack_columns(both, layouts, _CODE_BITS)
            every = sparse.unpack_columns(
                collectives.gather(packed, self.names), layouts, _CODE_BITS
            )
            levels = collectives.gather(
                jnp.stack([levels for _, levels in coded]), self.names
            )  # [P, leaves, 2]
            means = []
            for leaf, (number, lay) in enumerate(zip(every, layouts, strict=True)):
                # Codes have to be decoded with the two magnitudes of the rank they came from.
                values = _decoded(number >> lay.index_bits, levels[:, leaf, None])
                columns = number & ((1 << lay.index_bits) - 1)
                means.append(sparse.sum_of_chunks(values, columns, lay) / values.shape[0])
        return means, [
            sparse.residual_of_chunks(x, v, c)
            for x, v, (_, c) in zip(grown, sent, pairs, strict=True)
        ]


def _coded(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns 2-bit codes as int32, and the two magnitudes they stand for, `[2]`.

    A code's low bit is the sign, 1 for positive values. The high bit is set if the value's
    magnitude is above the mean magnitude of all values. The two magnitudes are the means below and
    above that threshold. If any value isn't finite, the comparison is false across the board, so
    all values get the first magnitude, which isn't finite either.
    """
    size = jnp.abs(values)
    above = size > jnp.sum(size / size.size)
    sizes = [_mean_where(size, ~above), _mean_where(size, above)]
    return (values > 0).astype(jnp.int32) + 2 * above.astype(jnp.int32), jnp.stack(sizes)


def _mean_where(x: jax.Array, chosen: jax.Array) -> jax.Array:
    # Divide before summing, because a sum of large numbers could overflow to infinity.
    return jnp.sum(jnp.where(chosen, x / jnp.maximum(jnp.sum(chosen), 1), 0))


def _decoded(codes: jax.Array, levels: jax.Array) -> jax.Array:
    """Decodes values. The last axis of `levels` holds the two magnitudes."""
    size = jnp.where(codes >= 2, levels[..., 1], levels[..., 0])
    return jnp.where(codes % 2 == 1, size, -size)
