"""Rows of the zoo that train Flax and Optax models, written as a JAX user would write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training.train_state import TrainState
from jax import lax

WIDTH, CLASSES, BATCH = 6, 3, 4


def images(rank: int, step: int) -> dict[str, Any]:
    rng = np.random.default_rng((step, rank))
    return {
        "image": jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32),
        "label": jnp.asarray(rng.integers(0, CLASSES, BATCH)),
    }


class MLP(nn.Module):
    """Two layers, optionally with normalization, dropout or rematerialization."""

    norm: bool = False
    axis_name: str | None = None
    dropout: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        dense = nn.remat(nn.Dense) if self.remat else nn.Dense
        x = dense(8)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(
                x
            )
        x = nn.relu(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return dense(CLASSES)(x)


class NormState(TrainState):
    """As in Flax's ImageNet example: BatchNorm statistics alongside the parameters."""

    batch_stats: Any = struct.field(default_factory=dict)


class ScaledState(TrainState):
    """As in Flax's mixed-precision ImageNet example: `dynamic_scale` in the state."""

    dynamic_scale: Any = None


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()


def momentum() -> optax.GradientTransformation:
    return optax.sgd(0.1, momentum=0.9)


def linen_state(
    model: MLP, tx: optax.GradientTransformation, cls: Any = TrainState, **extra: Any
) -> Any:
    variables = model.init(jax.random.key(0), jnp.ones((1, WIDTH)), train=False)
    if "batch_stats" in variables:
        extra["batch_stats"] = variables["batch_stats"]
    return cls.create(apply_fn=model.apply, params=variables["params"], tx=tx, **extra)


def compute_metrics(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    metrics = {
        "loss": cross_entropy(logits, labels),
        "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels),
    }
    return lax.pmean(metrics, axis_name="batch")


def pmap_style(
    tx: Callable[[], optax.GradientTransformation] = momentum, *, jit: bool = False, **model: Any
) -> Any:
    """As in Flax's examples: the step averages gradients and metrics."""

    def build(ranks: int) -> tuple[Any, Any]:
        state = linen_state(MLP(**model), tx())

        def train_step(state: TrainState, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                logits = state.apply_fn({"params": params}, batch["image"])
                return cross_entropy(logits, batch["label"]), logits

            (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            grads = lax.pmean(grads, axis_name="batch")
            return state.apply_gradients(grads=grads), compute_metrics(logits, batch["label"])

        return jax.jit(train_step) if jit else train_step, state

    return build


def batch_norm(*, averaged: bool = False, axis_name: str | None = None) -> Any:
    """Statistics: rank-local, averaged (`sync_batch_stats`), or synced in the forward pass."""

    def build(ranks: int) -> tuple[Any, Any]:
        state = linen_state(MLP(norm=True, axis_name=axis_name), momentum(), NormState)

        def train_step(state: NormState, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                variables = {"params": params, "batch_stats": state.batch_stats}
                logits, updates = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
                penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
                return cross_entropy(logits, batch["label"]) + 1e-4 * penalty, (updates, logits)

            (_, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
            grads = lax.pmean(grads, axis_name="batch")
            stats = updates["batch_stats"]
            if averaged:
                stats = lax.pmean(stats, axis_name="batch")
            state = state.apply_gradients(grads=grads, batch_stats=stats)
            return state, compute_metrics(logits, batch["label"])

        return train_step, state

    return build


def dropout(ranks: int) -> tuple[Any, Any]:
    """The random key is folded with step and rank, as `pmap` code does."""
    state = (linen_state(MLP(dropout=0.5), optax.adam(1e-2)), jax.random.key(7))

    def train_step(state: Any, batch: Any) -> Any:
        train, key = state
        mine = jax.random.fold_in(jax.random.fold_in(key, train.step), lax.axis_index("batch"))

        def loss_fn(params: Any) -> Any:
            logits = train.apply_fn({"params": params}, batch["image"], rngs={"dropout": mine})
            return cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(train.params)
        return (train.apply_gradients(grads=lax.pmean(grads, "batch")), key), lax.pmean(
            loss, "batch"
        )

    return train_step, state


def dynamic_scale(ranks: int) -> tuple[Any, Any]:
    """fp16 with `DynamicScale(axis_name=...)`, as in Flax's ImageNet example.

    The initial scale overflows.
    """
    state = linen_state(
        MLP(), momentum(), ScaledState, dynamic_scale=dynamic_scale_lib.DynamicScale(scale=2.0**17)
    )

    def train_step(state: ScaledState, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
            logits = state.apply_fn({"params": half}, batch["image"].astype(jnp.float16))
            return cross_entropy(logits.astype(jnp.float32), batch["label"])

        grad_fn = state.dynamic_scale.value_and_grad(loss_fn, axis_name="batch")
        scale, is_finite, loss, grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads)
        select = partial(jnp.where, is_finite)
        new = new.replace(
            opt_state=jax.tree.map(select, new.opt_state, state.opt_state),
            params=jax.tree.map(select, new.params, state.params), dynamic_scale=scale,
        )  # fmt: skip
        return new, {"loss": lax.pmean(loss, "batch"), "scale": scale.scale}

    return train_step, state


def exchange_in(wrap: Callable[[optax.GradientTransformation], Any]) -> Any:
    """The optimizer exchanges the gradients, and `wrap` wraps that optimizer."""

    def build(ranks: int) -> tuple[Any, Any]:
        mean = optax.stateless(lambda updates, _: lax.pmean(updates, "batch"))
        state = linen_state(MLP(), wrap(optax.chain(mean, momentum())))

        def train_step(state: TrainState, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                return cross_entropy(
                    state.apply_fn({"params": params}, batch["image"]), batch["label"]
                )

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), lax.pmean(loss, "batch")

        return train_step, state

    return build


def only_good_gradients(tx: optax.GradientTransformation) -> Any:
    return optax.apply_if_finite(tx, max_consecutive_errors=3)


def nnx_functional(ranks: int) -> tuple[Any, Any]:
    """NNX, split by hand: the graph is static, and the state goes in and comes out."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.one = nnx.Linear(WIDTH, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.two = nnx.Linear(8, CLASSES, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.two(nnx.relu(self.norm(self.one(x))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, momentum(), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(
            lambda m: cross_entropy(m(batch["image"]), batch["label"])
        )(model)
        optimizer.update(model, lax.pmean(grads, "batch"))
        return nnx.state((model, optimizer)), lax.pmean(loss, "batch")

    return train_step, state
