"""1-bit Adam: Adam for a while, then its momentum alone is exchanged, as signs."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.exchange import bits, collectives
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.flat import Layout, layout
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.validation import as_number, check_real, check_state, whole_number


class OneBitAdamState(NamedTuple):
    """Moments and the first residual in the tree of the parameters, and the second residual, a
    vector.

    All are float32. The vector is as long as a rank's share of all elements, padded with zeros.
    `nu_steps` counts the gradients in the second moment: a restart may have changed `freeze_step`.
    Steps and moments are the same on every rank; residuals are the rank's own.
    """

    step: jax.Array
    nu_steps: jax.Array
    mu: PyTree
    nu: PyTree
    worker_residual: PyTree
    server_residual: jax.Array

    rank_local = RankLocal(unsent=("worker_residual", "server_residual"))


def one_bit_adam(
    freeze_step: int,
    axes: collectives.Axes,
    *,
    ranks: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    block: int = 2048,
) -> optax.GradientTransformation:
    """Returns Adam's direction, from averaged gradients for `freeze_step` steps, then from averaged
    signs of momenta.

    It replaces `mean` and `optax.scale_by_adam`, which it equals before `freeze_step`. Then the
    second moment stays as it is, each rank adds its gradient to the common momentum, and the sum is
    averaged in two phases of one bit an element, each with a residual: to the rank that owns the
    1/P-th part, and from there to all. Updates are the same on every rank; residuals are the rank's
    own. Deterministic. A rank receives `2(P-1)/P n` bytes a step at first, `2 (P-1)/P (D'/8 + 4
    D'/block)` later, D' being all elements padded to a multiple of P blocks.

    Freeze when the second moment has settled, 15-25% of the run in the paper: too early, and the
    update overflows. An element that had no gradient by then does not move afterwards, since
    nothing is known of its size. One that had hardly any is the danger: signs give it its block's
    mean size, and a root near 0 with a small `eps` turns that into a huge step. Where the loss
    jumps at `freeze_step`, raise `eps` (1e-4 in our benchmarks) or lower `block`.

    ```python
    tx = optax.chain(jaxcross.exchange.one_bit_adam(2000, "batch", ranks=world.size),
    optax.scale(-1e-3))
    ```

    Args:
        freeze_step: The first step that exchanges signs. It may change at a restart; if it becomes
            a later step, gradients are averaged again until then.
        axes: One axis name; several are refused.
        ranks: Of that axis: residuals are made before it is bound.
        b1: Decay of the momentum.
        b2: Decay of the second moment.
        eps: Added to the second moment's root. Adam's usual 1e-8 can be too small here: see above.
        block: Elements that share a scale, a multiple of 8. The last ones may be fewer: padding has
            no part in it.

    Raises:
        ValueError: An argument is out of range; (when traced) the axis has not `ranks` ranks, the
            state has other shapes than `init` makes, or a leaf is not real floating-point, or
            float64.

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: Tang et al., arXiv 2102.02888, algorithm 1. Scales are mean absolute values, for which
    error feedback contracts whatever the elements are.
    """
    axis = collectives.one_axis(axes, "`one_bit_adam`")
    freeze_step = whole_number(
        freeze_step, "freeze_step", "`one_bit_adam`"
    )  # signs need a second moment
    block = whole_number(block, "block", "`one_bit_adam`")
    ranks = whole_number(ranks, "ranks", "`one_bit_adam`")
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= as_number(decay) < 1:
            raise ValueError(
                f"`{name}` of `one_bit_adam` is `{decay!r}`: it is a moment's decay, from 0 to "
                "below 1."
            )
    if not 0 < as_number(eps) < math.inf:
        raise ValueError(
            f"`eps` of `one_bit_adam` is `{eps!r}`: it keeps a division finite and must be above 0."
        )
    if block % 8:
        raise ValueError(
            f"`block` is {block}: signs travel eight to a byte, so use a multiple of 8."
        )

    adam_step = partial(_adam_step, axis, b1, b2)
    sign_step = partial(_sign_step, axis, b1, ranks, block)

    def init(params: optax.Params) -> OneBitAdamState:
        def zeros() -> PyTree:
            return jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)

        return OneBitAdamState(
            step=jnp.zeros((), jnp.int32),
            nu_steps=jnp.zeros((), jnp.int32),
            mu=zeros(),
            nu=zeros(),
            worker_residual=zeros(),
            server_residual=jnp.zeros(_layout(params, ranks, block).length // ranks, jnp.float32),
        )

    def update(
        updates: optax.Updates, state: OneBitAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, OneBitAdamState]:
        del params
        check_real(updates, "the moments of `one_bit_adam`", float64=False)
        size = jax.lax.axis_size(axis)
        if size != ranks:
            raise ValueError(
                f"`ranks` of `one_bit_adam` is {ranks}, but axis `{axis}` has {size}: residuals "
                f"were cut for {ranks}. Make the exchange with `ranks={size}` and its state again."
            )
        check_state(state, init, updates, "`one_bit_adam`")
        step = jnp.asarray(optax.safe_increment(state.step))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        if not jax.tree.leaves(updates):
            return updates, state._replace(step=step)
        moments = jax.lax.cond(state.step < freeze_step, adam_step, sign_step, grads, state)
        state = OneBitAdamState(step, *moments)
        # As optax.scale_by_adam: powers of the decays, the second one as it was when it froze.
        first, second = 1 - b1**step, 1 - b2**state.nu_steps
        directions = jax.tree.map(
            lambda m, v, g: ((m / first) / (jnp.sqrt(v / second) + eps)).astype(g.dtype),
            state.mu,
            state.nu,
            updates,
        )
        return directions, state

    return exchange_once("one_bit_adam", axes, optax.GradientTransformation(init, update))  # type: ignore[arg-type]


Moments = tuple[jax.Array, PyTree, PyTree, PyTree, jax.Array]
"""The count of the second moment, both moments and both residuals, as `OneBitAdamState` orders
them.
"""


def _adam_step(
    axis: Hashable, b1: float, b2: float, grads: optax.Updates, state: OneBitAdamState
) -> Moments:
    """Returns Adam's moments of the averaged gradients; residuals are not touched."""
    grads = jax.lax.pmean(grads, axis)
    mu = jax.tree.map(lambda m, g: (1 - b1) * g + b1 * m, state.mu, grads)
    nu = jax.tree.map(lambda v, g: (1 - b2) * (g * g) + b2 * v, state.nu, grads)
    nu_steps = jnp.asarray(optax.safe_increment(state.nu_steps))
    return nu_steps, mu, nu, state.worker_residual, state.server_residual


def _sign_step(
    axis: Hashable, b1: float, ranks: int, block: int, grads: optax.Updates, state: OneBitAdamState
) -> Moments:
    """Returns the averaged momentum and both residuals after two exchanges of signs; the second
    moment stays.
    """
    lay = _layout(grads, ranks, block)
    mine = jax.tree.map(
        lambda m, g, e: (1 - b1) * g + b1 * m + e, state.mu, grads, state.worker_residual
    )
    vector = lay.ravel(mine)
    blocks = lay.length // block // ranks
    # First phase: every rank sends each part to the rank that owns it.
    packed, scales = _encode(
        vector.reshape(ranks, -1), _counts(lay.size, jnp.arange(ranks), blocks, block), block
    )
    rest = vector - _decode(packed, scales, block).reshape(-1)
    packed, scales = jax.lax.all_to_all((packed, scales), axis, 0, 0)
    counts = _counts(lay.size, jax.lax.axis_index(axis), blocks, block)
    # One bit cannot encode zero: what has arrived for the padding, or is left of it, is not passed
    # on.
    real = (jnp.arange(block) < counts[:, None]).reshape(-1)
    owned = collectives.sum_rows(_decode(packed, scales, block)) / ranks + state.server_residual
    owned = jnp.where(real, owned, 0)
    # Second phase: the owner sends the mean of its part to all ranks.
    packed, scales = _encode(owned, counts, block)
    server_rest = jnp.where(real, owned - _decode(packed, scales, block), 0)
    mu = lay.unravel(
        _decode(collectives.gather(packed, axis), collectives.gather(scales, axis), block).reshape(
            -1
        )
    )
    # An element that never had a gradient gets a sign, too, which would be divided by `eps` alone:
    # it stays zero. What is not finite is kept, so that it is seen.
    mu = jax.tree.map(lambda m, v: jnp.where((v == 0) & jnp.isfinite(m), 0, m), mu, state.nu)
    return state.nu_steps, mu, state.nu, lay.unravel(rest), server_rest


def _layout(tree: PyTree, ranks: int, block: int) -> Layout:
    return layout(tree, multiple=ranks * block, dtype=jnp.float32)


def _counts(size: int, part: jax.Array, blocks: int, block: int) -> jax.Array:
    """Returns how many of `size` elements lie in each of a part's `blocks` blocks; for several
    parts, a row each.
    """
    number = part[..., None] * blocks + jnp.arange(blocks)
    whole, rest = divmod(size, block)
    return jnp.where(number < whole, block, jnp.where(number == whole, rest, 0))


def _encode(x: jax.Array, counts: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns signs as bytes, and the mean absolute value of each block along the last axis. A zero
    counts as positive.

    Args:
        x: Zero where it is padding.
        counts: Elements of each block that are not padding. The mean is over these alone: with the
            padding, a nearly empty block would send only a small part of its size in a step.
        block: Elements of each block.
    """
    grouped = x.reshape(*x.shape[:-1], -1, block)
    return bits.pack(x >= 0), jnp.sum(jnp.abs(grouped), axis=-1) / jnp.maximum(counts, 1)


def _decode(packed: jax.Array, scales: jax.Array, block: int) -> jax.Array:
    """Returns the values that signs and scales encode."""
    signs = bits.signs(bits.unpack(packed))
    return (signs.reshape(*scales.shape, block) * scales[..., None]).reshape(signs.shape)
