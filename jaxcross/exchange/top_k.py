"""Top-k sparsification: each rank only sends the largest elements of its gradient.

**Error feedback.** Whatever a rank doesn't send is kept in a residual and added to its next
gradient, so it's not lost, merely delayed. The same goes for the rounding error if values are
rounded for sending (`wire_dtype`). Without error feedback, training may stall.

The residual carries over from step to step, so an infinity in there would never go away. That's why
we clip values to the range of whatever type they're converted to.

**Exchange.** Elements are sent as (value, index) pairs. Every rank gathers everyone's pairs and
adds them up in rank order, so the mean is bitwise identical everywhere. There's one message for the
values of all leaves and another for their indices, because small leaves would otherwise spend most
of their time on latency.

Since every rank receives everyone else's pairs, the bytes it receives grow with P - 1, as opposed
to 2(P-1)/P for a dense mean. If the number of ranks is a power of two, `gtop_k` avoids this.

**Per leaf or per bucket.** By default, we select the k largest elements of each leaf. With the
`bucket` option, we select from all leaves at once, which can be cheaper, but layers with small
gradients then hardly ever get to send anything.

**Nodes.** If several ranks share a node, the node's link to the outside would have to carry all of
their pairs. With `pattern="hierarchical"` (HiTopKComm), we first sum the gradients densely within
the node, which leaves each of its L ranks with 1/L of the node's sum. Only then do the ranks select
their elements and exchange pairs with other nodes.

The sum within the node can't be sparse, because we're looking for the largest elements of the
node's sum, and these aren't known up front. The result is distributed densely within the node as
well, since bytes are cheap there.

**Density.** The density is the fraction of elements to send. It determines the size of the
messages, so it's part of the compiled program. If it changes during training (the `warm_up`
option), the program becomes a `lax.switch` with a branch for each density.

At a density of 1%, our digits task reaches the same accuracy as with a dense mean, for a twentieth
of the bytes. On a prose task with Adam after the exchange, it's 2 points behind the mean after 400
steps. The gap shrinks to 0.7 points when sending 10% for the first two fifths of the steps
(benchmarks/results/exchanges.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives, layouts, sparse
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.select import Selection, check_selection, select
from jaxcross.exchange.validation import check_float32, check_state, whole_number

Pattern = Literal["flat", "hierarchical"]


class TopKState(NamedTuple):
    """Number of steps and each rank's residuals: float32 vectors in the tree of the parameters.

    A residual has as many elements as its leaf, D. In the hierarchical pattern, each of a node's L
    ranks only handles its own part of the padded leaf, so its residual has D'/L elements.

    If residuals were saved with a different number of ranks or nodes but happen to have the right
    length, a step can't tell. `job.restore` can, and raises; otherwise, unsent residuals of the
    missing ranks would be silently dropped.
    """

    step: jax.Array
    residual: PyTree

    rank_local = RankLocal(unsent=("residual",), maybe_empty=("residual",))


def top_k(
    density: float,
    axes: collectives.Axes,
    *,
    selection: Selection = "auto",
    error_feedback: bool = True,
    skip: sparse.Skip = sparse.bias_or_norm,
    warm_up: Sequence[tuple[int, float]] = (),
    wire_dtype: DTypeLike | None = None,
    bucket: bool = False,
    pattern: Pattern = "flat",
    inner_ranks: int | None = None,
) -> optax.GradientTransformation:
    """Averages each rank's `k = density * D` largest elements of every leaf of D elements.

    Updates are the same on every rank. Residuals are rank-local, so save them per rank.
    Deterministic.

    Each selected element is sent as its value and an int32 index. All leaves share two all-gathers,
    one for values and one for indices. Bytes received per rank, on P ranks and with v bytes per
    value: `(P-1) k (v + 4)`, plus `2(P-1)/P n` for skipped leaves of n bytes.

    `pattern="hierarchical"` is HiTopKComm over `axes=(outer, inner)` of N and L ranks. Each rank
    receives the dense sum of 1/L of each leaf within the node, exchanges the k/L largest elements
    of its part between nodes, and gathers the dense result within the node. The residuals belong to
    that 1/L. Altogether, a rank receives `8 (L-1)/L D' + (N-1) k/L (v + 4)` bytes, where D' is D
    padded to a multiple of L.

    Within a node, everything is sent densely. We don't have a choice when it comes to the sum,
    because we're looking for the largest elements of the node's sum, and these aren't known up
    front. For the result, pairs would take fewer bytes as long as `2 N density < 1`, but bytes are
    cheap within a node.

    ```python
    tx = optax.chain(jaxcross.exchange.top_k(0.01, "batch", warm_up=[(500, 0.1)]), optax.sgd(0.1))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # grads are this rank's own
    ```

    Args:
        density: Fraction of the elements to send.
        axes: One axis name, or a tuple of names that act as a single axis. For `"hierarchical"`, a
            tuple of the outer and the inner axis.
        selection: How to find the largest elements; see `jaxcross.exchange.select`.
        error_feedback: Whether to keep what wasn't sent, including what `wire_dtype` rounds off.
            Training with top-k may stall without it.
        skip: (path, leaf) -> whether to average a leaf uncompressed. By default, this applies to
            scalars, vectors, and leaves of any shape called `bias` or `scale`.
        warm_up: `(until_step, density)` pairs in ascending order of steps: the density to use
            before `until_step`.
        wire_dtype: Element type of the values on the wire, for example `jnp.bfloat16`. Values
            beyond its range are sent as its largest number.
        bucket: Whether to select the largest elements across all leaves. That can be cheaper, but
            starves layers with small gradients.
        pattern: `"flat"` or `"hierarchical"`.
        inner_ranks: Number of ranks of the inner axis of `"hierarchical"`. We need it because
            residuals (for 1/L of each leaf) are created before that axis is bound.

    Raises:
        ValueError: An argument is out of range; or, at trace time, the size of the inner axis is
            not `inner_ranks`, the state has different shapes than `init` makes, or a compressed
            leaf or bucket has 2^31 elements or more, or is float64.

    Warns in `init` if there's nothing to compress, unless you pass your own `skip`.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Stich et al., arXiv 1809.07599 (error feedback); Shi et al., arXiv 2010.10458
    (HiTopKComm and MSTopK).
    """
    density = sparse.check_density(density)
    check_selection(selection)
    stages = _stages(density, warm_up)
    sparse.check_wire_dtype(wire_dtype)
    names = collectives.axis_names(axes)
    _check_pattern(pattern, axes, inner_ranks)
    hierarchical = pattern == "hierarchical"
    inner = whole_number(inner_ranks, "inner_ranks", "`top_k`") if hierarchical else 1
    settings = _Settings(
        names=names,
        across=names[:1] if hierarchical else names,
        inner=inner,
        selection=selection,
        error_feedback=error_feedback,
        wire_dtype=wire_dtype,
        bucket=bucket,
    )

    def init(params: optax.Params) -> TopKState:
        sparse.warn_if_none(params, skip, "`top_k`")
        # With nodes, a rank only has residuals for its own part of each leaf.
        keep = (
            sparse.residuals(params, skip, lambda size: layouts.block_width((size,), inner))
            if error_feedback
            else None
        )
        return TopKState(step=jnp.zeros((), jnp.int32), residual=keep)

    def update(
        updates: optax.Updates, state: TopKState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, TopKState]:
        del params
        _check_inner_ranks(names, inner if hierarchical else None)
        check_state(state, init, updates, "`top_k`")
        found, treedef = jax.tree.flatten_with_path(updates)
        leaves = [leaf for _, leaf in found]
        chosen = sparse.compressed_leaves(found, skip)
        residual: list[jax.Array] = []
        if error_feedback:
            residual = [
                r for r, c in zip(treedef.flatten_up_to(state.residual), chosen, strict=True) if c
            ]
        for (path, x), c in zip(found, chosen, strict=True):
            if c:
                check_float32(path, x, "the values of `top_k`")
        big = [x for x, c in zip(leaves, chosen, strict=True) if c]
        if big:
            # The density determines the length of the messages, so it has to be a constant. That's
            # why each stage of the warm-up gets its own branch. The current stage's index is the
            # number of stages that have ended.
            branches = [partial(_exchange, settings, d) for _, d in stages]
            stage = sum((state.step >= until).astype(jnp.int32) for until, _ in stages[:-1])
            big, residual = (
                jax.lax.switch(stage, branches, big, residual)
                if warm_up
                else branches[0](big, residual)
            )
        averaged = iter(big)
        kept = iter(residual)
        out = [
            next(averaged) if c else jax.lax.pmean(x, names)
            for x, c in zip(leaves, chosen, strict=True)
        ]
        rest = None
        if error_feedback:
            rest = jax.tree.unflatten(
                treedef, [next(kept) if c else optax.MaskedNode() for c in chosen]
            )
        step = jnp.asarray(optax.safe_increment(state.step))
        return jax.tree.unflatten(treedef, out), TopKState(step, rest)

    return exchange_once("top_k", names, optax.GradientTransformation(init, update))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Settings for exchanging the compressed leaves.

    Attributes:
        names: All axes.
        across: Axes over which pairs are exchanged; with nodes, only the outer axis.
        inner: Number of ranks per node, each of which handles its part of the node's sum; 1 without
            nodes.
        selection: As in `top_k`.
        error_feedback: As in `top_k`.
        wire_dtype: As in `top_k`.
        bucket: As in `top_k`.
    """

    names: tuple[Hashable, ...]
    across: tuple[Hashable, ...]
    inner: int
    selection: Selection
    error_feedback: bool
    wire_dtype: DTypeLike | None
    bucket: bool


def _exchange(
    settings: _Settings, share: float, leaves: list[jax.Array], residual: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the compressed mean of the leaves and this rank's next residuals."""
    inner = settings.inner
    shapes = [x.shape for x in leaves]
    vectors = [x.reshape(-1).astype(jnp.float32) for x in leaves]
    if inner > 1:
        # Sum densely within the node first, which gives each rank its part of every leaf's sum.
        rows = collectives.sum_scatter(
            layouts.to_blocks(leaves, inner, jnp.float32).reshape(-1), settings.names[1]
        )
        vectors = layouts.block_columns(rows, shapes, inner)
    if settings.error_feedback:
        vectors = [x + e for x, e in zip(vectors, residual, strict=True)]
    # Select the k largest elements of each group separately. A group is a single leaf or, with the
    # `bucket` option, all leaves together.
    bounds = list(itertools.accumulate((x.size for x in vectors), initial=0))
    groups = [jnp.concatenate(vectors)] if settings.bucket else vectors
    pairs = [select(x, sparse.slots(share, x.size), selection=settings.selection) for x in groups]
    sent = _sent_values(
        settings,
        [values for values, _ in pairs],
        pairs[0][1],
        bounds[1:],
        [x.dtype for x in leaves],
    )
    # Send one message with all values and another with all indices, because small leaves would
    # spend most of their time waiting for latency.
    counts = list(itertools.accumulate(v.size for v in sent))[:-1]
    every_value = jnp.split(
        collectives.gather(jnp.concatenate(sent), settings.across), counts, axis=1
    )
    every_index = jnp.split(
        collectives.gather(jnp.concatenate([i for _, i in pairs]), settings.across), counts, axis=1
    )
    ranks = jax.lax.psum(1, settings.names)
    sums = [
        sparse.sum_of_pairs(v, i, x.size) / ranks
        for v, i, x in zip(every_value, every_index, groups, strict=True)
    ]
    # Subtract the values from the residuals as they were sent, i.e. after clipping and rounding.
    # That way, clipping and rounding errors stay in the residuals and get sent later.
    rests = [
        sparse.residual_after(x, v, i) for x, v, (_, i) in zip(groups, sent, pairs, strict=True)
    ]
    if settings.bucket:
        sums, rests = (
            [whole[0][a:b] for a, b in itertools.pairwise(bounds)] for whole in (sums, rests)
        )
    if inner > 1:
        sums = layouts.from_blocks(
            collectives.gather(jnp.concatenate(sums), settings.names[1]), shapes
        )
    # Rounding up to `wire_dtype` may have exceeded the range of the update's type.
    sums = [collectives.saturate(s, x.dtype) for s, x in zip(sums, leaves, strict=True)]
    out = [s.reshape(x.shape).astype(x.dtype) for s, x in zip(sums, leaves, strict=True)]
    return out, list(rests) if settings.error_feedback else []


def _sent_values(
    settings: _Settings,
    values: list[jax.Array],
    indices: jax.Array,
    ends: Sequence[int],
    types: Sequence[DTypeLike],
) -> list[jax.Array]:
    """Returns each group's selected values the way they're sent, i.e. clipped and rounded.

    Clipping all values to the range of the update's type ensures that their mean fits that type. In
    the hierarchical pattern, a value is a sum over a node's `inner` ranks and can be up to `inner`
    times as large, so it's clipped to `inner` times the type's largest number.

    Args:
        settings: Settings of the exchange.
        values: Selected values of each leaf, or of the one bucket of all leaves.
        indices: Indices of the first group's values.
        ends: Where each leaf ends in the bucket.
        types: Element type of each leaf.
    """
    if settings.bucket and len(set(types)) > 1:
        sent = [_saturate_each(values[0], indices, ends, types, settings.inner)]
    else:
        sent = [
            collectives.saturate(v, dtype, settings.inner)
            for v, dtype in zip(values, types[: len(values)], strict=True)
        ]
    return [
        v if settings.wire_dtype is None else sparse.rounded(v, settings.wire_dtype) for v in sent
    ]


def _saturate_each(
    values: jax.Array,
    indices: jax.Array,
    ends: Sequence[int],
    types: Sequence[DTypeLike],
    times: int,
) -> jax.Array:
    """Clips each element of a bucket to the range of its leaf's type; leaves end at `ends`."""
    most = float(jnp.finfo(values.dtype).max)
    largest = jnp.asarray([min(most, times * float(jnp.finfo(t).max)) for t in types], values.dtype)
    # Look up which leaf each element belongs to, and the range of that leaf's type. The index of an
    # empty slot lies past the last leaf, so the slot gets the last leaf's range. That's harmless,
    # because the slot's value is 0.
    largest = largest.at[jnp.searchsorted(jnp.asarray(ends), indices, side="right")].get(
        mode="clip"
    )
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -largest, largest), values)


def _check_pattern(pattern: Pattern, axes: collectives.Axes, inner_ranks: int | None) -> None:
    if pattern not in get_args(Pattern):
        raise ValueError(f'`pattern` of `top_k` must be "flat" or "hierarchical", got {pattern!r}.')
    hierarchical = pattern == "hierarchical"
    if hierarchical and (len(collectives.axis_names(axes)) != 2 or inner_ranks is None):
        raise ValueError(
            '`pattern="hierarchical"` of `top_k` needs two axes and `inner_ranks`, because '
            f"residuals are created before any axis is bound, got `axes={axes!r}` and "
            f"`inner_ranks={inner_ranks}`. Name two axes, and the inner one's number of ranks, for "
            'example `axes=("node", "local"), inner_ranks=8`.'
        )
    if not hierarchical and inner_ranks is not None:
        raise ValueError(
            f'`inner_ranks` of `top_k` is {inner_ranks!r}, but `pattern="flat"` has no nodes: '
            'every rank sends to every other rank. Write `pattern="hierarchical"`, or leave '
            "`inner_ranks` out."
        )


def _stages(density: float, warm_up: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    pairs = isinstance(warm_up, Sequence) and all(
        isinstance(stage, Sequence) and len(stage) == 2 for stage in warm_up
    )
    if not pairs:
        raise ValueError(
            "`warm_up` of `top_k` must be a list of pairs of a step and the density before this "
            f"step, for example `[(100, 0.25), (200, 0.05)]`, got {warm_up!r}."
        )
    what = "a pair in `warm_up` of `top_k`"
    steps = [whole_number(until, "step", what, least=0) for until, _ in warm_up]
    if steps != sorted(set(steps)) or any(s < 1 for s in steps):
        raise ValueError(
            "`warm_up` of `top_k` must have positive, ascending steps, for example "
            f"`[(100, 0.25), (200, 0.05)]`, got steps {steps}."
        )
    shares = [sparse.check_density(share, "each density in `warm_up`") for _, share in warm_up]
    return [*zip(steps, shares, strict=True), (-1, density)]


def _check_inner_ranks(names: tuple[Hashable, ...], inner: int | None) -> None:
    if inner is None:
        return
    size = jax.lax.axis_size(names[1])
    if size != inner:
        raise ValueError(
            f"`inner_ranks` of `top_k` is {inner}, but axis `{names[1]}` has {size} ranks: "
            f"residuals were created for {inner}. Create the exchange with `inner_ranks={size}`, "
            "and create its state again. The unsent residuals are then lost."
        )
