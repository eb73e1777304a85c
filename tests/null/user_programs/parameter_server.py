"""Asynchronous training with a parameter server, both alone and as a job."""

import math
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross

Params = dict[str, jax.Array]
world = jaxcross.initialize()


@jax.jit
def gradient(params: Params, x: np.ndarray) -> Params:
    return jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)


def initial() -> Params:
    return {"w": jnp.ones((4, 3))}


def train(job: jaxcross.JobContext, staleness: int) -> Params:
    rng = np.random.default_rng(world.rank)
    with jaxcross.ParameterServer(initial(), optax.sgd(0.1), staleness=staleness) as server:
        params = server.params
        for _ in range(10):
            params = server.push_pull(gradient(params, rng.normal(size=(8, 4))))
            job.log({"clock": server.clock})
    return server.params


with jaxcross.ParameterServer(
    initial(), optax.adam(1e-2), staleness=math.inf, world=world
) as alone:
    params = alone.push_pull(gradient(alone.params, np.ones((8, 4))))
    assert_type(params, Params)
print(alone.deterministic, alone.clocks)

with jaxcross.Runner(world) as runner:
    runner.add("stale", train, {"staleness": 2})
    try:
        runner.run()
    except (jaxcross.ExchangeError, jaxcross.JobError) as error:
        print(error)
