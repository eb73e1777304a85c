"""A Flax NNX model that is updated in place by its step, and the same step on its state."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxcross


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


def update(model: MLP, optimizer: nnx.Optimizer[MLP], x: jax.Array) -> dict[str, jax.Array]:
    def loss_fn(model: MLP) -> jax.Array:
        return jnp.mean((model(x) - x[:, :1]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, jax.lax.pmean(grads, "batch"))
    return {"loss": jax.lax.pmean(loss, "batch")}


jaxcross.initialize(stall_timeout_s=60.0)
in_place = jaxcross.crossover(update, axes="batch")
model = MLP(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
metrics = in_place(model, optimizer, jnp.ones((8, 16)))
assert_type(metrics, dict[str, jax.Array])

graph, state = nnx.split((model, optimizer))


@jaxcross.crossover(axes={"host": -1, "local": 2}, static_argnames="scale", donate_argnums=0)
def functional(state: nnx.State, x: jax.Array, scale: float = 1.0) -> nnx.State:
    model, optimizer = nnx.merge(graph, state)

    def loss_fn(model: MLP) -> jax.Array:
        return scale * jnp.mean(model(x) ** 2)

    grads = nnx.grad(loss_fn)(model)
    optimizer.update(model, jax.lax.pmean(grads, ("host", "local")))
    return nnx.state((model, optimizer))


state = functional(state, jnp.ones((8, 16)), scale=0.5)
