"""NoLoCo: ranks train alone, and every few steps random pairs of them pull each other along; no
collective at all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.exchange import collectives
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.rounds import copied, next_in_round
from jaxcross.exchange.validation import (
    as_number,
    optimizer_in,
    ravel_floats,
    require_params,
    updates_towards,
    whole_number,
)


class NoLoCoState(NamedTuple):
    """State of NoLoCo. All but the counters is this rank's own.

    Attributes:
        since: Steps since the last exchange, int32.
        round: Exchanges so far, int32.
        anchor: Parameters at the last exchange.
        velocity: Momentum of the outer step, like the parameters.
        inner: State of this rank's own optimizer.
    """

    since: jax.Array
    round: jax.Array
    anchor: optax.Params
    velocity: optax.Params
    inner: optax.OptState

    rank_local = RankLocal(model=("anchor", "velocity", "inner"), maybe_empty=("inner",))


def no_loco(
    optimizer: optax.GradientTransformation,
    axes: collectives.Axes,
    *,
    every: int,
    rate: float = 0.7,
    momentum: float = 0.5,
    pull: float | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Lets random pairs of ranks make a common outer step at every `every`-th step; in between
    nothing is exchanged.

    With the anchor `a`, a rank's parameters at the last exchange, `x` those now, and means over the
    pair:

        v <- momentum * v + rate * mean(x - a) + pull * (mean(a) - a)
        a <- a + v,  x <- a

    The first mean is the pair's progress, the last term draws the two together. Parameters and all
    of the state are the rank's own, also after an exchange: ranks agree only roughly, and a model
    to evaluate is the parameters' mean. Deterministic.

    The pairs are a round of a tournament in which everybody meets everybody once; which one is
    drawn from `seed` and the number of the exchange, so that a rank is as likely to meet one rank
    as another. Of an odd number of ranks one makes its step alone.

    ```python
    tx = jaxcross.exchange.no_loco(optax.adam(1e-3), "batch", every=16)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name; several are refused.
        every: Steps from one exchange to the next; the first exchange is in step `every`.
        rate: Factor of the progress, positive.
        momentum: Part of the last outer step that is added to the next one, in [0, 1).
        pull: Factor of the distance to the pair's mean, from 0 on; None: as `rate`, which halves
            the bytes, since only `x` is needed then.
        seed: Of the pairs.

    Raises:
        ValueError: An argument is out of its range, `optimizer` is not an optimizer, or `axes`
            names several axes; `update` got no `params`.

    Bytes that a rank receives: those of the parameters at an exchange, twice as many if `pull` is
    given and is not `rate`; 0 otherwise. The step has a branch for each pairing, one less than the
    ranks if these are even.

    Making it and `init` do not communicate; `update` does, in every `every`-th step, with one other
    rank, and every rank calls it in the same step.

    Source: after Kolehmainen et al., arXiv 2506.10911, by the authors' code, whose `pull` is
    `rate`. There any pairs may form a round.
    """
    axis = collectives.one_axis(axes, "`no_loco`")
    every = whole_number(every, "every", "`no_loco`")
    outer = _OuterStep(
        rate=_factor("rate", rate, positive=True),
        momentum=_factor("momentum", momentum, below=1),
        pull=None if pull is None or as_number(pull) == as_number(rate) else _factor("pull", pull),
    )
    first = whole_number(seed, "seed", "`no_loco`", least=0)
    inner = optimizer_in(optimizer, "`no_loco`")

    def init(params: optax.Params) -> NoLoCoState:
        zero = jnp.zeros((), jnp.int32)
        velocity = jax.tree.map(jnp.zeros_like, params)
        return NoLoCoState(zero, jnp.zeros_like(zero), copied(params), velocity, inner.init(params))

    def update(
        updates: optax.Updates, state: NoLoCoState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, NoLoCoState]:
        params = require_params(params, "`no_loco`")
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        meetings = pairings(jax.lax.axis_size(axis))

        def exchange(partners: Sequence[int]) -> tuple[optax.Updates, optax.Params, optax.Params]:
            mine = optax.apply_updates(params, updates)
            anchor, velocity = outer.make(mine, state.anchor, state.velocity, axis, partners)
            return updates_towards(updates, params, anchor), anchor, velocity

        since = next_in_round(state.since, every)
        # One switch for both questions, so that the host decides, and only one rank's parameters
        # travel.
        drawn = draw(first, state.round, len(meetings))
        branches = [
            lambda: (updates, state.anchor, state.velocity),
            *(partial(exchange, each) for each in meetings),
        ]
        chosen = jnp.where(since == 0, drawn + 1, 0)
        updates, anchor, velocity = jax.lax.switch(chosen, branches)
        return updates, NoLoCoState(
            since, state.round + (since == 0), anchor, velocity, inner_state
        )

    return exchange_once("no_loco", axes, optax.GradientTransformationExtraArgs(init, update))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OuterStep:
    """Factors of the outer step; `pull` is None where it is `rate`."""

    rate: float
    momentum: float
    pull: float | None

    def make(
        self,
        mine: PyTree,
        anchor: PyTree,
        velocity: PyTree,
        axis: Hashable,
        partners: Sequence[int],
    ) -> tuple[PyTree, PyTree]:
        """Returns the next `anchor` and `velocity`; ranks without a partner are their own."""
        perm = list(enumerate(partners))
        own, _ = ravel_floats(mine)
        anchors, back = ravel_floats(anchor)
        velocities, back_velocity = ravel_floats(velocity)

        def mean(x: jax.Array) -> jax.Array:
            # By the difference: a pair that agrees stays where it is to the last bit.
            return x + (jax.lax.ppermute(x, axis, perm) - x) / 2

        for i, (x, a, v) in enumerate(zip(own, anchors, velocities, strict=True)):
            if self.pull is None:
                move = self.rate * (mean(x) - a)
            else:
                middle = mean(a)
                move = self.rate * (mean(x) - middle) + self.pull * (middle - a)
            velocities[i] = self.momentum * v + move
            anchors[i] = a + velocities[i]
        return back(anchors), back_velocity(velocities)


def _factor(name: str, value: float, *, positive: bool = False, below: float = math.inf) -> float:
    found = as_number(value)
    if not (0 < found < below if positive else 0 <= found < below):
        range_ = (
            f"{'above' if positive else 'from'} "
            f"0{f' and below {below:g}' if below < math.inf else ''}"
        )
        raise ValueError(f"`{name}` of `no_loco` is `{value!r}`: it must be a number {range_}.")
    return found


def pairings(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns rounds in which every rank meets every other one once: each rank's partner, itself
    where it has none.
    """
    seats = ranks + ranks % 2  # of an odd number, who meets the empty seat stays alone
    if seats < 2:
        return ((0,),) * ranks
    found: list[tuple[int, ...]] = []
    for shift in range(seats - 1):
        circle = [seats - 1, *((shift + i) % (seats - 1) for i in range(seats - 1))]
        # The first of the circle faces the last one, and so on inwards.
        partner = dict(zip(circle, reversed(circle), strict=True))
        found.append(tuple(partner[r] if partner[r] < ranks else r for r in range(ranks)))
    return tuple(found)


def draw(seed: int, number: jax.Array, count: int) -> jax.Array:
    """Returns an int32 below `count` that looks random in `number`.

    Scalar integer arithmetic alone, which the host can follow; `jax.random` works on arrays.
    """
    x = number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(
        (seed * 0x85EBCA6B + 0x27D4EB2F) % 2**32
    )
    for shift, factor in (
        (16, 0x85EBCA6B),
        (13, 0xC2B2AE35),
        (16, 1),
    ):  # the finalizer of MurmurHash3
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x % jnp.uint32(count)).astype(jnp.int32)
