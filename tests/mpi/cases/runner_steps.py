"""Every rank: step, data and loop of the runner's cases, and the same training without a runner."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross

WORLD = jaxcross.initialize(stall_timeout_s=60)
RATES = {"lr-0.1": 0.1, "lr-0.4": 0.4, "lr-0.2": 0.2}
TX = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.9)


def make_step(cut="whole", explode_at=None):
    """A small network that synchronizes statistics first, and then averages its gradients."""

    def step(state, batch):
        params, opt_state = state

        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["w1"])
            mean = jax.lax.pmean(hidden.mean(0), "batch")
            return jnp.mean((((hidden - mean) @ params["w2"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        grads = jax.lax.pmean(grads, "batch")
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {
            "loss": jax.lax.pmean(value, "batch")
        }

    return jaxcross.crossover(step, axes="batch", cut=cut, donate_argnums=0)


def init(rate):
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w1": jax.random.normal(keys[0], (8, 16)), "w2": jax.random.normal(keys[1], (16, 1))}
    opt_state = TX.init(params)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    return params, opt_state


def data(n, seed=0):
    rng = np.random.default_rng(100 * seed + WORLD.rank)
    for _ in range(n):
        yield {
            "x": rng.normal(size=(4, 8)).astype(np.float32),
            "y": rng.normal(size=(4, 1)).astype(np.float32),
        }


def train(job, step, rate, n):
    state = job.restore(init(rate))
    for batch in job.batches(data(n)):
        state, metrics = step(state, batch)
        job.log(metrics)
    return state


def alone(step, rate, n):
    state = init(rate)
    for batch in data(n):
        state, _ = step(state, batch)
    return state


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))
