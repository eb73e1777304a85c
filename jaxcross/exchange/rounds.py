"""Rounds of local steps: each rank trains independently, and a merge ends the round.

`local_sgd`, `diloco` and `sparse_loco` differ only in what they merge, so each brings its own
`merge`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange.validation import is_float, typed_like, updates_towards

State = TypeVar("State")


def next_in_round(since: jax.Array, every: int) -> jax.Array:
    """Returns the number of local steps since the last merge, including this one; 0 if it merges.

    If a restart has made `every` smaller, the current round may already be too long. It then ends
    in this step.
    """
    return jnp.where(since + 1 >= every, 0, since + 1)


def end_round(
    since: jax.Array,
    every: int,
    merge: Callable[[optax.Params, State], tuple[optax.Params, State]],
    updates: optax.Updates,
    params: optax.Params,
    state: State,
) -> tuple[optax.Updates, State]:
    """Returns updates that lead to the merged parameters if a round ends in this step.

    Otherwise, returns `updates` and `state` unchanged. The host knows the counter, so a step within
    a round exchanges nothing.

    Args:
        since: What `next_in_round` returned.
        every: Steps per round.
        merge: (this rank's parameters after its local step, `state`) -> the parameters to continue
            with, and the next state. Communicates.
        updates: Updates of this rank's own optimizer.
        params: Parameters before the step.
        state: Arrays that only a merge changes.
    """

    def end() -> tuple[optax.Updates, State]:
        targets, merged = merge(optax.apply_updates(params, updates), state)
        return updates_towards(updates, params, targets), jax.tree.map(typed_like, merged, state)

    return end() if every == 1 else jax.lax.cond(since == 0, end, lambda: (updates, state))


def pseudo_gradient(anchor: optax.Params, mine: optax.Params) -> optax.Updates:
    """Returns the anchor minus this rank's parameters: a gradient for the outer optimizer.

    Leaves that are not floating-point give zeros.
    """
    return jax.tree.map(lambda a, x: a - x if is_float(x) else jnp.zeros_like(x), anchor, mine)


def outer_step(
    outer: optax.GradientTransformationExtraArgs,
    gradient: optax.Updates,
    anchor: optax.Params,
    state: optax.OptState,
) -> tuple[optax.Params, optax.OptState]:
    """Returns the next anchor and the next state of the outer optimizer."""
    updates, state = outer.update(gradient, state, anchor)
    return optax.apply_updates(anchor, updates), state


def model_of(anchor: optax.Params, params: optax.Params) -> optax.Params:
    """Returns the model to evaluate: the anchor, with leaves that aren't floats from `params`."""
    return jax.tree.map(lambda a, x: a if is_float(x) else x, anchor, params)


def copied(params: optax.Params) -> optax.Params:
    """Returns a copy, because an array that is both parameter and anchor could not be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)
