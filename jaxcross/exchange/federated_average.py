"""Federated averaging: in each round some ranks train alone, and all take their average, weighted
by their data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.exchange import collectives
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.rounds import next_in_round
from jaxcross.exchange.validation import (
    accumulation_dtype,
    as_number,
    optimizer_in,
    require_params,
    sum_of,
    updates_towards,
    whole_number,
)


class FederatedAverageState(NamedTuple):
    """Attributes: `since`, steps into this round, and `round`, both int32; `inner`, of this rank's
    own optimizer.
    """

    since: jax.Array
    round: jax.Array
    inner: optax.OptState

    rank_local = RankLocal(model=("inner",), maybe_empty=("inner",))


def federated_average(
    optimizer: optax.GradientTransformation,
    axes: collectives.Axes,
    *,
    every: int,
    participation: float = 1.0,
    weights: Sequence[float] | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Averages the parameters of a round's participants at its end, each weighted by its share of
    the data.

    A rank that a round does not choose stands still: its updates are zero and its optimizer's state
    does not change until the round ends, when it takes the participants' average like all others.
    Who is chosen depends on `seed` and the round alone, is drawn without replacement, and is the
    same on every rank. Parameters differ between ranks within a round, and after it by one
    rounding; the optimizer's state is this rank's own. Deterministic. With full participation and
    equal weights it is `local_sgd`.

    ```python
    tx = jaxcross.exchange.federated_average(optax.sgd(0.1), "batch", every=20, participation=0.5,
    weights=samples)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name; several are refused.
        every: Steps of a round.
        participation: Fraction of the ranks that a round chooses, in (0, 1]; at least one rank,
            rounded to the nearest.
        weights: One positive number for each rank, for example its samples; None: equal. What is
            less than about 1e-38 of the largest is taken for that.
        seed: Of the choice.

    Raises:
        ValueError: An argument is out of its range; `weights` has another length than the axis (at
            the first trace); `update` got no `params`.

    Bytes that a rank receives: `2(P-1)/P` times those of the parameters at the end of a round, of
    which 16-bit ones travel as float32; 0 otherwise.

    Making it and `init` do not communicate; `update` does, at the end of a round, over its axes,
    and every rank calls it in the same step.

    Source: McMahan et al., arXiv 1602.05629, algorithm 1.
    """
    axis = collectives.one_axis(axes, "`federated_average`")
    every = whole_number(every, "every", "`federated_average`")
    share_of_ranks = as_number(participation)
    if not 0 < share_of_ranks <= 1:
        raise ValueError(
            f"`participation` of `federated_average` is `{participation!r}`: it is a fraction in "
            "(0, 1]."
        )
    samples = None if weights is None else _positive(weights)
    inner = optimizer_in(optimizer, "`federated_average`")

    def init(params: optax.Params) -> FederatedAverageState:
        zero = jnp.zeros((), jnp.int32)
        return FederatedAverageState(zero, jnp.zeros_like(zero), inner.init(params))

    def update(
        updates: optax.Updates,
        state: FederatedAverageState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, FederatedAverageState]:
        params = require_params(params, "`federated_average`")
        shares = _shares(state.round, jax.lax.axis_size(axis), share_of_ranks, samples, seed)
        share = shares[jax.lax.axis_index(axis)]
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        if share_of_ranks < 1:
            updates = jax.tree.map(lambda u: jnp.where(share > 0, u, jnp.zeros_like(u)), updates)
            inner_state = jax.tree.map(
                lambda new, old: jnp.where(share > 0, new, old), inner_state, state.inner
            )

        def exchange() -> optax.Updates:
            # In float32 until all are added: parts rounded to 16 bits would no longer sum to what
            # all ranks hold.
            mine = jax.tree.map(
                lambda x: (x * share).astype(accumulation_dtype(x.dtype)),
                optax.apply_updates(params, updates),
            )
            if share_of_ranks < 1:  # 0 times NaN is NaN, and would be part of everyone's average
                mine = jax.tree.map(lambda x: jnp.where(share > 0, x, jnp.zeros_like(x)), mine)
            targets = jax.tree.map(
                lambda total, x: total.astype(x.dtype), sum_of(mine, axis), params
            )
            return updates_towards(updates, params, targets)

        since = next_in_round(state.since, every)
        updates = exchange() if every == 1 else jax.lax.cond(since == 0, exchange, lambda: updates)
        return updates, FederatedAverageState(since, state.round + (since == 0), inner_state)

    return exchange_once(
        "federated_average",
        axes,
        optax.GradientTransformationExtraArgs(init, update),  # pyright: ignore[reportArgumentType]
    )


def _positive(weights: object) -> list[float]:
    found = [as_number(w) for w in weights] if isinstance(weights, Iterable) else [math.nan]
    if not all(0 < w < math.inf for w in found):
        raise ValueError(
            f"`weights` of `federated_average` are `{weights!r}`: give one number for each rank, "
            "positive and finite."
        )
    return found


def _shares(
    number: jax.Array, ranks: int, participation: float, weights: Sequence[float] | None, seed: int
) -> jax.Array:
    """Returns every rank's share of a round's average, float32, summing to one; zero for ranks that
    are not chosen.
    """
    if weights is not None and len(weights) != ranks:
        raise ValueError(
            f"`weights` of `federated_average` are {len(weights)}, but the axis has {ranks} ranks. "
            "Give one a rank."
        )
    samples = np.ones(ranks) if weights is None else np.asarray(weights, np.float64) / max(weights)
    # Who is chosen has a share that float32 can hold, and XLA does not take for zero, however small
    # its weight.
    given = jnp.asarray(np.maximum(samples, ranks * np.finfo(np.float32).tiny), jnp.float32)
    if participation < 1:
        chosen = max(1, round(participation * ranks))
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(seed), number), ranks)
        given = jnp.where(order < chosen, given, 0)
    return given / given.sum()
