"""Top-k sparsification: each rank sends its largest elements, and what it did not send is added to
its next step.
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
from jaxcross.exchange import blocks, collectives, sparse
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.select import Selection, check_selection, select
from jaxcross.exchange.validation import check_float32, check_state, whole_number

Pattern = Literal["flat", "hierarchical"]


class TopKState(NamedTuple):
    """Steps made, and what each rank has not sent yet: float32 vectors in the tree of the
    parameters.

    A vector is as long as its leaf has elements D; hierarchical, as a padded leaf's part D'/L on
    one of L ranks of a node. No step can tell residuals of another number of ranks, or of nodes,
    whose length is the same. `job.restore` can, and refuses them: what ranks that are gone had not
    sent would be lost.
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
    """Averages over ranks each rank's `k = density * D` largest elements of a leaf of D.

    Updates are the same on every rank; residuals are the rank's own, and must be saved for each
    rank. Deterministic. Exchanged are k pairs of a value and an int32 index, by one all-gather of
    all leaves' values and one of their indices. A rank of P receives `(P-1) k (v + 4)` bytes, v
    bytes a value, and `2(P-1)/P n` for skipped leaves.

    `pattern="hierarchical"` is HiTopKComm over `axes=(outer, inner)` of N and L ranks: the dense
    sum of 1/L of each leaf in the node, its k/L largest elements between nodes, dense again in the
    node; residuals lie on the shard: `8 (L-1)/L D' + (N-1) k/L (v + 4)` bytes, D' being D
    padded to a multiple of L. All is dense inside a node, where bytes are cheap: it must be on the
    way in, since the largest elements are those of the node's sum; on the way out pairs would be
    fewer bytes while `2 N density < 1`.

    ```python
    tx = optax.chain(jaxcross.exchange.top_k(0.01, "batch", warm_up=[(500, 0.1)]), optax.sgd(0.1))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # grads are this rank's own
    ```

    Args:
        density: Share of the elements that is sent.
        axes: One axis name, or a tuple of several that count as one; for `"hierarchical"` a tuple
            of the outer and the inner one.
        selection: How the largest are found: see `jaxcross.exchange.select`.
        error_feedback: Keep what was not sent, the rounding of `wire_dtype` included. Without it
            top-k may stall.
        skip: (path, leaf) -> whether a leaf is averaged as it is. By default scalars, vectors, and
            leaves of any shape whose name is `bias` or `scale`.
        warm_up: `(until_step, density)` pairs, steps ascending: the density before `until_step`.
        wire_dtype: Element type of the values on the wire, for example `jnp.bfloat16`. Values
            beyond its range travel as its largest number.
        bucket: Take the largest of all leaves together: cheaper, but layers with small gradients
            starve.
        pattern: `"flat"` or `"hierarchical"`.
        inner_ranks: Of the inner axis of `"hierarchical"`: residuals, of 1/L of each leaf, are made
            before it is bound.

    Raises:
        ValueError: An argument is out of range; (when traced) the inner axis is not `inner_ranks`
            long, the state has other shapes than `init` makes, or a leaf or bucket that is
            compressed has 2^31 elements or more, or is float64.

    `init` warns where it compresses nothing, unless `skip` is your own.

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: error feedback, Stich et al., arXiv 1809.07599; HiTopKComm and MSTopK, Shi et al., arXiv
    2010.10458.
    """
    density = sparse.check_density(density)
    check_selection(selection)
    stages = _stages(density, warm_up)
    if wire_dtype is not None and not jnp.issubdtype(wire_dtype, jnp.floating):
        raise ValueError(
            f"`wire_dtype` is {jnp.dtype(wire_dtype).name}: values need a floating-point type."
        )
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
        keep = (
            sparse.residuals(params, skip, lambda size: blocks.width((size,), inner))
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
        leaves, chosen = [leaf for _, leaf in found], sparse.compressed_leaves(found, skip)
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
            branches = [partial(_exchange, settings, d) for _, d in stages]
            stage = sum((state.step >= until).astype(jnp.int32) for until, _ in stages[:-1])
            big, residual = (
                jax.lax.switch(stage, branches, big, residual)
                if warm_up
                else branches[0](big, residual)
            )
        averaged, kept = iter(big), iter(residual)
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
    """Settings of the exchange of those leaves that are compressed.

    Attributes:
        names: All axes.
        across: Axes over which pairs travel: the outer one where there are nodes.
        inner: Ranks of a node, which share the leaves of their node's sum; 1 without nodes.
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
    """Returns the compressed mean of leaves, and what this rank has not sent of them."""
    inner = settings.inner
    shapes = [x.shape for x in leaves]
    vectors = [x.reshape(-1).astype(jnp.float32) for x in leaves]
    if inner > 1:
        rows = collectives.sum_scatter(
            blocks.to_blocks(leaves, inner, jnp.float32).reshape(-1), settings.names[1]
        )
        vectors = blocks.columns(rows, shapes, inner)
    if settings.error_feedback:
        vectors = [x + e for x, e in zip(vectors, residual, strict=True)]
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
    # One message of all values and one of all indices: small leaves would mostly wait for latency.
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
    rests = [
        sparse.residual_after(x, v, i) for x, v, (_, i) in zip(groups, sent, pairs, strict=True)
    ]
    if settings.bucket:
        sums, rests = (
            [whole[0][a:b] for a, b in itertools.pairwise(bounds)] for whole in (sums, rests)
        )
    if inner > 1:
        sums = blocks.from_blocks(
            collectives.gather(jnp.concatenate(sums), settings.names[1]), shapes
        )
    # What `wire_dtype` has rounded up may be beyond the update's type.
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
    """Returns the selected values of each group as they travel.

    The mean of what fits the update's type fits it, too; the sum of `inner` ranks may be as many
    times as large.

    Args:
        settings: Of the exchange.
        values: Selected values of each leaf, or of the one bucket of all leaves.
        indices: Indices of the first group's values.
        ends: End of each leaf in the bucket.
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
    """Saturates elements of a bucket, each in the type of its leaf; leaves end at `ends`."""
    most = float(jnp.finfo(values.dtype).max)
    largest = jnp.asarray([min(most, times * float(jnp.finfo(t).max)) for t in types], values.dtype)
    largest = largest.at[jnp.searchsorted(jnp.asarray(ends), indices, side="right")].get(
        mode="clip"
    )
    return jnp.where(jnp.isfinite(values), jnp.clip(values, -largest, largest), values)


def _check_pattern(pattern: Pattern, axes: collectives.Axes, inner_ranks: int | None) -> None:
    if pattern not in get_args(Pattern):
        raise ValueError(f'`pattern` is {pattern!r}: choose "flat" or "hierarchical".')
    hierarchical = pattern == "hierarchical"
    if hierarchical and (len(collectives.axis_names(axes)) != 2 or inner_ranks is None):
        raise ValueError(
            f'`pattern="hierarchical"` with `axes={axes!r}` and `inner_ranks={inner_ranks}`: '
            "residuals are made before any axis is bound, so name two axes and the inner one's "
            'ranks: `axes=("node", "local"), inner_ranks=8`.'
        )
    if not hierarchical and inner_ranks is not None:
        raise ValueError(
            f'`inner_ranks` of `top_k` is {inner_ranks!r}, but `pattern="flat"` knows no nodes: '
            'every rank would send to every other one. Write `pattern="hierarchical"`, or leave '
            "`inner_ranks` out."
        )


def _stages(density: float, warm_up: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    pairs = isinstance(warm_up, Sequence) and all(
        isinstance(stage, Sequence) and len(stage) == 2 for stage in warm_up
    )
    if not pairs:
        raise ValueError(
            f"`warm_up` is {warm_up!r}: it is a list of pairs of a step and the density before it, "
            "for example `[(100, 0.25), (200, 0.05)]`."
        )
    what = "`top_k`, of which the first number of each pair is a step,"
    steps = [whole_number(until, "warm_up", what, least=0) for until, _ in warm_up]
    if steps != sorted(set(steps)) or any(s < 1 for s in steps):
        raise ValueError(
            f"`warm_up` ends its stages at steps {steps}: they must be positive and ascend, for "
            "example `[(100, 0.25), (200, 0.05)]`."
        )
    shares = [sparse.check_density(share, "warm_up") for _, share in warm_up]
    return [*zip(steps, shares, strict=True), (-1, density)]


def _check_inner_ranks(names: tuple[Hashable, ...], inner: int | None) -> None:
    if inner is None:
        return
    size = jax.lax.axis_size(names[1])
    if size != inner:
        raise ValueError(
            f"`inner_ranks` of `top_k` is {inner}, but axis `{names[1]}` has {size} ranks: "
            f"residuals were cut for {inner}. Make the exchange with `inner_ranks={size}` and its "
            "state again; what was not sent yet is lost."
        )
