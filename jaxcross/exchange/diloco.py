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
        anchor: The parameters at the beginning of this round, bitwise identical on every rank. This
            is the model to evaluate.
        outer: State of the outer optimizer, bitwise identical on every rank.
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
    """Takes `every` local steps per rank, then one `outer` step on the mean of their deltas.

    All ranks begin a round, i.e. the steps between two exchanges, with the same parameters, which
    we call the anchor. At the end of the round, each rank has arrived at different parameters. With
    `a` the anchor and `x` a rank's parameters, the outer optimizer then takes one step from the
    anchor on the pseudo-gradient `mean_over_ranks(a - x)`. The result becomes the next anchor, and
    every rank continues from it.

    With `outer=optax.sgd(1.0)`, the next anchor is simply the mean of the ranks' parameters, which
    `local_sgd` computes without storing an anchor.

    During a round, each rank has different parameters. At its end, the parameters become equal, up
    to one rounding. The inner optimizer's state is never averaged, so it's different on every rank.
    A checkpoint must store this state and the parameters separately for each rank.

    The model to evaluate is the anchor (`state.anchor`), which `jaxcross.exchange.finish` returns.
    All ranks must start with the same parameters. Deterministic.

    ```python
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jaxcross.exchange.diloco(optax.adamw(4e-4), outer, "batch", every=100)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        inner: Steps on this rank's gradients.
        outer: Steps on the pseudo-gradient, once per round. If it contains a schedule, that counts
            rounds.
        axes: One axis name, or a tuple of names that act as a single axis.
        every: Steps per round; the first exchange is on step `every`. If `inner` is SGD with
            momentum 0.9, rounds of less than 7 steps diverge at many rates with the outer optimizer
            above. Use longer rounds then, or an outer momentum of 0.5.

    Raises:
        ValueError: `every` is not a positive whole number, or `inner` or `outer` is not an
            optimizer; or `update` got no `params`.

    Memory in addition to the inner optimizer's: the anchor, which is a copy of the parameters, and
    the outer optimizer's state. If the outer optimizer has momentum, that's twice the parameters in
    total.

    Bytes received per rank: `2(P-1)/P` times the bytes of the parameters on a step that exchanges,
    0 otherwise.

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
