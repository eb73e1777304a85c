"""Delayed mean: synchronous data parallelism whose exchange overlaps with the next step.

Usually, an exchange has to wait until this step's gradients have been computed. Here, each step
exchanges the *previous* step's gradients instead. Those are already in the optimizer's state when
the step begins, so the exchange can overlap with the step's computation. The price is a gradient
that's one step old.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.validation import optimizer_in


class DelayedMeanState(NamedTuple):
    """State of `delayed_mean`.

    Attributes:
        pending: This rank's gradients from the previous step, in the parameters' types.
        inner: State of the optimizer.
    """

    pending: PyTree
    inner: optax.OptState

    rank_local = RankLocal(unsent=("pending",), maybe_empty=("pending", "inner"))


def delayed_mean(
    optimizer: optax.GradientTransformation, axes: Axes
) -> optax.GradientTransformationExtraArgs:
    """Steps on the mean of the previous step's gradients, and saves this step's for the next call.

    Since the exchange depends on the optimizer's state but not on this step's gradients, it's in
    flight while the step computes (a carried exchange). At best, a step takes as long as the
    exchange or the computation, whichever is longer.

    Gradients are one step old, i.e. were computed on the parameters before the last update. The
    first step uses a gradient of zeros. Parameters and the optimizer's state are bitwise identical
    on every rank, but the gradients waiting to be exchanged (`pending`) are rank-local.
    Deterministic.

    ```python
    tx = jaxcross.exchange.delayed_mean(optax.adamw(1e-3), "batch")
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    `asynchronous(delays=1)`, which simulates arbitrary schedules of delays, gives bitwise the same
    result. But it puts gradients into a queue first, so its exchange has to wait for this step's
    gradient, whereas we read the previous gradient straight from the state. The equivalent without
    a delay is `optax.chain(jaxcross.exchange.mean(axes), optimizer)`.

    When a job ends, the gradients of its last step are still pending, and are never applied.

    Args:
        optimizer: Steps on the mean, identically on every rank.
        axes: One axis name, or a tuple of names that act as a single axis.

    Raises:
        ValueError: `optimizer` is not an optimizer.

    Needs memory for one set of gradients, on top of the optimizer's state.

    Bytes received per rank: `2(P-1)/P` times the size of the gradients, just like the mean.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Agarwal and Duchi, arXiv 1104.5525, with a delay of one step. Overlapping the delayed
    exchange with computation comes from Sun et al., arXiv 2401.16265 (CO2), and Nabli et al., arXiv
    2406.02613 (ACCO).
    """
    names = axis_names(axes)
    inner = optimizer_in(optimizer, "`delayed_mean`")

    def init(params: optax.Params) -> DelayedMeanState:
        return DelayedMeanState(jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(
        updates: optax.Updates,
        state: DelayedMeanState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, DelayedMeanState]:
        due = jax.tree.map(
            lambda p, g: jax.lax.pmean(p, names).astype(g.dtype), state.pending, updates
        )
        pending = jax.tree.map(lambda p, g: jnp.asarray(g, p.dtype), state.pending, updates)
        due, inner_state = inner.update(due, state.inner, params, **extra)
        return due, DelayedMeanState(pending, inner_state)

    return exchange_once("delayed_mean", names, optax.GradientTransformationExtraArgs(init, update))  # pyright: ignore[reportArgumentType]
