"""The mean of the step before: synchronous data parallelism whose exchange runs during the next
step's computation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.validation import optimizer_in


class DelayedMeanState(NamedTuple):
    """State of delayed means.

    Attributes:
        pending: This rank's own gradients of the step before, in the parameters' types.
        inner: State of the optimizer.
    """

    pending: PyTree
    inner: optax.OptState

    rank_local = RankLocal(unsent=("pending",), maybe_empty=("pending", "inner"))


def delayed_mean(
    optimizer: optax.GradientTransformation, axes: Axes
) -> optax.GradientTransformationExtraArgs:
    """Steps on the mean of the gradients of the step before, and leaves this step's for the next
    one.

    The exchange depends on the state alone: it is carried, and travels while this step computes. At
    best a step takes as long as the longer of the two. The gradient is one step old: it was
    computed on the parameters before the last update. The first step sees a gradient of zeros.
    Parameters and the optimizer's state are the same bits on every rank; `pending` is the rank's
    own. Deterministic.

    ```python
    tx = jaxcross.exchange.delayed_mean(optax.adamw(1e-3), "batch")
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    The bits are those of `asynchronous(delays=1)`. That simulator takes any schedule of delays from
    a queue, which its exchange has to wait for; here nothing stands between the state and the
    exchange. The same without the delay is `optax.chain(jaxcross.exchange.mean(axes),
    optimizer)`.

    A job that ends leaves the last gradients pending, and no rank applies them.

    Args:
        optimizer: Steps on the mean, on every rank alike.
        axes: One axis name, or a tuple of several that count as one.

    Raises:
        ValueError: `optimizer` is not an optimizer.

    Memory above the optimizer's: one set of gradients.

    Bytes that a rank receives: those of the mean, `2(P-1)/P` times the gradients'.

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: one step of delay in Agarwal and Duchi, arXiv 1104.5525; overlapped with computation:
    Sun et al., arXiv 2401.16265 (CO2), Nabli et al., arXiv 2406.02613 (ACCO).
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
