"""Refuses to exchange a leaf twice over one axis: after another exchange, or inside the optimizer
of one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import optax

from jaxcross._tracing import Tracing, current_tracing
from jaxcross.exchange import collectives


def exchange_once(
    by: str,
    axes: collectives.Axes,
    exchange: optax.GradientTransformation,
    *,
    weighs: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wraps `exchange`, named `by`, so that it refuses leaves that another exchange has just
    returned over one of its axes, and refuses to run in the optimizer of one. It also refuses a
    `weight`, unless it `weighs` by it.

    The first is two strategies in a chain whose masks overlap. Neither what was computed with in
    between is recognised nor a mean that the step makes itself, which may be on purpose. Costs
    nothing at run time.

    Raises:
        ValueError: When jaxcross traces the step, before the first one and on every rank. In a
            trace of JAX's own (`vmap`, `pmap`, `shard_map`) only the weight is checked.
    """
    names = frozenset(collectives.axis_names(axes))
    exchange = optax.with_extra_args_support(exchange)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        if not weighs and extra.get("weight") is not None:
            raise ValueError(
                f"`{by}` was given a `weight`, but all ranks count alike in what it exchanges. "
                "Only `mean` weighs by it, also inside `accumulate`: use one of these, or leave "
                "`weight` out."
            )
        trace = current_tracing()
        if trace is None:
            return exchange.update(updates, state, params, **extra)
        _check_outer(trace, by, names)
        _check_leaves(trace, by, names, updates)
        given = {id(leaf) for leaf in jax.tree.leaves(updates)}
        trace.running.append((by, names))
        try:
            out, state = exchange.update(updates, state, params, **extra)
        finally:
            trace.running.pop()
        for leaf in jax.tree.leaves(out):
            if id(leaf) not in given and isinstance(
                leaf, jax.Array
            ):  # a leaf that came back unchanged is not a result
                trace.note_exchanged(leaf, by, names)
        return out, state

    return optax.GradientTransformationExtraArgs(exchange.init, update)


def _check_outer(trace: Tracing, by: str, axes: frozenset[Hashable]) -> None:
    for outer, theirs in trace.running:
        if (
            theirs <= axes
        ):  # over a part of its axes is another matter: a mean in the node, every step
            raise ValueError(
                f"`{by}` is inside the optimizer of `{outer}`, and both exchange over "
                f"{_names(theirs)}. A leaf is exchanged once: leave one of the two out."
            )


def _check_leaves(
    trace: Tracing, by: str, axes: frozenset[Hashable], updates: optax.Updates
) -> None:
    for path, leaf in jax.tree.leaves_with_path(updates):
        earlier = trace.exchanged(leaf)
        if earlier is not None and (shared := earlier.axes & axes):
            raise ValueError(
                f"`{by}` is given the leaf `{jax.tree_util.keystr(path)}`, which `{earlier.by}` "
                f"has exchanged over {_names(shared)} already. A leaf is exchanged once: let the "
                "masks of `optax.masked` not overlap, or leave one of the two out."
            )


def _names(axes: frozenset[Hashable]) -> str:
    return ", ".join(f"`{axis}`" for axis in sorted(axes, key=str))
