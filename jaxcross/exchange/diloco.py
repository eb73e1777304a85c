"""DiLoCo: ranks train independently, and an outer optimizer steps on their mean parameter delta."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross.checkpoint import RankLocal
from jaxcross.exchange.arithmetic import mean_of
from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.local_rounds import (
    Round,
    copied,
    local_rounds,
    model_of,
    outer_step,
    pseudo_gradient,
    to_merged,
)
from jaxcross.exchange.validation import optimizer_in, whole_number


class DiLoCoState(NamedTuple):
    """State of DiLoCo.

    Attributes:
        since: Local steps since the last exchange, int32.
        anchor: The parameters at the start of this round, bitwise identical on every rank. This is
            the model to evaluate.
        outer: State of the outer optimizer, bitwise identical on every rank.
        inner: State of this rank's own optimizer.
    """

    since: jax.Array
    anchor: optax.Params
    outer: optax.OptState
    inner: optax.OptState

    rank_local = RankLocal(model=("inner",), maybe_empty=("outer", "inner"))

    def model(self, params: optax.Params) -> optax.Params:
        """Returns the model to evaluate, i.e. the anchor."""
        return model_of(self.anchor, params)


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    axes: Axes,
    *,
    every: int,
) -> optax.GradientTransformationExtraArgs:
    """Takes `every` local steps per rank, then one `outer` step on the mean of their deltas.

    All ranks start a round (the steps between two exchanges) from the same parameters, called the
    anchor, and drift apart until the round ends. The outer optimizer then takes one step from the
    anchor on the pseudo-gradient `mean_over_ranks(a - x)`, where `a` is the anchor and `x` are a
    rank's parameters. The result becomes the next anchor, from which every rank continues.

    With `outer=optax.sgd(1.0)`, the next anchor is just the mean of the ranks' parameters. In that
    case, use `local_sgd`, which doesn't need to store an anchor.

    Parameters differ between ranks within a round, and become equal (up to rounding) at the end of
    it. The inner optimizer's state is never averaged, so it always differs. Checkpoints must save
    this state and the parameters separately for each rank.

    The model to evaluate is the anchor (`state.anchor`), which is what `jaxcross.exchange.finish`
    returns. All ranks must start with the same parameters. Deterministic.

    ```python
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jaxcross.exchange.diloco(optax.adamw(4e-4), outer, "batch", every=100)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        inner: Steps on this rank's gradients.
        outer: Steps on the pseudo-gradient, once per round. If it contains a schedule, this counts
            rounds rather than steps.
        axes: One axis name, or a tuple of names that act as a single axis.
        every: Steps per round; the first exchange is on step `every`. If `inner` is SGD with
            momentum 0.9, rounds of less than 7 steps diverge at many learning rates with the outer
            optimizer above. Use longer rounds in that case, or an outer momentum of 0.5.

    Raises:
        ValueError: `every` is not a positive whole number, or `inner` or `outer` is not an
            optimizer; or `update` was called without `params`.

    On top of the inner optimizer's state, this needs memory for the anchor, i.e. a copy of the
    parameters, and for the outer optimizer's state. If the outer optimizer uses momentum, that's
    twice the size of the parameters in total.

    Bytes received per rank: `2(P-1)/P` times the size of the parameters on steps that exchange, 0
    otherwise.

    Communicates only in `update`, on every `every`-th step, over its axes. All ranks must call it
    on the same step.

    Source: Douillard et al., arXiv 2311.08105, algorithm 1.
    """
    every = whole_number(every, "every", "`diloco`")
    names = axis_names(axes)
    inner_optimizer = optimizer_in(inner, "`diloco`")
    outer_optimizer = optimizer_in(outer, "`diloco`")

    def init(params: optax.Params) -> DiLoCoState:
        return DiLoCoState(
            jnp.zeros((), jnp.int32),
            copied(params),
            outer_optimizer.init(params),
            inner_optimizer.init(params),
        )

    def merge(mine: optax.Params, state: DiLoCoState) -> tuple[optax.Params, DiLoCoState]:
        gradient = mean_of(pseudo_gradient(state.anchor, mine), names)
        anchor, outer_state = outer_step(outer_optimizer, gradient, state.anchor, state.outer)
        return anchor, state._replace(anchor=anchor, outer=outer_state)

    merges = [to_merged(merge)]
    return local_rounds(
        "diloco",
        names,
        inner_optimizer,
        every=every,
        init=init,
        begin=lambda *_: Round(merges=merges),
    )
