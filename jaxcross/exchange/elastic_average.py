"""Elastic averaging (EASGD): springs between every rank's parameters and a centre that all ranks
hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.rounds import next_in_round
from jaxcross.exchange.validation import (
    add_moves,
    as_number,
    optimizer_in,
    require_params,
    sum_of,
    whole_number,
)


class ElasticAverageState(NamedTuple):
    """State of elastic averaging.

    Attributes:
        since: Steps since the last exchange, int32.
        centre: Like the parameters, and the same bits on every rank.
        inner: State of this rank's own optimizer.
    """

    since: jax.Array
    centre: optax.Params
    inner: optax.OptState

    rank_local = RankLocal(model=("inner",), maybe_empty=("inner",))


def elastic_average(
    optimizer: optax.GradientTransformation,
    axes: Axes,
    *,
    every: int,
    alpha: float,
    beta: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Pulls each rank's parameters towards a centre, and the centre towards them, at every
    `every`-th step.

    Both from the parameters `x` that the step began with, `c` the centre: `x <- x + u - alpha (x -
    c)` and `c <- c + beta sum_over_ranks(x - c)`. What is exchanged does not depend on the step's
    gradient, so it can travel while that is computed. Each rank explores on its own: parameters and
    the optimizer's state are per rank, the centre (`state.centre`) is the model to evaluate.
    Deterministic.

    ```python
    tx = jaxcross.exchange.elastic_average(optax.sgd(0.1), "batch", every=4, alpha=0.9 / world.size)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name, or a tuple of several that count as one.
        every: Steps from one exchange to the next.
        alpha: Of the distance to the centre, the part that a rank goes, in [0, 1]; 0: ranks train
            alone.
        beta: Of the distance to each rank, the part that the centre goes; `alpha` if None, which
            conserves the sum of parameters and centre.

    Raises:
        ValueError: An argument is out of its range; `beta` times the ranks exceeds 1, so that the
            centre would jump beyond the mean, or both are 1, so that parameters and centre swap (at
            the first trace); `update` got no `params`.

    Bytes that a rank receives: `2(P-1)/P` times those of the parameters at an exchange, 0 otherwise
    and with `beta=0`.

    Making it and `init` do not communicate; `update` does, in every `every`-th step, over its axes,
    and every rank calls it in the same step.

    Source: Zhang, Choromanska, LeCun, arXiv 1412.6651, equations 3 and 4 (their alpha = eta rho;
    their beta is our beta times the ranks).
    """
    every = whole_number(every, "every", "`elastic_average`")
    names = axis_names(axes)
    given = {"alpha": alpha, "beta": alpha if beta is None else beta}
    for name, value in given.items():
        if not 0 <= as_number(value) <= 1:
            raise ValueError(
                f"`{name}` of `elastic_average` is `{value!r}`: it is part of a distance, in [0, "
                "1]."
            )
    alpha, pull = map(as_number, given.values())
    inner = optimizer_in(optimizer, "`elastic_average`")

    def init(params: optax.Params) -> ElasticAverageState:
        # A copy: an array that is parameter and centre at once could not be donated.
        centre = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
        return ElasticAverageState(jnp.zeros((), jnp.int32), centre, inner.init(params))

    def update(
        updates: optax.Updates,
        state: ElasticAverageState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, ElasticAverageState]:
        params = require_params(params, "`elastic_average`")
        _check(alpha, pull, jax.lax.psum(1, names))
        updates, inner_state = inner.update(updates, state.inner, params, **extra)

        def exchange() -> tuple[optax.Updates, optax.Params]:
            away = jax.tree.map(jnp.subtract, params, state.centre)
            total = sum_of(away, names)
            # A pull of 0 is none, also of what is not finite: 0 times NaN is NaN.
            pulled, centre = updates, state.centre
            if alpha:
                pulled = add_moves(
                    updates, jax.tree.map(lambda d: (-alpha * d).astype(d.dtype), away)
                )
            if pull:
                centre = add_moves(
                    centre, jax.tree.map(lambda d: (pull * d).astype(d.dtype), total)
                )
            return pulled, centre

        since = next_in_round(state.since, every)
        if every == 1:
            updates, centre = exchange()
        else:
            updates, centre = jax.lax.cond(since == 0, exchange, lambda: (updates, state.centre))
        return updates, ElasticAverageState(since, centre, inner_state)

    return exchange_once(
        "elastic_average",
        names,
        optax.GradientTransformationExtraArgs(init, update),  # pyright: ignore[reportArgumentType]
    )


def _check(alpha: float, pull: float, ranks: int) -> None:
    if pull * ranks > 1 + 1e-6:
        raise ValueError(
            f"`beta` of `elastic_average` is `{pull}` and the axis has {ranks} ranks: together "
            f"they pull the centre by {pull * ranks:.3g} of the distance to their mean, beyond it. "
            f"Take at most 1 / P, {1 / ranks:.3g}."
        )
    if alpha + pull * ranks > 2 - 1e-6:
        raise ValueError(
            f"`alpha` of `elastic_average` is `{alpha}` and `beta` `{pull}`, on {ranks} ranks: "
            "parameters and centre change places at every exchange and never meet. Take a smaller "
            "`alpha`, for example 0.5."
        )
