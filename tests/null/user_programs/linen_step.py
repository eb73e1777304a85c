"""An ordinary training step of a Flax Linen model, over MPI."""

from typing import Any, NamedTuple, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross
from jaxcross import exchange


class State(NamedTuple):
    params: Any  # Flax and optax annotate it with different types
    opt_state: optax.OptState


class MLP(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.relu(nn.Dense(self.hidden)(x)))


world = jaxcross.initialize()
assert_type(world, jaxcross.World)
model = MLP(hidden=32)
optimizer = optax.chain(exchange.mean(axes="batch"), optax.adam(1e-3))


@jaxcross.crossover(axes="batch", cut=4, donate_argnames="state")
def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        predicted: Any = model.apply(params, x)
        return jnp.mean((predicted - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state), {"loss": jax.lax.pmean(loss, "batch")}


params = model.init(jax.random.key(0), jnp.ones((1, 16)))
state = State(params, optimizer.init(params))
rng = np.random.default_rng(world.rank)
for _ in range(10):
    x = jnp.asarray(rng.normal(size=(8, 16)))
    state, metrics = train_step(state, x, y=x[:, :1])
    assert_type(state, State)
    print(metrics["loss"])
program = train_step.latest_program
if program is not None:
    print(program, len(program.exchanges))
