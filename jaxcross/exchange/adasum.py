"""Adasum: averages gradients that point the same way and adds gradients that are orthogonal.

Each layer is combined by itself. The operator `A(a, b)`, which the docstring of `adasum` defines,
first combines the vectors of pairs of ranks, then the results of pairs of pairs, and so on, as in a
binary tree.

We evaluate this tree by vector halving and distance doubling. At level *l*, a rank and its partner
`rank XOR 2^l` combine two vectors, and each of them keeps one half of the result. The operator
needs dot products of whole vectors, though. So each rank computes the dot products of its half, and
these are summed over the `2^(l+1)` ranks that together hold the two vectors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.exchange import collectives, layouts
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import per_rank
from jaxcross.exchange.validation import check_real, optimizer_in


def adasum(
    axes: collectives.Axes, optimizer: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    """Combines updates over ranks by Adasum, with separate coefficients for each layer (leaf).

    Evaluates the operator `A(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` over a balanced
    binary tree of the ranks, in rank order. The result is bitwise identical on every rank, but it
    depends on which rank contributes which update. You don't need to scale the learning rate with
    the number of ranks. Dot products are computed in float32 or wider, and neither overflow nor
    underflow, however large or small a layer's elements are. Deterministic.

    ```python
    tx = jaxcross.exchange.adasum("batch", optimizer=optax.adam(1e-3))  # or
    tx = optax.chain(jaxcross.exchange.adasum("batch"), optax.sgd(0.1))  # or, over nodes
    tx = optax.chain(jaxcross.exchange.adasum(("node", "local")), optax.sgd(0.1))
    ```

    Args:
        axes: One axis name, or a tuple of names with the outer axis first. With several axes, a
            reduce-scatter first averages the updates over the inner ones. The parts are then
            combined over the outer axis and gathered again. The result is the Adasum over nodes of
            each node's mean. The outer axis may have any size: if it isn't a power of two, each
            rank beyond the largest power of two is first combined with a partner.
        optimizer: Steps on this rank's own gradients, after which its *update* is combined (the
            delta optimizer, for momentum, Adam or LAMB). Its state, in a `PerRankState`, differs
            between ranks: save it per rank and never broadcast it. If None, the raw gradients are
            combined, and plain SGD should follow. To take one local step for several gradients, you
            can wrap the optimizer in `accumulate`. Adasum can't take several local steps and
            combine their sum.

    Raises:
        ValueError: An axis is named twice, or (at the first trace) a leaf is not real
            floating-point.

    Bytes received per rank, with P ranks on the outer axis, Q the largest power of two up to P, n
    ranks on the inner axes (1 if there are none), L leaves, and D elements after padding each leaf
    to a multiple of nQ (times `chunk`, up to 512). Halving and doubling receive `2(Q-1)/Q D/n`
    elements. The dot products add `5L(P-1)n + 5L(n-1)` at each of the log2(Q) levels. If P isn't a
    power of two, folding in the other ranks adds `2D/n + 5L(n-1)`. The mean within the nodes adds
    `2(n-1)/n D`. Each element takes 4 bytes.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Maleki et al., arXiv 2006.02924, section 3 (the operator) and algorithm 1 (its
    evaluation). We've added two things. If the number of ranks isn't a power of two, the extra
    ranks are combined with a partner first. And dot products are scaled, so that they neither
    overflow nor underflow.
    """
    outer, *inner = collectives.axis_names(axes)

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra
        check_real(updates, "Adasum's dot products")
        leaves, treedef = jax.tree.flatten(updates)
        some = [i for i, x in enumerate(leaves) if x.size]
        if some:
            combined = _exchange([leaves[i] for i in some], outer, inner)
            for i, x in zip(some, combined, strict=True):
                leaves[i] = x.astype(leaves[i].dtype)
        return jax.tree.unflatten(treedef, leaves), state

    exchange = optax.GradientTransformationExtraArgs(init, update)
    if optimizer is not None:
        exchange = optax.chain(per_rank(optimizer_in(optimizer, "`adasum`")), exchange)
    return exchange_once("adasum", axes, exchange)


def chunk(shapes: Sequence[Sequence[int]], count: int) -> int:
    """Returns the number of elements per chunk; all elements of a chunk belong to the same layer.

    We process all layers in a single operation on equally long chunks, because with one operation
    per layer, a compiler would take minutes. For this, each layer is padded to a multiple of
    `count` times the chunk size. Larger chunks need more padding, so we take the largest power of
    two up to 512 that adds less than about 2% in total.
    """
    room = sum(map(math.prod, shapes)) // (64 * max(len(shapes), 1) * count)
    return 1 << min(max(room, 1).bit_length() - 1, 9)


def _exchange(
    leaves: Sequence[jax.Array], axis: Hashable, inner: Sequence[Hashable]
) -> list[jax.Array]:
    ranks = jax.lax.axis_size(axis)
    base = 1 << (ranks.bit_length() - 1)
    count = base
    for name in inner:
        count *= jax.lax.axis_size(name)
    shapes = [x.shape for x in leaves]
    size = chunk(shapes, count)
    x = layouts.to_blocks(leaves, count, jnp.result_type(jnp.float32, *leaves), size)
    columns = x.shape[1]
    for name in inner:
        x = collectives.sum_scatter(x.reshape(-1), name) / jax.lax.axis_size(name)
    x = _over_ranks(
        x.reshape(base, -1, size),
        [layouts.block_width(s, count, size) // size for s in shapes],
        axis,
        inner,
    )
    for name in reversed(inner):
        x = collectives.gather(x, name)
    return layouts.from_blocks(x.reshape(count, columns), shapes, size)


def _over_ranks(
    x: jax.Array, counts: Sequence[int], axis: Hashable, inner: Sequence[Hashable]
) -> jax.Array:
    """Returns the Adasum of `x[rows, chunks, elements]`, where `rows` is a power of two.

    `counts` holds each layer's number of chunks per row.
    """
    ranks = jax.lax.axis_size(axis)
    rank = jax.lax.axis_index(axis)
    base = x.shape[0]
    levels = base.bit_length() - 1
    if base < ranks:
        pair = _combine(
            x, collectives.fold(x, axis), counts, lambda own: collectives.gather(own, tuple(inner))
        )
        x = jnp.where(rank < ranks - base, pair, x)
    for level in range(levels):
        lower = (rank >> level) & 1 == 0
        half = x.shape[0] // 2
        kept = jnp.where(lower, x[:half], x[half:])
        given = jnp.where(lower, x[half:], x[:half])
        got = collectives.swap(given, axis, 1 << level, ranks=base)

        def of_group(own: jax.Array, level: int = level) -> jax.Array:
            # The dot products of two vectors are spread over the ranks that hold parts of these
            # vectors, which are a group of neighbouring ranks. `vmap` doesn't support collectives
            # within groups of ranks, so we gather the partial dot products of all ranks, and pick
            # out the group's rows. That's cheap, because it's only a few numbers per layer.
            everybody = collectives.gather(own, (axis, *inner)).reshape(ranks, -1, *own.shape)
            group = jax.lax.dynamic_slice_in_dim(
                everybody, rank >> (level + 1) << (level + 1), 2 << level
            )
            return group.reshape(-1, *own.shape)

        # Both ranks pass the lower rank's vector first, so that both compute the same bits.
        x = _combine(jnp.where(lower, kept, got), jnp.where(lower, got, kept), counts, of_group)
    for level in reversed(range(levels)):
        lower = (rank >> level) & 1 == 0
        got = collectives.swap(x, axis, 1 << level, ranks=base)
        x = jnp.concatenate([jnp.where(lower, x, got), jnp.where(lower, got, x)])
    if base < ranks:
        x = jnp.where(rank < base, x, collectives.fold(x, axis))
    return x


def _combine(
    a: jax.Array, b: jax.Array, counts: Sequence[int], gather: Callable[..., jax.Array]
) -> jax.Array:
    """Returns this rank's part of A(a, b).

    The two vectors are spread over several ranks. `gather` collects the statistics of all their
    parts, one row per rank.
    """
    layer = np.repeat(np.arange(len(counts)), counts)

    def spread(values: jax.Array) -> jax.Array:
        return values[layer][:, None]

    largest = jnp.stack([jnp.abs(a).max((0, 2)), jnp.abs(b).max((0, 2))])
    scales = _scale(_of_layers(largest, counts, jnp.maximum))
    small_a = a / spread(scales[0])
    small_b = b / spread(scales[1])
    products = jnp.stack(
        [
            (x * y).sum((0, 2))
            for x, y in ((small_a, small_b), (small_a, small_a), (small_b, small_b))
        ]
    )
    # For each layer: both scales, and a.b, a.a, b.b of the scaled parts.
    rows = gather(jnp.concatenate([scales, _of_layers(products, counts, jnp.add)]))
    top_a = rows[:, 0].max(0)
    top_b = rows[:, 1].max(0)
    part_a = rows[:, 0] / top_a
    part_b = rows[:, 1] / top_b
    ab = (part_a * part_b * rows[:, 2]).sum(0)
    aa = (part_a**2 * rows[:, 3]).sum(0)
    bb = (part_b**2 * rows[:, 4]).sum(0)
    # Adasum's formula subtracts from a vector a the term (a.b / 2|a|^2) a. The factor in
    # parentheses could overflow if a is tiny and b is huge, but its product with a can't, because
    # that's never longer than b. So we compute the product from vectors that are scaled to a
    # moderate size, and multiply it by b's scale at the end.
    common_a = spread(_ratio(ab, aa)) * (a / spread(top_a)) * spread(top_b)
    common_b = spread(_ratio(ab, bb)) * (b / spread(top_b)) * spread(top_a)
    # In all, the formula has four terms: a, b, and minus half of each vector's projection on the
    # other. Adding a and b first could overflow. So from a, we first subtract half of its
    # projection on b, which can only make it shorter. The same goes for b. Only then do we add the
    # two differences.
    return (a - common_b) + (b - common_a)


def _ratio(ab: jax.Array, square: jax.Array) -> jax.Array:
    """Returns `a.b / 2|a|^2`: half of b's projection on a. 0 if a is all zeros."""
    return jnp.where(square == 0, 0, ab / jnp.where(square == 0, 1, 2 * square))


def _of_layers(x: jax.Array, counts: Sequence[int], combine: Callable[..., jax.Array]) -> jax.Array:
    """Reduces the columns of each layer to a single one, by a binary tree of `combine`.

    `counts` holds the number of columns of each layer. A tree avoids atomic sums on a GPU, which
    aren't deterministic.
    """
    left = list(counts)
    while max(left) > 1:
        starts = itertools.accumulate(left, initial=0)
        firsts = [(i, n) for i, n in zip(starts, left, strict=False)]
        pairs = [
            (i + k, i + k + 1 if k + 1 < n else x.shape[1])
            for i, n in firsts
            for k in range(0, n, 2)
        ]
        one, two = np.asarray(pairs, np.int32).T
        padded = jnp.pad(x, ((0, 0), (0, 1)))
        x = combine(padded[:, one], padded[:, two])
        left = [-(-n // 2) for n in left]
    return x


def _scale(x: jax.Array) -> jax.Array:
    """Returns the largest power of two up to each magnitude, so that dividing by it never rounds.

    The power of two is clipped so that its reciprocal is a normal number.
    """
    info = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{info.bits}")
    bits = jax.lax.bitcast_convert_type(jnp.clip(x, info.tiny, info.max / 2), integer)
    return jax.lax.bitcast_convert_type(bits >> info.nmant << info.nmant, x.dtype)
