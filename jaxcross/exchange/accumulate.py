"""Gradient accumulation: an optimizer, and the exchange in it, take one step for every few
batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxcross._pytree import PyTree
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.rounds import next_in_round
from jaxcross.exchange.validation import accumulation_dtype, optimizer_in, typed_like, whole_number
from jaxcross.exchange.weights import as_weight, divided, weighed


class AccumulateState(NamedTuple):
    """Gradients since the last step.

    Attributes:
        mini_step: How many, int32.
        weight: The sum of their weights on this rank, float32; without weights, how many.
        total: Their sum on this rank, weighed.
        inner: The optimizer's state.
    """

    mini_step: jax.Array
    weight: jax.Array
    total: PyTree
    inner: optax.OptState

    rank_local = RankLocal(passing=("weight", "total"), maybe_empty=("total", "inner"))


def accumulate(
    optimizer: optax.GradientTransformation, *, every: int, dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Calls `optimizer` with the mean of `every` gradients at every `every`-th call; other updates
    are zero.

    The optimizer, its exchange included, runs in a `lax.cond` on a counter. The host knows the
    counter, so the other calls exchange nothing and compute nothing but the sum. The optimizer's
    state, a residual of `top_k` for example, changes when it steps. `optax.MultiSteps` runs its
    optimizer in every call, exchange included, and discards the result: the same updates to
    rounding, for `every` times the bytes.

    ```python
    tx = optax.chain(jaxcross.exchange.mean("batch"), optax.adamw(1e-3))
    tx = jaxcross.exchange.accumulate(tx, every=4)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # this rank's own gradients: a mean before it
                                            exchanges each time
    ```

    If batches have different numbers of tokens, give each call of `update` its batch's number as
    `weight`. The mean is then over all tokens of these batches. `optimizer` gets the sum of the
    weights as its own `weight`, so that `jaxcross.exchange.mean` weighs this rank by it.

    The sum is this rank's own: save it per rank. It is set to zero after each step, also where it
    was not finite. Deterministic.

    Args:
        optimizer: Any optax transformation, exchanges included. It gets the `params` and extra
            arguments of the call in which it steps.
        every: Gradients of a step; the first step is in call `every`. Every rank has the same
            number. It may change at a restart: the sum is divided by the gradients that it holds.
        dtype: Element type of the sum; None: that of the gradients, floats in float32 at least.

    Raises:
        ValueError: `every` is not a positive whole number, `dtype` is not a floating-point type, or
            `optimizer` is not an optimizer; `weight` of `update` is not one real number, or
            `optimizer` is an exchange that takes none.

    Bytes that a rank receives: those of `optimizer` at every `every`-th call, 0 otherwise.

    Making it and `init` do not communicate; `update` does what `optimizer` does, and every rank
    calls it in the same step.
    """
    every = whole_number(every, "every", "`accumulate`")
    inner = optimizer_in(optimizer, "`accumulate`")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`dtype` of `accumulate` must be a floating-point type, got {dtype!r}.")

    def zeros(params: optax.Params) -> PyTree:
        def zero(p: jax.Array) -> jax.Array:
            return jnp.zeros_like(
                p, accumulation_dtype(jnp.result_type(p)) if dtype is None else dtype
            )

        return jax.tree.map(zero, params)

    def init(params: optax.Params) -> AccumulateState:
        return AccumulateState(
            jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), zeros(params), inner.init(params)
        )

    def update(
        updates: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None = None,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, AccumulateState]:
        mine = as_weight(1 if weight is None else weight, "`accumulate`")
        terms = updates if weight is None else weighed(updates, mine, "`accumulate`")
        total = jax.tree.map(lambda t, g: t + jnp.asarray(g, t.dtype), state.total, terms)
        # Divided by what the sum holds: a restart may have changed `every` within a round.
        weights = (state.weight + mine).astype(jnp.float32)
        mini_step = next_in_round(state.mini_step, every)

        def step() -> tuple[optax.Updates, jax.Array, PyTree, optax.OptState]:
            mean = jax.tree.map(
                lambda t, g: divided(t, weights).astype(jnp.result_type(g)), total, updates
            )
            given = extra if weight is None else {**extra, "weight": weights}
            stepped, inner_state = inner.update(mean, state.inner, params, **given)
            return (
                stepped,
                jnp.zeros_like(weights),
                jax.tree.map(jnp.zeros_like, total),
                jax.tree.map(typed_like, inner_state, state.inner),
            )

        def wait() -> tuple[optax.Updates, jax.Array, PyTree, optax.OptState]:
            stepped, *_ = jax.eval_shape(
                step
            )  # an optimizer may return updates of another type than its gradients'
            return jax.tree.map(_zeros_of, stepped), weights, total, state.inner

        stepped, weights, total, inner_state = (
            step() if every == 1 else jax.lax.cond(mini_step == 0, step, wait)
        )
        return stepped, AccumulateState(mini_step, weights, total, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _zeros_of(update: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of an update's type, in which `shard_map(check_vma=True)` counts the axes that it
    varies over.
    """
    zeros = jnp.zeros(update.shape, update.dtype)
    kind = update.manual_axis_type
    return (
        jax.lax.pcast(zeros, tuple(kind.varying), to="varying")
        if kind is not None and kind.varying
        else zeros
    )
