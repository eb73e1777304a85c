"""1-bit Adam: starts out as plain Adam, then switches to exchanging only the momentum, as signs.

Putting a compressor with error feedback in front of Adam doesn't work: error feedback requires the
update to be linear in whatever gets compressed, and Adam's update isn't linear in the gradient. But
its second moment settles after a while. If we freeze it at that point, the update becomes linear in
the momentum, which can then be compressed to one bit per element.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import bits, collectives
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.layouts import VectorLayout, vector_layout
from jaxcross.exchange.validation import as_number, check_real, check_state, whole_number


class OneBitAdamState(NamedTuple):
    """Moments and residuals of both phases, all float32.

    Both moments and the worker's residual are trees like the parameters. When signs are exchanged,
    each rank averages 1/P of all elements, i.e. it acts as the server for them. The server's
    residual is a vector of that length, including padding. Step counts and moments are the same on
    every rank, but residuals are rank-local.

    `nu_steps` is the number of gradients that went into the second moment. It can differ from
    `freeze_step`, which you're allowed to change at a restart.
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
    """Computes Adam's direction, exchanging gradients at first and 1-bit momenta later.

    This is a drop-in replacement for `mean` followed by `optax.scale_by_adam`, and yields the same
    updates for the first `freeze_step` steps. After that, the second moment stays frozen and ranks
    no longer exchange gradients. Instead, each rank adds its gradient to the common momentum, and
    only the momentum gets averaged, at one bit per element.

    Averaging takes two phases, each with its own residual. First, every rank sends each 1/P of its
    momentum to the rank that owns it. Then the owners send the averages to all ranks. Updates are
    the same on every rank, but residuals are rank-local. Deterministic.

    Bytes received per rank and step: `2(P-1)/P n` before `freeze_step`, where n is the bytes of the
    gradients in float32. From then on, `2 (P-1)/P (D'/8 + 4 D'/block)`, where D' is the total
    number of elements, padded to a multiple of P blocks.

    By `freeze_step`, the second moment should have settled, which in the paper takes 15-25% of the
    run. If you freeze it too early, the update overflows. Elements that haven't received any
    gradient by then will never move, because nothing is known about their scale.

    The dangerous elements are those that have barely received any. One bit can't express that an
    element's momentum is small, so it's assigned its block's mean magnitude. Dividing that by the
    root of a second moment near 0, plus a small `eps`, results in a huge step. If the loss jumps at
    `freeze_step`, raise `eps` (we use 1e-4 in our benchmarks) or lower `block`.

    ```python
    tx = optax.chain(jaxcross.exchange.one_bit_adam(2000, "batch", ranks=world.size),
    optax.scale(-1e-3))
    ```

    Args:
        freeze_step: The first step that exchanges signs. You can change it at a restart. If the job
            hasn't reached the new step yet, it goes back to averaging gradients until it does.
        axes: One axis name. Several raise an error.
        ranks: Number of ranks of that axis. We need it because residuals are created before the
            axis is bound.
        b1: Decay rate of the momentum.
        b2: Decay rate of the second moment.
        eps: Added to the root of the second moment. Adam's usual 1e-8 can be too small here; see
            above.
        block: Number of elements that share a scale, a multiple of 8. The last block may be
            smaller; padding doesn't affect its scale.

    Raises:
        ValueError: An argument is out of range; or, at trace time, the size of the axis is not
            `ranks`, the state has different shapes than `init` makes, or a leaf is not real
            floating-point, or is float64.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Tang et al., arXiv 2102.02888, algorithm 1. We scale a block's signs by the mean
    absolute value of its elements, which makes the compression a contraction for every possible
    input, as error feedback requires.
    """
    axis = collectives.one_axis(axes, "`one_bit_adam`")
    # There has to be at least one regular Adam step first, because the later steps divide by the
    # second moment, which would still be zero otherwise.
    freeze_step = whole_number(freeze_step, "freeze_step", "`one_bit_adam`")
    block = whole_number(block, "block", "`one_bit_adam`")
    ranks = whole_number(ranks, "ranks", "`one_bit_adam`")
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= as_number(decay) < 1:
            raise ValueError(
                f"`{name}` of `one_bit_adam` is a moment's decay and must be a number from 0 and "
                f"below 1, got `{decay!r}`."
            )
    if not 0 < as_number(eps) < math.inf:
        raise ValueError(
            "`eps` of `one_bit_adam` keeps a division finite and must be a finite number above 0, "
            f"got `{eps!r}`."
        )
    if block % 8:
        raise ValueError(
            "`block` of `one_bit_adam` must be a multiple of 8, because eight signs are sent in "
            f"one byte, got {block}."
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
                f"were created for {ranks}. Create the exchange with `ranks={size}`, and "
                "create its state again."
            )
        check_state(state, init, updates, "`one_bit_adam`")
        step = jnp.asarray(optax.safe_increment(state.step))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        if not jax.tree.leaves(updates):
            return updates, state._replace(step=step)
        moments = jax.lax.cond(state.step < freeze_step, adam_step, sign_step, grads, state)
        state = OneBitAdamState(step, *moments)
        # Bias correction works as in optax.scale_by_adam. Once the second moment is frozen, so is
        # its correction.
        first = 1 - b1**step
        second = 1 - b2**state.nu_steps
        directions = jax.tree.map(
            lambda m, v, g: ((m / first) / (jnp.sqrt(v / second) + eps)).astype(g.dtype),
            state.mu,
            state.nu,
            updates,
        )
        return directions, state

    return exchange_once("one_bit_adam", axes, optax.GradientTransformation(init, update))  # type: ignore[arg-type]


Moments = tuple[jax.Array, PyTree, PyTree, PyTree, jax.Array]
"""`nu_steps`, both moments and both residuals, in the order of `OneBitAdamState`."""


def _adam_step(
    axis: Hashable, b1: float, b2: float, grads: optax.Updates, state: OneBitAdamState
) -> Moments:
    """Returns Adam's moments for the averaged gradients, and the unchanged residuals."""
    grads = jax.lax.pmean(grads, axis)
    mu = jax.tree.map(lambda m, g: (1 - b1) * g + b1 * m, state.mu, grads)
    nu = jax.tree.map(lambda v, g: (1 - b2) * (g * g) + b2 * v, state.nu, grads)
    nu_steps = jnp.asarray(optax.safe_increment(state.nu_steps))
    return nu_steps, mu, nu, state.worker_residual, state.server_residual


def _sign_step(
    axis: Hashable, b1: float, ranks: int, block: int, grads: optax.Updates, state: OneBitAdamState
) -> Moments:
    """Returns the averaged momentum and both residuals after two rounds of exchanging signs.

    Leaves the second moment alone.
    """
    lay = _layout(grads, ranks, block)
    mine = jax.tree.map(
        lambda m, g, e: (1 - b1) * g + b1 * m + e, state.mu, grads, state.worker_residual
    )
    vector = lay.ravel(mine)
    blocks = lay.length // block // ranks
    # First phase: send each part to its owner.
    packed, scales = _encode(
        vector.reshape(ranks, -1), _counts(lay.size, jnp.arange(ranks), blocks, block), block
    )
    rest = vector - _decode(packed, scales, block).reshape(-1)
    packed, scales = jax.lax.all_to_all((packed, scales), axis, 0, 0)
    counts = _counts(lay.size, jax.lax.axis_index(axis), blocks, block)
    # One bit can't encode zero, so the padding at the end comes back as nonzero values. Zero it out
    # again, both in the mean and in the residual.
    real = (jnp.arange(block) < counts[:, None]).reshape(-1)
    owned = collectives.sum_rows(_decode(packed, scales, block)) / ranks + state.server_residual
    owned = jnp.where(real, owned, 0)
    # Second phase: owners send the mean of their part to all ranks.
    packed, scales = _encode(owned, counts, block)
    server_rest = jnp.where(real, owned - _decode(packed, scales, block), 0)
    mu = lay.unravel(
        _decode(collectives.gather(packed, axis), collectives.gather(scales, axis), block).reshape(
            -1
        )
    )
    # One bit can't encode zero, so even elements that have never had a gradient end up with a
    # nonzero momentum. Since their second moment is 0, that would be divided by just `eps`,
    # resulting in a huge update. So set it to zero, unless it isn't finite, which shouldn't be
    # covered up.
    mu = jax.tree.map(lambda m, v: jnp.where((v == 0) & jnp.isfinite(m), 0, m), mu, state.nu)
    return state.nu_steps, mu, state.nu, lay.unravel(rest), server_rest


def _layout(tree: PyTree, ranks: int, block: int) -> VectorLayout:
    return vector_layout(tree, multiple=ranks * block, dtype=jnp.float32)


def _counts(size: int, part: jax.Array, blocks: int, block: int) -> jax.Array:
    """Returns how many of the `size` real elements are in each of a part's `blocks` blocks.

    If `part` is an array, returns one row per part.
    """
    number = part[..., None] * blocks + jnp.arange(blocks)
    whole, rest = divmod(size, block)
    return jnp.where(number < whole, block, jnp.where(number == whole, rest, 0))


def _encode(x: jax.Array, counts: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns packed signs and each block's mean absolute value. Zero counts as positive.

    Args:
        x: The values, along the last axis; any padding must be zero.
        counts: Number of elements in each block that aren't padding. Only those count towards the
            mean. Including the padding would mean that a nearly empty block only gets to send a
            fraction of its magnitude on each step.
        block: Number of elements per block.
    """
    grouped = x.reshape(*x.shape[:-1], -1, block)
    return bits.pack(x >= 0), jnp.sum(jnp.abs(grouped), axis=-1) / jnp.maximum(counts, 1)


def _decode(packed: jax.Array, scales: jax.Array, block: int) -> jax.Array:
    signs = bits.signs(bits.unpack(packed))
    return (signs.reshape(*scales.shape, block) * scales[..., None]).reshape(signs.shape)
