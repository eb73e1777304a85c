"""Raises an error if a leaf would be exchanged twice over the same axis.

This happens if one exchange follows another, or if one runs inside the optimizer of the other.
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
    """Wraps a strategy (whose name is `by`) so that it refuses to exchange leaves a second time.

    The wrapped strategy raises an error in three cases:

    - One of its leaves is the direct result of another exchange over one of the same axes, e.g.
      because two strategies in a chain have overlapping masks.
    - It runs inside another strategy's optimizer and exchanges over all of that strategy's axes.
    - You pass it a `weight`, but it doesn't support weights (see the `weighs` flag).

    This doesn't catch every repeated exchange. We only recognise a leaf as long as it's the very
    array that the first exchange returned, which means that we lose track of it once it's scaled,
    for example. Means that your step computes itself are always allowed, since they may be
    intentional. All checks happen at trace time, so they're free at run time.

    Raises:
        ValueError: Raised on every rank while jaxcross traces the step, i.e. before the first step.
            If JAX itself does the tracing (`vmap`, `pmap`, `shard_map`), only the weight is
            checked.
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
                f"`{by}` was given a `weight`, but its exchange gives all ranks the same weight. "
                "Only `mean` uses weights, by itself or inside `accumulate`. Use one of these, or "
                "leave `weight` out."
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
            # Leaves that come back unchanged haven't been exchanged.
            if id(leaf) not in given and isinstance(leaf, jax.Array):
                trace.note_exchanged(leaf, by, names)
        return out, state

    return optax.GradientTransformationExtraArgs(exchange.init, update)


def _check_outer(trace: Tracing, by: str, axes: frozenset[Hashable]) -> None:
    for outer, theirs in trace.running:
        # Exchanging over just some of the outer axes is fine, e.g. to take a mean within the node.
        if theirs <= axes:
            raise ValueError(
                f"`{by}` is inside the optimizer of `{outer}`, and both exchange over "
                f"{quoted(sorted(theirs, key=str))}. A leaf may be exchanged only once: leave "
                "one of the two out."
            )


def _check_leaves(
    trace: Tracing, by: str, axes: frozenset[Hashable], updates: optax.Updates
) -> None:
    for path, leaf in jax.tree.leaves_with_path(updates):
        earlier = trace.exchanged(leaf)
        if earlier is None:
            continue
        shared = earlier.axes & axes
        if shared:
            raise ValueError(
                f"`{by}` is given the leaf `{jax.tree_util.keystr(path)}`, which `{earlier.by}` "
                f"has exchanged over {quoted(sorted(shared, key=str))} already. A leaf may "
                "be exchanged only once: make sure that the masks of `optax.masked` don't overlap, "
                "or leave one of the two out."
            )
