"""Local SGD: ranks train independently and average their parameters every few steps."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross.checkpoint import RankLocal
from jaxcross.exchange.arithmetic import mean_of
from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.local_rounds import Round, local_rounds, to_merged
from jaxcross.exchange.validation import optimizer_in, whole_number


class LocalSGDState(NamedTuple):
    """State of local SGD.

    Attributes:
        since: Local steps since the last exchange, int32.
        inner: State of this rank's own optimizer.
    """

    since: jax.Array
    inner: optax.OptState

    rank_local = RankLocal(model=("inner",), maybe_empty=("inner",))


def local_sgd(
    optimizer: optax.GradientTransformation, axes: Axes, *, every: int
) -> optax.GradientTransformationExtraArgs:
    """Averages the *parameters* over `axes` on every `every`-th step, and exchanges nothing else.

    If `x` are a rank's parameters after its local step: `x <- mean_over_ranks(x)`.

    Between exchanges, each rank has different parameters. Right after an exchange, they're equal up
    to rounding. (If `every` is 1 and all ranks start from the same parameters, they stay bitwise
    identical.) The optimizer's state never gets averaged. Checkpoints must store both this state
    and the parameters separately for each rank. Deterministic.

    With `every=1`, this amounts to synchronous training for SGD with or without momentum, but not
    for Adam. It's equivalent to `diloco` with `optax.sgd(1.0)` as its outer optimizer, minus the
    memory for the anchor.

    ```python
    tx = jaxcross.exchange.local_sgd(optax.sgd(0.1, momentum=0.9), "batch", every=8)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name, or a tuple of names that act as a single axis.
        every: Steps from one exchange to the next; the first exchange is on step `every`.

    Raises:
        ValueError: `every` is not a positive whole number, or `update` got no `params`.

    Bytes received per rank: `2(P-1)/P` times the bytes of the parameters on a step that exchanges,
    0 otherwise.

    Communicates only in `update`, on every `every`-th step, over its axes. All ranks must call it
    on the same step.

    Source: Stich, arXiv 1805.09767, algorithm 1; McMahan et al., arXiv 1602.05629.
    """
    every = whole_number(every, "every", "`local_sgd`")
    names = axis_names(axes)
    inner = optimizer_in(optimizer, "`local_sgd`")

    def init(params: optax.Params) -> LocalSGDState:
        return LocalSGDState(jnp.zeros((), jnp.int32), inner.init(params))

    def average(mine: optax.Params, state: LocalSGDState) -> tuple[optax.Params, LocalSGDState]:
        return mean_of(mine, names), state

    merges = [to_merged(average)]
    return local_rounds(
        "local_sgd", names, inner, every=every, init=init, begin=lambda *_: Round(merges=merges)
    )
