"""Sharded optimizer (ZeRO stage 1): every rank stores state for 1/P of each parameter and steps it.

When gradients are simply averaged, all ranks hold the same optimizer state and compute the same
update. Here, a reduce-scatter gives each rank the mean gradient of just its own part. The rank then
steps the optimizer on that part, and an all-gather distributes the updates. Together, the two
transfer as many bytes as an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from jaxcross.exchange import collectives, layouts
from jaxcross.exchange.arithmetic import accumulation_dtype
from jaxcross.exchange.elementwise import check_elementwise
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import PerRankState
from jaxcross.exchange.validation import check_state, optimizer_in, whole_number


def sharded_optimizer(
    optimizer: optax.GradientTransformation,
    axes: collectives.Axes,
    *,
    ranks: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages and steps only this rank's part of each leaf, then gathers the updates.

    Up to rounding, this is equivalent to synchronous training with `mean` in front of `optimizer`,
    but takes only 1/P of the optimizer's state and work per rank. Every leaf is cut into P equal,
    zero-padded parts. Updates are bitwise identical on every rank. Deterministic.

    Each rank only holds the state of its own part, wrapped in a `PerRankState`. Save it per rank,
    and never load it on a different number of ranks.

    The optimizer must work elementwise (SGD, momentum, Adam, AdamW, RMSProp, clipping by value),
    because all it gets to see are flat parts of the leaves. We verify this from its jaxpr, and
    raise an error if the optimizer takes norms over a layer or over all layers (LARS, LAMB,
    `optax.clip_by_global_norm`), draws noise, or depends on shapes (e.g. through a `mask` function
    that looks at them; pass a tree of booleans instead).

    ```python
    tx = jaxcross.exchange.sharded_optimizer(optax.adam(1e-3), "batch", ranks=world.size)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's part.
        axes: One axis name. Several raise an error.
        ranks: Size of the axis. Only needed for calling `init` outside of the step, where the axis
            isn't bound.

    Raises:
        ValueError: `ranks` is not a whole number. In `init`, the axis is not bound and `ranks` is
            not given, or the optimizer's initial state depends on the parameters' values, in which
            case `init` would need to know this rank's part of them. At the first trace, `ranks` is
            not the axis's size, the optimizer does not work element by element, or the state's
            shapes differ from those `init` would create, because it was made for a different number
            of ranks.

    Bytes received per rank: `(P-1)/P D` elements of the gradients' type plus the same number of the
    updates' type, where D is the number of elements after padding each leaf to a multiple of P.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Langer et al., arXiv 2007.03970, section 3.4 (a parameter server distributed over as
    many servers as workers); Rajbhandari et al., arXiv 1910.02054 (ZeRO stage 1, which shards the
    optimizer's state).
    """
    axis = collectives.one_axis(axes, "`sharded_optimizer`")
    ranks = None if ranks is None else whole_number(ranks, "ranks", "`sharded_optimizer`")
    inner = optimizer_in(optimizer, "`sharded_optimizer`")

    def init(params: optax.Params) -> PerRankState:
        bound = _bound_size(axis)
        size = _axis_size(ranks, bound)
        if bound is not None:
            rank = jax.lax.axis_index(axis)
            return PerRankState(inner.init(jax.tree.map(lambda x: _part(x, size, rank), params)))
        parts = jax.tree.map(lambda x: _part(jnp.asarray(x), size, 0), params)
        if _reads_values(inner.init, parts):
            raise ValueError(
                "the optimizer of `sharded_optimizer` initializes its state from the parameters' "
                "values, but outside of a step, a rank does not know which part of them is its "
                f"own. Call `tx.init` inside a step in which axis `{axis}` is bound."
            )
        return PerRankState(inner.init(parts))

    def update(
        updates: optax.Updates,
        state: PerRankState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, PerRankState]:
        size = _axis_size(ranks, jax.lax.axis_size(axis))
        rank = jax.lax.axis_index(axis)
        leaves, treedef = jax.tree.flatten(updates)
        shapes = [x.shape for x in leaves]
        parts = None if params is None else jax.tree.map(lambda x: _part(x, size, rank), params)
        mean = _mean_parts(leaves, axis)
        whole = [
            jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, mean, strict=True)
        ]
        mean, whole = (jax.tree.unflatten(treedef, x) for x in (mean, whole))
        own = state.per_rank
        check_state(own, inner.init, mean if parts is None else parts, "`sharded_optimizer`")
        check_elementwise(
            inner, (whole, params), (mean, parts), own, "`sharded_optimizer`", axis=axis, **extra
        )
        stepped, own = inner.update(mean, own, parts, **extra)
        out = jax.tree.unflatten(treedef, _gather(treedef.flatten_up_to(stepped), shapes, axis))
        return out, PerRankState(own)

    return exchange_once(
        "sharded_optimizer",
        axes,
        optax.GradientTransformationExtraArgs(init, update),  # pyright: ignore[reportArgumentType]
    )


def _part(leaf: jax.Array, size: int, rank: jax.typing.ArrayLike) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(layouts.leaf_blocks(leaf, size), rank, keepdims=False)


def _mean_parts(leaves: Sequence[jax.Array], axis: Hashable) -> list[jax.Array]:
    """Returns this rank's part of each leaf's mean, with one reduce-scatter per element type.

    16-bit floats are summed in float32.
    """
    size = jax.lax.axis_size(axis)
    out: list[Any] = [None] * len(leaves)
    for dtype, members in layouts.group_by_dtype(leaves).items():
        rows = (
            layouts.to_blocks([leaves[i] for i in members], size, dtype)
            .reshape(-1)
            .astype(accumulation_dtype(dtype))
        )
        mine = (collectives.sum_scatter(rows, axis, wire_dtype=dtype) / size).astype(
            jnp.result_type(dtype, float)
        )
        for i, x in zip(
            members,
            layouts.block_columns(mine, [leaves[i].shape for i in members], size),
            strict=True,
        ):
            out[i] = x
    return out


def _gather(
    parts: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]], axis: Hashable
) -> list[jax.Array]:
    """Reassembles whole leaves of these shapes, with one all-gather per element type."""
    out: list[Any] = [None] * len(parts)
    for members in layouts.group_by_dtype(parts).values():
        rows = collectives.gather(jnp.concatenate([parts[i] for i in members]), axis)
        for i, x in zip(
            members, layouts.from_blocks(rows, [shapes[i] for i in members]), strict=True
        ):
            out[i] = x
    return out


def _bound_size(axis: Hashable) -> int | None:
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        return None


def _axis_size(ranks: int | None, bound: int | None) -> int:
    if ranks is None and bound is None:
        raise ValueError(
            "`init` of `sharded_optimizer` was called outside of a step, where it does not know "
            "how many parts to create. Pass `ranks=`, the size of the axis, for example "
            "`jaxcross.initialize().size`."
        )
    if ranks is not None and bound is not None and ranks != bound:
        raise ValueError(
            f"`ranks` of `sharded_optimizer` is {ranks}, but the axis has {bound}: parameters and "
            "the optimizer's state are split into as many parts as there are ranks. Create the "
            f"exchange with `ranks={bound}`, and create its state again."
        )
    return bound if ranks is None else ranks  # pyright: ignore[reportReturnType]


def _reads_values(init: Callable[[optax.Params], optax.OptState], params: optax.Params) -> bool:
    """Whether the result of `init` depends on actual values, and not just on shapes and types."""
    jaxpr = jax.make_jaxpr(init)(params).jaxpr
    tainted = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(v in tainted for v in eqn.invars if not isinstance(v, Literal)):
            tainted.update(eqn.outvars)
    return any(v in tainted for v in jaxpr.outvars if not isinstance(v, Literal))
