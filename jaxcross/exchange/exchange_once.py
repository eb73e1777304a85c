"""Refuses to exchange a leaf twice over the same axis.

This happens if two exchanges follow each other, or if one is inside the optimizer of another.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import optax

from jaxcross._tracing import Tracing, current_tracing
from jaxcross.errors import quoted
from jaxcross.exchange import collectives


def exchange_once(
    by: str,
    axes: collectives.Axes,
    exchange: optax.GradientTransformation,
    *,
    weighs: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wraps the strategy `exchange`, called `by`, so that it refuses to exchange leaves again.

    It raises if a leaf is the direct result of another exchange over one of its axes (two
    strategies in a chain whose masks overlap), and if it runs inside the optimizer of another
    strategy and exchanges over all of that strategy's axes. It also raises if it's passed a
    `weight`, unless `weighs` says that the strategy uses it.

    It doesn't detect a leaf that was changed after the first exchange, nor a mean that the step
    computes itself, which may be intentional. Costs nothing at run time.

    Raises:
        ValueError: When jaxcross traces the step, before the first step and on every rank. If JAX
            itself traces (`vmap`, `pmap`, `shard_map`), only the weight is checked.
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
            # A leaf that is returned unchanged was not exchanged.
            if id(leaf) not in given and isinstance(leaf, jax.Array):
                trace.note_exchanged(leaf, by, names)
        return out, state

    return optax.GradientTransformationExtraArgs(exchange.init, update)


def _check_outer(trace: Tracing, by: str, axes: frozenset[Hashable]) -> None:
    for outer, theirs in trace.running:
        # Exchanging over only some of the outer axes is fine, e.g. a mean within the node.
        if theirs <= axes:
            raise ValueError(
                f"`{by}` is inside the optimizer of `{outer}`, and both exchange over "
                f"{quoted(sorted(theirs, key=str))}. A leaf is exchanged once: leave one of the "
                "two out."
            )


def _check_leaves(
    trace: Tracing, by: str, axes: frozenset[Hashable], updates: optax.Updates
) -> None:
    for path, leaf in jax.tree.leaves_with_path(updates):
        earlier = trace.exchanged(leaf)
        if earlier is not None and (shared := earlier.axes & axes):
            raise ValueError(
                f"`{by}` is given the leaf `{jax.tree_util.keystr(path)}`, which `{earlier.by}` "
                f"has exchanged over {quoted(sorted(shared, key=str))} already. A leaf is "
                "exchanged once: let the masks of `optax.masked` not overlap, or leave one of the "
                "two out."
            )
