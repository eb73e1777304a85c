"""NoLoCo: ranks train independently, and every few steps, random pairs pull each other closer.

It doesn't need collectives at all: in an exchange, each rank only communicates with one other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives
from jaxcross.exchange.layouts import ravel_floats
from jaxcross.exchange.local_rounds import Round, copied, local_rounds, to_merged
from jaxcross.exchange.validation import (
    as_number,
    optimizer_in,
    whole_number,
)


class NoLoCoState(NamedTuple):
    """State of NoLoCo. Rank-local, except for the counters.

    Attributes:
        since: Steps since the last exchange, int32.
        round: Number of exchanges so far, int32.
        anchor: Parameters at the last exchange.
        velocity: Momentum of the outer step, as a tree like the parameters.
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
    """Has random pairs of ranks take an outer step together on every `every`-th step.

    Each rank has an anchor `a` (its parameters at the last exchange) and a velocity `v`. If `x` are
    its current parameters, and means are taken over the two ranks of a pair, an exchange computes
    the velocity `v <- momentum * v + rate * mean(x - a) + pull * (mean(a) - a)`. The next anchor is
    then `a + v`, which is also where the rank continues from.

    Here, `mean(x - a)` is the pair's average progress since the last exchange, and the last term
    draws the two ranks towards each other.

    Ranks only become approximately equal: parameters and state stay rank-local, even right after an
    exchange. The model to evaluate is the mean of the parameters over ranks. Deterministic.

    Pairs come from a round-robin tournament, in which every rank meets every other rank exactly
    once. Each exchange uses one round of it, so every rank gets a single partner. Which round that
    is depends only on `seed` and the number of the exchange, and all partners are equally likely.
    With an odd number of ranks, one of them is left without a partner and takes its step alone.

    ```python
    tx = jaxcross.exchange.no_loco(optax.adam(1e-3), "batch", every=16)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name. Several raise an error.
        every: Steps from one exchange to the next; the first exchange is on step `every`.
        rate: Factor for the pair's mean progress, positive.
        momentum: Fraction of the last outer step that carries over to the next, in [0, 1).
        pull: Factor for the distance to the pair's mean, at least 0. If None, it equals `rate`.
            This halves the bytes, because it's then enough to exchange `x`.
        seed: Seed of the pairs.

    Raises:
        ValueError: An argument is out of range, `optimizer` is not an optimizer, or `axes` names
            several axes; or `update` got no `params`.

    Bytes received per rank: the bytes of the parameters on a step that exchanges, 0 on all others.
    Passing a `pull` that differs from `rate` doubles this, because the anchors need to be exchanged
    as well. The step's program contains a branch for every possible pairing of the ranks: P - 1
    branches if the number of ranks P is even, and P if it's odd.

    Communicates only in `update`, on every `every`-th step, with one other rank. All ranks must
    call it on the same step.

    Source: based on Kolehmainen et al., arXiv 2506.10911, and the authors' code, where `pull`
    always equals `rate`. Their method allows arbitrary pairings, whereas ours come from the rounds
    of a tournament.
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

    def merge(
        partners: Sequence[int], mine: optax.Params, state: NoLoCoState
    ) -> tuple[optax.Params, NoLoCoState]:
        anchor, velocity = outer.make(mine, state.anchor, state.velocity, axis, partners)
        return anchor, state._replace(anchor=anchor, velocity=velocity)

    def begin(state: NoLoCoState, params: optax.Params) -> Round:
        del params
        all_pairings = pairings(jax.lax.axis_size(axis))
        return Round(
            merges=[to_merged(partial(merge, partners)) for partners in all_pairings],
            chosen=draw(first, state.round, len(all_pairings)),
        )

    return local_rounds("no_loco", axes, inner, every=every, init=init, begin=begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OuterStep:
    """The factors of the outer step. `pull` is None if it equals `rate`."""

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
        """Returns the next `anchor` and `velocity`. A rank without a partner is its own partner."""
        perm = list(enumerate(partners))
        own, _ = ravel_floats(mine)
        anchors, back = ravel_floats(anchor)
        velocities, back_velocity = ravel_floats(velocity)

        def mean(x: jax.Array) -> jax.Array:
            # Compute the mean from the difference, which keeps two ranks with equal values bitwise
            # identical.
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
        raise ValueError(f"`{name}` of `no_loco` must be a number {range_}, got `{value!r}`.")
    return found


def pairings(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the rounds of a tournament in which every rank meets every other rank once.

    Each round is a tuple of everyone's partners. A rank without a partner is paired with itself.
    """
    seats = ranks + ranks % 2  # if odd, the rank paired with the empty seat stays alone
    if seats < 2:
        return ((0,),) * ranks
    found: list[tuple[int, ...]] = []
    for shift in range(seats - 1):
        circle = [seats - 1, *((shift + i) % (seats - 1) for i in range(seats - 1))]
        # Pair the first rank in the circle with the last, the second with the second to last, and
        # so on.
        partner = dict(zip(circle, reversed(circle), strict=True))
        found.append(tuple(partner[r] if partner[r] < ranks else r for r in range(ranks)))
    return tuple(found)


def draw(seed: int, number: jax.Array, count: int) -> jax.Array:
    """Returns a pseudo-random int32 from 0 to `count - 1`, determined by `seed` and `number`.

    The host has to be able to compute this number too, so we stick to integer arithmetic on
    scalars, which it can evaluate. `jax.random` is out because it works on arrays.
    """
    x = number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(
        (seed * 0x85EBCA6B + 0x27D4EB2F) % 2**32
    )
    # The finalizer of MurmurHash3.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return (x % jnp.uint32(count)).astype(jnp.int32)
