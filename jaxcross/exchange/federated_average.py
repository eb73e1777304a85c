"""Federated averaging: some ranks train independently each round, and all take their average.

Each participating rank counts in proportion to how much data it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives
from jaxcross.exchange.arithmetic import accumulation_dtype, sum_of
from jaxcross.exchange.local_rounds import Round, local_rounds, to_merged
from jaxcross.exchange.validation import as_number, optimizer_in, whole_number


class FederatedAverageState(NamedTuple):
    """State of federated averaging.

    Attributes:
        since: Number of steps so far in this round, int32.
        round: Number of this round, int32.
        inner: State of this rank's own optimizer.
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
    """Averages the participants' parameters at the end of each round, weighted by their data.

    With `x` a participant's parameters and `n` its weight, every rank gets the parameters
    `sum_over_participants(n x) / sum_over_participants(n)`.

    If `participation` is below 1, only some of the ranks train in each round. They're drawn without
    replacement, and the choice depends only on `seed` and the round, so it's the same on every
    rank. All other ranks pause: their updates are zero and their optimizer states don't change. At
    the end of the round, every rank takes the participants' average.

    Within a round, parameters differ between ranks. After a round, they're equal up to one
    rounding. The optimizer's state is rank-local. Deterministic. With full participation and equal
    weights, this is the same as `local_sgd`.

    ```python
    tx = jaxcross.exchange.federated_average(optax.sgd(0.1), "batch", every=20, participation=0.5,
    weights=samples)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name. Several raise an error.
        every: Steps per round.
        participation: Fraction of the ranks to choose per round, in (0, 1]. Rounded to the nearest
            number of ranks, but at least one.
        weights: One positive number per rank, for example its number of samples. If None, all ranks
            have equal weights. Weights are treated as if they were at least about 1e-38 of the
            largest one.
        seed: Seed of the choice.

    Raises:
        ValueError: An argument is out of range; the length of `weights` isn't the size of the axis
            (at the first trace); or `update` got no `params`.

    Bytes received per rank: `2(P-1)/P` times the bytes of the parameters at the end of a round, and
    0 on all other steps. Parameters with 16 bits count as float32 here, because they're converted
    to float32 before they're sent.

    Communicates only in `update`, on the last step of each round, over its axis. All ranks must
    call `update` on the same step, including those that pause.

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

    def begin(state: FederatedAverageState, params: optax.Params) -> Round:
        del params
        shares = _shares(state.round, jax.lax.axis_size(axis), share_of_ranks, samples, seed)
        share = shares[jax.lax.axis_index(axis)]
        return Round(
            merges=[to_merged(lambda mine, state: (average(mine, share), state))],
            taking_part=share > 0 if share_of_ranks < 1 else None,
        )

    def average(params: optax.Params, share: jax.Array) -> optax.Params:
        # Each rank multiplies its parameters by its share of the average, and we then add the
        # products of all ranks. We keep the products in float32 until they're added. If they were
        # rounded to 16 bits first, even the average of equal values could be wrong, because the
        # products wouldn't add up to that value any more.
        mine = jax.tree.map(lambda x: (x * share).astype(accumulation_dtype(x.dtype)), params)
        if share_of_ranks < 1:  # 0 times NaN is NaN, which would spoil the average
            mine = jax.tree.map(lambda x: jnp.where(share > 0, x, jnp.zeros_like(x)), mine)
        return jax.tree.map(lambda total, x: total.astype(x.dtype), sum_of(mine, axis), params)

    return local_rounds("federated_average", axes, inner, every=every, init=init, begin=begin)


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
    """Returns every rank's share of a round's average, float32; the shares sum to one.

    Ranks that are not chosen have a share of zero.
    """
    if weights is not None and len(weights) != ranks:
        raise ValueError(
            f"`weights` of `federated_average` are {len(weights)}, but the axis has {ranks} ranks. "
            "Give one per rank."
        )
    samples = np.ones(ranks) if weights is None else np.asarray(weights, np.float64) / max(weights)
    # A rank's share is its normalised weight in the average of this round, and zero means that the
    # rank doesn't take part. So we raise tiny weights a little, such that the share of a
    # participant is always a normal number in float32. Anything smaller might be flushed to zero by
    # XLA.
    given = jnp.asarray(np.maximum(samples, ranks * np.finfo(np.float32).tiny), jnp.float32)
    if participation < 1:
        chosen = max(1, round(participation * ranks))
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(seed), number), ranks)
        given = jnp.where(order < chosen, given, 0)
    return given / given.sum()
