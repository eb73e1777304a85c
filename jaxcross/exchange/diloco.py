"""DiLoCo: ranks train alone, and an outer optimizer steps on how far they went."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.rounds import (
    copied,
    end_round,
    model_of,
    next_in_round,
    outer_step,
    pseudo_gradient,
)
from jaxcross.exchange.validation import mean_of, optimizer_in, require_params, whole_number


class DiLoCoState(NamedTuple):
    """State of DiLoCo.

    Attributes:
        since: Local steps since the last exchange, int32.
        anchor: Like the parameters, and the same bits on every rank: where this round began. The
            model to evaluate.
        outer: State of the outer optimizer, the same bits on every rank.
        inner: State of this rank's own optimizer.
    """

    since: jax.Array
    anchor: optax.Params
    outer: optax.OptState
    inner: optax.OptState

    rank_local = RankLocal(model=("inner",), maybe_empty=("outer", "inner"))

    def model(self, params: optax.Params) -> optax.Params:
        """Returns the model to evaluate: the anchor."""
        return model_of(self.anchor, params)


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    axes: Axes,
    *,
    every: int,
) -> optax.GradientTransformationExtraArgs:
    """Takes `every` local steps on each rank, then one step of `outer` on the mean way that the
    ranks went back.

    At the end of a round with the anchor `a` and this rank's parameters `x`, `outer` steps from `a`
    on the pseudo-gradient `mean_over_ranks(a - x)`, and every rank goes on from the result, which
    is the next anchor. With `outer=optax.sgd(1.0)` that is the mean of the parameters, as
    `local_sgd` makes it without an anchor.

    Parameters differ between ranks within a round, and after it by one rounding. The inner
    optimizer's state is this rank's own, never averaged: save it, and the parameters, per rank. The
    anchor (`state.anchor`) is the model to evaluate; `jaxcross.exchange.finish` returns it. Every
    rank must begin with the same parameters. Deterministic.

    ```python
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jaxcross.exchange.diloco(optax.adamw(4e-4), outer, "batch", every=100)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        inner: Steps on this rank's gradients.
        outer: Steps on the pseudo-gradient, once a round; a schedule in it counts rounds.
        axes: One axis name, or a tuple of several that count as one.
        every: Steps of a round; the first exchange is in step `every`. If `inner` is SGD with
            momentum 0.9, rounds of less than 7 steps diverge at many rates with the outer optimizer
            above: take more, or momentum 0.5 in it.

    Raises:
        ValueError: `every` is not a positive whole number, or `inner` or `outer` is not an
            optimizer; `update` got no `params`.

    Memory above the inner optimizer's: the anchor and the outer state, twice the parameters with
    momentum.

    Bytes that a rank receives: `2(P-1)/P` times those of the parameters at an exchange, 0
    otherwise.

    Making it and `init` do not communicate; `update` does, in every `every`-th step, over its axes,
    and every rank calls it in the same step.

    Source: Douillard et al., arXiv 2311.08105, algorithm 1.
    """
    every = whole_number(every, "every", "`diloco`")
    names = axis_names(axes)
    local, beyond = optimizer_in(inner, "`diloco`"), optimizer_in(outer, "`diloco`")

    def init(params: optax.Params) -> DiLoCoState:
        return DiLoCoState(
            jnp.zeros((), jnp.int32), copied(params), beyond.init(params), local.init(params)
        )

    def merge(
        mine: optax.Params, state: tuple[optax.Params, optax.OptState]
    ) -> tuple[optax.Params, tuple[optax.Params, optax.OptState]]:
        anchor, outer_state = state
        gradient = mean_of(pseudo_gradient(anchor, mine), names)
        anchor, outer_state = outer_step(beyond, gradient, anchor, outer_state)
        return anchor, (anchor, outer_state)

    def update(
        updates: optax.Updates, state: DiLoCoState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, DiLoCoState]:
        params = require_params(params, "`diloco`")
        updates, inner_state = local.update(updates, state.inner, params, **extra)
        since = next_in_round(state.since, every)
        updates, (anchor, outer_state) = end_round(
            since, every, merge, updates, params, (state.anchor, state.outer)
        )
        return updates, DiLoCoState(since, anchor, outer_state, inner_state)

    return exchange_once("diloco", names, optax.GradientTransformationExtraArgs(init, update))  # pyright: ignore[reportArgumentType]
