"""Federated averaging: in each round, some ranks train, and then all ranks adopt their average.

Participants are weighted by how much data they have.
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
    """State of `federated_average`.

    Attributes:
        since: Number of steps taken so far in this round, int32.
        round: Index of this round, int32.
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

    Every rank ends the round with the parameters
    `sum_over_participants(n x) / sum_over_participants(n)`, where `x` are a participant's
    parameters and `n` is its weight.

    If `participation` is below 1, only a subset of the ranks trains in each round. It's drawn
    without replacement and depends only on `seed` and the round, so all ranks arrive at the same
    choice. The other ranks sit out the round: their updates are zero and their optimizer states
    don't change. At the end of the round, every rank adopts the participants' average.

    Parameters differ between ranks within a round, and are equal (up to rounding) after it. The
    optimizer's state is rank-local. Deterministic. With full participation and equal weights, this
    is equivalent to `local_sgd`.

    ```python
    tx = jaxcross.exchange.federated_average(optax.sgd(0.1), "batch", every=20, participation=0.5,
    weights=samples)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name. Several raise an error.
        every: Steps per round.
        participation: Fraction of the ranks to draw in each round, in (0, 1]. Rounded to the
            nearest number of ranks, but always at least one rank.
        weights: One positive number per rank, e.g. its number of samples. If None, all ranks are
            weighted equally. Anything below about 1e-38 of the largest weight is rounded up to
            that.
        seed: Seed for drawing the participants.

    Raises:
        ValueError: An argument is out of range; `weights` doesn't have one entry for each rank of
            the axis (raised at the first trace); or `update` was called without `params`.

    Bytes received per rank: `2(P-1)/P` times the size of the parameters at the end of a round, and
    0 on all other steps. 16-bit parameters count as float32 here, because they're converted before
    they're sent.

    Communicates only in `update`, on the last step of each round, over its axis. All ranks must
    call `update` on the same step, even those that are sitting out the round.

    Source: McMahan et al., arXiv 1602.05629, algorithm 1.
    """
    axis = collectives.one_axis(axes, "`federated_average`")
    every = whole_number(every, "every", "`federated_average`")
    share_of_ranks = as_number(participation)
    if not 0 < share_of_ranks <= 1:
        raise ValueError(
            "`participation` of `federated_average` must be a fraction in (0, 1], got "
            f"`{participation!r}`."
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
        # Each rank scales its parameters by its share of the average, and we then add up the
        # products of all ranks. The products stay in float32 until they're added. If we rounded
        # them to 16 bits first, even the average of equal values could be off, because the products
        # would no longer add up to that value.
        mine = jax.tree.map(lambda x: (x * share).astype(accumulation_dtype(x.dtype)), params)
        if share_of_ranks < 1:  # 0 times NaN is NaN, which would poison the average
            mine = jax.tree.map(lambda x: jnp.where(share > 0, x, jnp.zeros_like(x)), mine)
        return jax.tree.map(lambda total, x: total.astype(x.dtype), sum_of(mine, axis), params)

    return local_rounds("federated_average", axes, inner, every=every, init=init, begin=begin)


def _positive(weights: object) -> list[float]:
    found = [as_number(w) for w in weights] if isinstance(weights, Iterable) else [math.nan]
    if not all(0 < w < math.inf for w in found):
        raise ValueError(
            "`weights` of `federated_average` must be one number per rank, positive and finite, "
            f"got `{weights!r}`."
        )
    return found


def _shares(
    number: jax.Array, ranks: int, participation: float, weights: Sequence[float] | None, seed: int
) -> jax.Array:
    """Returns each rank's share of a round's average, float32; the shares sum to one.

    Ranks that weren't drawn have a share of zero.
    """
    if weights is not None and len(weights) != ranks:
        raise ValueError(
            f"`weights` of `federated_average` contains {len(weights)} numbers, but the axis has "
            f"{ranks} ranks. Give one per rank."
        )
    samples = np.ones(ranks) if weights is None else np.asarray(weights, np.float64) / max(weights)
    # A rank's share is its normalised weight in this round's average, and a share of zero means
    # that the rank doesn't take part. XLA may flush anything below the normal range of float32 to
    # zero, so we raise tiny weights just enough to keep every participant's share a normal number.
    given = jnp.asarray(np.maximum(samples, ranks * np.finfo(np.float32).tiny), jnp.float32)
    if participation < 1:
        chosen = max(1, round(participation * ranks))
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(seed), number), ranks)
        given = jnp.where(order < chosen, given, 0)
    return given / given.sum()
