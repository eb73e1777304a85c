"""Adasum: averages gradients that point in the same direction, and adds orthogonal gradients.

Layers are combined independently of each other. The operator `A(a, b)`, defined in the docstring of
`adasum`, is applied along a binary tree: first to pairs of ranks, then to pairs of the results, and
so on.

We evaluate this tree by vector halving and distance doubling: at level *l*, a rank and its partner
`rank XOR 2^l` combine two vectors, and each keeps one half of the result. The catch is that the
operator needs dot products of whole vectors. So each rank computes the dot products of its own
half, and these are summed over the `2^(l+1)` ranks that jointly hold the two vectors.
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
    """Combines updates across ranks using Adasum, with separate coefficients for each layer (leaf).

    Applies the operator `A(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` along a balanced
    binary tree of the ranks, in rank order. The result is bitwise identical on every rank, but
    depends on which rank contributes which update. There's no need to scale the learning rate with
    the number of ranks. Dot products are computed in float32 or wider, and can neither overflow nor
    underflow, no matter how large or small a layer's elements are. Deterministic.

    ```python
    tx = jaxcross.exchange.adasum("batch", optimizer=optax.adam(1e-3))  # or
    tx = optax.chain(jaxcross.exchange.adasum("batch"), optax.sgd(0.1))  # or, over nodes
    tx = optax.chain(jaxcross.exchange.adasum(("node", "local")), optax.sgd(0.1))
    ```

    Args:
        axes: One axis name, or a tuple of names with the outer axis first. Given several axes, we
            compute the Adasum over nodes (the outer axis) of each node's mean (over the inner
            axes): a reduce-scatter averages the updates within each node, the parts are combined
            across nodes, and finally gathered again. The outer axis may have any size; if it isn't
            a power of two, each excess rank is first combined with a partner.
        optimizer: Steps on this rank's own gradients, after which its *update* is combined (known
            as the delta optimizer, for use with momentum, Adam or LAMB). Its state, a
            `PerRankState`, differs between ranks: save it per rank, and never broadcast it. If
            None, the raw gradients are combined, and plain SGD should follow. To take a local step
            on several accumulated gradients, wrap the optimizer in `accumulate`. Combining the sum
            of several local steps is not supported.

    Raises:
        ValueError: An axis is named twice, or (at the first trace) a leaf is not real
            floating-point.

    Bytes received per rank, where P is the number of ranks on the outer axis, Q the largest power
    of two up to P, n the number of ranks on the inner axes (1 if there are none), L the number of
    leaves, and D the number of elements after padding each leaf to a multiple of nQ (times `chunk`,
    up to 512): halving and doubling receive `2(Q-1)/Q D/n` elements. The dot products add
    `5L(P-1)n + 5L(n-1)` at each of the log2(Q) levels. If P isn't a power of two, folding in the
    excess ranks adds `2D/n + 5L(n-1)`. The mean within the nodes adds `2(n-1)/n D`. Each element
    takes 4 bytes.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Maleki et al., arXiv 2006.02924, section 3 (the operator) and algorithm 1 (its
    evaluation). We go beyond the paper in two ways: the number of ranks needn't be a power of two,
    because excess ranks are first combined with a partner, and dot products are scaled so that they
    can neither overflow nor underflow.
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
    """Returns the number of elements per chunk, where each chunk lies within a single layer.

    We process all layers in a single operation over equally long chunks; with a separate operation
    per layer, compilation would take minutes. This requires padding each layer to a multiple of
    `count` times the chunk size. Larger chunks need more padding, so we pick the largest power of
    two up to 512 that adds less than about 2% overall.
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

    `counts` is the number of chunks per row for each layer.
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
            # Both vectors are spread over a group of neighbouring ranks, and so are their dot
            # products. `vmap` doesn't support collectives within groups of ranks, so we gather the
            # partial dot products of all ranks and pick out our group's rows. That's cheap, since
            # it's only a few numbers per layer.
            everybody = collectives.gather(own, (axis, *inner)).reshape(ranks, -1, *own.shape)
            group = jax.lax.dynamic_slice_in_dim(
                everybody, rank >> (level + 1) << (level + 1), 2 << level
            )
            return group.reshape(-1, *own.shape)

        # Both partners pass the lower rank's vector first, so that they compute the same bits.
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
    parts, with one row per rank.
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
    # Adasum subtracts the term (a.b / 2|a|^2) a from a vector a. The factor in parentheses could
    # overflow if a is tiny and b is huge, but the whole term can't, because it's never longer than
    # b. So we compute the term from vectors scaled to a moderate size, and multiply it by b's scale
    # at the end.
    common_a = spread(_ratio(ab, aa)) * (a / spread(top_a)) * spread(top_b)
    common_b = spread(_ratio(ab, bb)) * (b / spread(top_b)) * spread(top_a)
    # The complete formula has four terms: a, b, and minus half of each vector's projection onto the
    # other. Computing a + b first could overflow. Instead, we first subtract from each vector half
    # of its projection onto the other, which can only make it shorter, and then add up the two
    # differences.
    return (a - common_b) + (b - common_a)


def _ratio(ab: jax.Array, square: jax.Array) -> jax.Array:
    """Returns `a.b / 2|a|^2`, i.e. half of b's projection onto a in units of a; 0 if a is zero."""
    return jnp.where(square == 0, 0, ab / jnp.where(square == 0, 1, 2 * square))


def _of_layers(x: jax.Array, counts: Sequence[int], combine: Callable[..., jax.Array]) -> jax.Array:
    """Reduces each layer's columns to a single column, using a binary tree of `combine` calls.

    `counts` is the number of columns of each layer. A tree avoids atomic sums, which aren't
    deterministic on GPUs.
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
    """Rounds each magnitude down to a power of two, so that dividing by it is exact.

    We clip the power of two such that its reciprocal is a normal number.
    """
    info = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{info.bits}")
    bits = jax.lax.bitcast_convert_type(jnp.clip(x, info.tiny, info.max / 2), integer)
    return jax.lax.bitcast_convert_type(bits >> info.nmant << info.nmant, x.dtype)
