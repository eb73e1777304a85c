"""Rounds of local steps: each rank trains alone, and the parameters are merged at a round's end.

`local_sgd`, `diloco` and `sparse_loco` differ in what they merge: each brings its own `merge`.
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
    """Returns the number of local steps since the last merge, this one included; 0 where this step
    merges.

    A round that has begun with a larger `every`, before a restart, may be too long already: it ends
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
    """Returns updates to the merged parameters where a round ends, else `updates` and `state` as
    they are.

    The host knows the counter, so that a step within a round exchanges nothing.

    Args:
        since: What `next_in_round` returned.
        every: Steps of a round.
        merge: (this rank's parameters after its local step, `state`) -> the parameters to go on
            with, and the next state. Exchanges.
        updates: Of this rank's own optimizer.
        params: Before the step.
        state: Arrays that only a merge changes.
    """

    def end() -> tuple[optax.Updates, State]:
        targets, merged = merge(optax.apply_updates(params, updates), state)
        return updates_towards(updates, params, targets), jax.tree.map(typed_like, merged, state)

    return end() if every == 1 else jax.lax.cond(since == 0, end, lambda: (updates, state))


def pseudo_gradient(anchor: optax.Params, mine: optax.Params) -> optax.Updates:
    """Returns how far this rank has gone from where the round began, backwards: a gradient to the
    outer optimizer.

    Leaves that are not floating-point give zeros.
    """
    return jax.tree.map(lambda a, x: a - x if is_float(x) else jnp.zeros_like(x), anchor, mine)


def outer_step(
    outer: optax.GradientTransformationExtraArgs,
    gradient: optax.Updates,
    anchor: optax.Params,
    state: optax.OptState,
) -> tuple[optax.Params, optax.OptState]:
    """Returns the anchor that the outer optimizer makes of a pseudo-gradient, and the optimizer's
    next state.
    """
    updates, state = outer.update(gradient, state, anchor)
    return optax.apply_updates(anchor, updates), state


def model_of(anchor: optax.Params, params: optax.Params) -> optax.Params:
    """Returns the model to evaluate: the anchor, with this rank's own leaves where they are not
    floating-point.
    """
    return jax.tree.map(lambda a, x: a if is_float(x) else x, anchor, params)


def copied(params: optax.Params) -> optax.Params:
    """Returns a copy: an array that is parameter and anchor at once could not be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)
