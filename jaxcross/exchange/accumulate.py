"""Gradient accumulation: several batches per optimizer step, and thus per exchange."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange.arithmetic import accumulation_dtype, as_weight, divided, typed_like, weighed
from jaxcross.exchange.local_rounds import next_in_round
from jaxcross.exchange.validation import optimizer_in, whole_number


class AccumulateState(NamedTuple):
    """Gradients accumulated since the last optimizer step, plus the wrapped optimizer's state.

    Attributes:
        mini_step: Number of gradients accumulated so far, int32.
        weight: Sum of this rank's gradient weights, float32. Without weights, every gradient counts
            as 1.
        total: Weighted sum of this rank's gradients.
        inner: State of the wrapped optimizer.
    """

    mini_step: jax.Array
    weight: jax.Array
    total: PyTree
    inner: optax.OptState

    rank_local = RankLocal(passing=("weight", "total"), maybe_empty=("total", "inner"))


def accumulate(
    optimizer: optax.GradientTransformation, *, every: int, dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Steps `optimizer` on every `every`-th call, using the mean gradient since its last step.

    On all other calls, the updates are zero. The optimizer, along with any exchange inside it, runs
    in a `lax.cond` on a counter. Since the host knows the counter, these calls run a program that
    just adds up the gradient, without communicating at all. It also means that the optimizer's own
    state (e.g. a `top_k` residual) only changes when the optimizer steps.

    `optax.MultiSteps`, by contrast, runs its optimizer, including the exchange, on every call and
    throws most of the results away. The updates are the same up to rounding, but it costs `every`
    times the bytes.

    ```python
    tx = optax.chain(jaxcross.exchange.mean("batch"), optax.adamw(1e-3))
    tx = jaxcross.exchange.accumulate(tx, every=4)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # grads are this rank's own: averaging
                                            # them first would exchange every time
    ```

    Batches may contain different numbers of tokens, e.g. because of padding. If you pass each
    batch's token count to `update` as its `weight` argument, the mean is taken over all tokens of
    the accumulated batches, so that every token counts equally. The sum of these weights is passed
    on to the inner optimizer, which means that a mean over ranks inside it
    (`jaxcross.exchange.mean`) weights all tokens equally, too.

    Each rank accumulates its own gradients, so checkpoints must save the sum separately for each
    rank. The sum is reset to zero after every optimizer step, even if it has become NaN or
    infinite; otherwise, a single bad gradient would poison every later sum. Deterministic.

    Args:
        optimizer: Any optax transformation, which may contain exchanges. When it steps, it receives
            that call's `params` and extra arguments.
        every: Gradients per optimizer step; the first step is taken on call number `every`. Must be
            the same on every rank. It's safe to change this when you restart a job, because the sum
            is always divided by the number of gradients it actually contains.
        dtype: Element type of the sum. Defaults to the parameters' type, but at least float32 for
            floats.

    Raises:
        ValueError: `every` is not a positive whole number, `dtype` is not a floating-point type, or
            `optimizer` is not an optimizer. Also raised if the `weight` passed to `update` is not a
            single real number, or if `optimizer` is an exchange that doesn't accept a weight.

    Bytes received per rank: whatever `optimizer` receives on every `every`-th call, 0 otherwise.

    Communicates only in `update`, when `optimizer` steps and itself communicates. All ranks must
    call `update` on the same step.
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
        # Divide by the total weight of the gradients that actually went into the sum, rather than
        # by `every`. The two differ if a job is restarted with a different `every` halfway through
        # an accumulation.
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
            stepped, *_ = jax.eval_shape(step)  # their types may differ from the gradients'
            return jax.tree.map(_zeros_of, stepped), weights, total, state.inner

        stepped, weights, total, inner_state = (
            step() if every == 1 else jax.lax.cond(mini_step == 0, step, wait)
        )
        return stepped, AccumulateState(mini_step, weights, total, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _zeros_of(update: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros with the shape and type of an update, varying over the same axes.

    `shard_map(check_vma=True)` tracks the axes over which each value varies, and rejects a `cond`
    whose branches disagree on them.
    """
    zeros = jnp.zeros(update.shape, update.dtype)
    kind = update.manual_axis_type
    return (
        jax.lax.pcast(zeros, tuple(kind.varying), to="varying")
        if kind is not None and kind.varying
        else zeros
    )
