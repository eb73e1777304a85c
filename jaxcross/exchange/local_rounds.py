"""Rounds of local steps: ranks train independently until a merge ends the round.

In six of our strategies, every rank trains by itself for a few steps before the ranks' parameters
are merged: `local_sgd`, `diloco`, `sparse_loco`, `elastic_average`, `federated_average` and
`no_loco`. They only differ in the merge itself, so each of them calls `local_rounds` with its own
merge function.

**Steps that don't exchange.** Most steps only train and must not communicate at all, not even to
find out whether it's time to merge. So each step branches on a counter in the state that the host
can compute too. This means that the host knows the branch before the step starts, and runs a
program that doesn't contain any exchange.

Some strategies have several possible merges (`no_loco` has one per pairing of the ranks). To choose
between them, they have to use arithmetic that the host can replicate, so that it knows the choice
in advance as well.

**Merging through updates.** An optax transformation returns updates, so a merge can't simply
replace the parameters. Instead, it returns the difference between the merged parameters and those
from before the step. optax rounds when it adds this difference, and since every rank starts from
different parameters, they all round differently.

As a result, parameters can be off by a rounding error after a merge, even though all ranks computed
the same target. Strategies that need a model that's bitwise identical on every rank keep a copy of
it in the state, called the anchor or the centre.

**The end of a job.** A job can end between two merges, while the ranks' parameters differ. `finish`
returns the parameters to evaluate as the job's result.
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
"""A strategy's state: a `NamedTuple` with `since`, `inner`, and whatever arrays the merge needs."""

Merge = Callable[[optax.Updates, optax.Params, State], tuple[optax.Updates, State]]
"""(updates of the local step, parameters before it, state) -> updates and state after a merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The round that a step belongs to.

    Attributes:
        merges: The merges that can end the round. If there are several, `chosen` selects one.
        chosen: Index into `merges`, int32, computed in a way that the host can replicate.
        taking_part: Whether this rank trains in this round. If it doesn't, its updates are zero and
            its optimizer's state stays the same. If None, all ranks train.
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
    """Returns a strategy that takes local steps and merges on every `every`-th of them.

    Since the host knows the counter `since`, steps within a round don't exchange anything.

    Args:
        name: The strategy's name.
        axes: The axes that merges communicate over.
        optimizer: Takes the local steps.
        every: Steps per round.
        init: Creates the state. Besides the strategy's own fields, the state has `since` (local
            steps since the last merge) and `inner` (the optimizer's state). If it has a `round`
            field, that counts the rounds.
        begin: Returns the current round. Called on every step, ahead of the local step. Merges see
            a state in which `since`, `inner` and `round` are None, because only `local_rounds` may
            change those.
    """

    def update(
        updates: optax.Updates, state: State, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, State]:
        params = require_params(params, f"`{name}`")
        this_round = begin(state, params)
        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        if this_round.taking_part is not None:
            # In federated averaging, some ranks sit out a round. All ranks run the same program, so
            # those ranks compute the local step too, and we throw away the result here.
            paused = jax.tree.map(jnp.zeros_like, updates), state.inner
            updates, inner = jax.tree.map(
                partial(jnp.where, this_round.taking_part), (updates, inner), paused
            )
        since = next_in_round(state.since, every)
        counts_rounds = "round" in state._fields
        # Hide the fields that change on every step from the merge. Otherwise they'd become outputs
        # of the conditional that decides whether to merge, even though none of its branches changes
        # them.
        own = state._replace(since=None, inner=None, **({"round": None} if counts_rounds else {}))
        updates, own = _merged(this_round, since, every, updates, params, own)
        if counts_rounds:
            own = own._replace(round=state.round + (since == 0))
        return updates, own._replace(since=since, inner=inner)

    return exchange_once(name, axes, optax.GradientTransformationExtraArgs(init, update))  # pyright: ignore[reportArgumentType]


def next_in_round(since: jax.Array, every: int) -> jax.Array:
    """Returns the local steps since the last merge, including this step; 0 if it merges.

    If a restart has lowered `every`, the current round may be too long by now, in which case it
    ends on this step.
    """
    return jnp.where(since + 1 >= every, 0, since + 1)


def to_merged(merge: Callable[[optax.Params, State], tuple[optax.Params, State]]) -> Merge:
    """Returns a merge whose updates take us to the merged parameters.

    Args:
        merge: (this rank's parameters after its local step, state) -> the parameters to continue
            from, and the next state. Communicates.
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
        # With several possible merges, a single `switch` decides both whether to merge on this step
        # and which merge to use. The host can compute the branch index in advance, and runs a
        # program in which only the chosen merge communicates.
        branches = [unchanged, *(partial(end, merge) for merge in this_round.merges)]
        return jax.lax.switch(jnp.where(since == 0, this_round.chosen + 1, 0), branches)
    (merge,) = this_round.merges
    return end(merge) if every == 1 else jax.lax.cond(since == 0, partial(end, merge), unchanged)


def pseudo_gradient(anchor: optax.Params, mine: optax.Params) -> optax.Updates:
    """Returns the anchor minus this rank's parameters, i.e. the outer optimizer's gradient.

    Leaves that aren't floating-point yield zero.
    """
    return jax.tree.map(lambda a, x: a - x if is_float(x) else jnp.zeros_like(x), anchor, mine)


def outer_step(
    outer: optax.GradientTransformationExtraArgs,
    gradient: optax.Updates,
    anchor: optax.Params,
    state: optax.OptState,
) -> tuple[optax.Params, optax.OptState]:
    """Returns the next anchor and the outer optimizer's next state."""
    updates, state = outer.update(gradient, state, anchor)
    return optax.apply_updates(anchor, updates), state


def model_of(anchor: optax.Params, params: optax.Params) -> optax.Params:
    """Returns the model to evaluate: the anchor, with any non-float leaves taken from `params`."""
    return jax.tree.map(lambda a, x: a if is_float(x) else x, anchor, params)


def copied(params: optax.Params) -> optax.Params:
    """Returns a copy, since an array that's both parameter and state couldn't be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)


def finish(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """Returns the model that all ranks agree on, once a job has ended, stopped or been pruned.

    For `diloco`, `streaming_diloco` and `sparse_loco`, the model is the anchor, a copy of the
    parameters that all ranks share. If the job ended between two exchanges, any steps since the
    last exchange are lost, and so are any incomplete exchanges.

    For all other optimizers, the model is simply the parameters. With `delayed_mean`, the last
    step's gradient hasn't been applied to them yet, so it's lost.

    Some optimizers never make the parameters equal on all ranks (`no_loco`, `gossip` and
    `elastic_average`), or only do so at the end of a round (`local_sgd` and `federated_average`).
    In those cases, every rank gets its own parameters. The model to evaluate is then their mean
    over ranks or, for `elastic_average`, the centre in its state.

    There's no need to call `finish` to resume a job, because it just picks up from its state.

    ```python
    model = jaxcross.exchange.finish(state.params, state.opt_state)
    ```

    Args:
        params: Parameters of the job's latest state.
        opt_state: Optimizer state from the same job state. The strategy's state may be nested
            inside others, as in `optax.chain`.

    Returns:
        A tree like `params`. With the three strategies named first, its floating-point leaves are
            bitwise identical on every rank. All other leaves come from `params`.

    Raises:
        ValueError: Two strategies in `opt_state` keep an anchor.

    Does not communicate and does not wait.
    """
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_anchored) if _anchored(node)]
    if len(found) > 1:
        raise ValueError(
            f"`opt_state` of `finish` contains {len(found)} strategies with an anchor each, so "
            "`finish` cannot tell which anchor is the model. Call it with the state of a single "
            "strategy."
        )
    return found[0].model(params) if found else params


def _anchored(node: object) -> bool:
    """Whether a node is the state of a strategy whose model isn't just the parameters."""
    kind = type(node)
    return declared(kind) is not None and callable(getattr(kind, "model", None))
