"""Rounds of local steps: each rank trains independently, and a merge ends the round.

With six of our strategies, every rank trains by itself for a few steps, and then the ranks'
parameters are merged: `local_sgd`, `diloco`, `sparse_loco`, `elastic_average`, `federated_average`
and `no_loco`. They only differ in how they merge, so they all call `local_rounds` and supply a
merge function of their own.

**Steps that don't exchange.** Most steps only train, and mustn't cost any communication, not even a
message to find out whether it's time to merge. So each step branches on a counter in the state. The
host can compute the counter, so it knows the branch before the step begins, and runs a program that
contains no exchange.

Some strategies have several possible merges, e.g. `no_loco` has one for each pairing of the ranks.
They must choose among these by arithmetic that the host can repeat, so that the host knows the
choice in advance as well.

**Merging through updates.** An optax transformation returns updates, so a merge can't replace the
parameters. It returns the difference between the merged parameters and those from before the step.
When optax adds this difference, the sum is rounded. The parameters from before the step differ
between ranks, so the rounding does, too.

That's why parameters may differ by one rounding after a merge, even if all ranks have computed the
same target. Strategies that need a model that is bitwise identical on every rank keep a copy of it
in the state, called the anchor or the centre.

**The end of a job.** A job may end between two merges, when every rank has its own parameters.
`finish` returns the parameters that should be evaluated as the result of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcross.checkpoint import declared
from jaxcross.exchange.arithmetic import is_float, typed_like, updates_towards
from jaxcross.exchange.collectives import Axes
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.validation import require_params

State = Any
"""A strategy's state: a `NamedTuple` with `since`, `inner`, and the arrays that the merge uses."""

Merge = Callable[[optax.Updates, optax.Params, State], tuple[optax.Updates, State]]
"""(updates of the local step, parameters before it, state) -> updates and state after a merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The round that a step belongs to.

    Attributes:
        merges: The merges that may end the round. If there are several, `chosen` selects one.
        chosen: Index into `merges`, int32, computed such that the host can follow.
        taking_part: Whether this rank trains in this round. If it doesn't, its updates are zero,
            and its optimizer's state doesn't change. If None, all ranks train.
    """

    merges: Sequence[Merge]
    chosen: jax.Array | None = None
    taking_part: jax.Array | None = None


def local_rounds(
    name: str,
    axes: Axes,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    every: int,
    init: Callable[[optax.Params], State],
    begin: Callable[[State, optax.Params], Round],
) -> optax.GradientTransformationExtraArgs:
    """Returns a strategy that takes local steps, and merges on every `every`-th of them.

    The host knows the counter `since`, so a step within a round exchanges nothing.

    Args:
        name: The strategy's name.
        axes: The axes that merges communicate over.
        optimizer: Takes the local steps.
        every: Steps per round.
        init: Creates the state. In addition to the strategy's own fields, the state has `since`
            (the local steps since the last merge) and `inner` (the optimizer's state). If it has a
            field `round`, rounds are counted in it.
        begin: Returns the current round. Called on every step, before the local step. The merges
            get a state in which `since`, `inner` and `round` are None, because only `local_rounds`
            changes these.
    """

    def update(
        updates: optax.Updates, state: State, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, State]:
        params = require_params(params, f"`{name}`")
        this_round = begin(state, params)
        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        if this_round.taking_part is not None:
            # In federated averaging, some ranks pause for a round. All ranks run the same program,
            # so a rank that pauses computes the local step as well, and we discard its result here.
            paused = jax.tree.map(jnp.zeros_like, updates), state.inner
            updates, inner = jax.tree.map(
                partial(jnp.where, this_round.taking_part), (updates, inner), paused
            )
        since = next_in_round(state.since, every)
        counts_rounds = "round" in state._fields
        # We hide the fields that change on every step from the merge. Otherwise, they'd be results
        # of the conditional that decides whether to merge, although no branch of it changes them.
        own = state._replace(since=None, inner=None, **({"round": None} if counts_rounds else {}))
        updates, own = _merged(this_round, since, every, updates, params, own)
        if counts_rounds:
            own = own._replace(round=state.round + (since == 0))
        return updates, own._replace(since=since, inner=inner)

    return exchange_once(name, axes, optax.GradientTransformationExtraArgs(init, update))  # pyright: ignore[reportArgumentType]


def next_in_round(since: jax.Array, every: int) -> jax.Array:
    """Returns the number of local steps since the last merge, including this one; 0 if it merges.

    If a restart has reduced `every`, the current round may already be too long. It then ends on
    this step.
    """
    return jnp.where(since + 1 >= every, 0, since + 1)


def to_merged(merge: Callable[[optax.Params, State], tuple[optax.Params, State]]) -> Merge:
    """Returns a merge whose updates lead to the merged parameters.

    Args:
        merge: (this rank's parameters after its local step, state) -> the parameters to continue
            with, and the next state. Communicates.
    """

    def merged(
        updates: optax.Updates, params: optax.Params, state: State
    ) -> tuple[optax.Updates, State]:
        targets, state = merge(optax.apply_updates(params, updates), state)
        return updates_towards(updates, params, targets), state

    return merged


def _merged(
    this_round: Round,
    since: jax.Array,
    every: int,
    updates: optax.Updates,
    params: optax.Params,
    state: State,
) -> tuple[optax.Updates, State]:
    def end(merge: Merge) -> tuple[optax.Updates, State]:
        moved, merged = merge(updates, params, state)
        return moved, jax.tree.map(typed_like, merged, state)

    def unchanged() -> tuple[optax.Updates, State]:
        return updates, state

    if this_round.chosen is not None:
        # If there are several possible merges, a single `switch` decides both whether to merge on
        # this step and which merge to use. The host can compute the index of the branch in advance,
        # and then runs a program in which only the chosen merge communicates.
        branches = [unchanged, *(partial(end, merge) for merge in this_round.merges)]
        return jax.lax.switch(jnp.where(since == 0, this_round.chosen + 1, 0), branches)
    (merge,) = this_round.merges
    return end(merge) if every == 1 else jax.lax.cond(since == 0, partial(end, merge), unchanged)


def pseudo_gradient(anchor: optax.Params, mine: optax.Params) -> optax.Updates:
    """Returns the anchor minus this rank's parameters: a gradient for the outer optimizer.

    For leaves that aren't floating-point, the result is zero.
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
    """Returns a copy, because an array that's both parameter and state couldn't be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)


def finish(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """Returns the model that all ranks agree on, for a job that ended, stopped or was pruned.

    For optimizers that keep a shared copy of the parameters, called the anchor (`diloco`,
    `streaming_diloco` and `sparse_loco`), the anchor is the model. If the job has ended between two
    exchanges, the steps since the last exchange aren't part of the anchor and are dropped.
    Exchanges that aren't complete are dropped as well.

    For all other optimizers, the model is the parameters. With `delayed_mean`, the gradient of the
    last step hasn't been applied to them yet, and is dropped.

    Some optimizers never make the parameters equal on all ranks (`no_loco`, `gossip` and
    `elastic_average`), and `local_sgd` and `federated_average` make them equal only at the end of a
    round. In these cases, every rank gets its own parameters. The model to evaluate is then their
    mean over ranks or, for `elastic_average`, the centre in its state.

    You don't need `finish` to resume a job, because the job simply continues from its state.

    ```python
    model = jaxcross.exchange.finish(state.params, state.opt_state)
    ```

    Args:
        params: Parameters of the job's latest state.
        opt_state: Optimizer state of the same job state. The strategy's state may be nested in
            others, as in `optax.chain`.

    Returns:
        A tree like `params`. With the three strategies named first, its floating-point leaves are
            bitwise identical on every rank. All other leaves are those of `params`.

    Raises:
        ValueError: Two strategies in `opt_state` keep an anchor.

    Does not communicate and does not wait.
    """
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_anchored) if _anchored(node)]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} strategies in the optimizer's state keep an anchor each, and `finish` "
            "cannot know which of these is the model. Call it with the state of a single strategy."
        )
    return found[0].model(params) if found else params


def _anchored(node: object) -> bool:
    """Whether a node is the state of a strategy whose model isn't the parameters."""
    kind = type(node)
    return declared(kind) is not None and callable(getattr(kind, "model", None))
