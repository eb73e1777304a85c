"""A job that trains through a parameter server, on ranks that are threads, and its result."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.jobs.runner import Runner
from jaxcross.server import ParameterServer
from tests.support.fakes import run_ranks

SHAPES = {"w": (5, 3), "b": (3,), "s": (), "e": (0,)}


def parameters(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=shape), dtype) for k, shape in SHAPES.items()}


def gradient(params, rank, step):
    return jax.tree.map(
        lambda x: ((1 + rank) * (x - rank) * (0.5 + step % 2)).astype(x.dtype), params
    )


def constant(params, rank, step):
    return jax.tree.map(lambda x: jnp.full_like(x, rank + step), params)


def train(job, world, optimizer, staleness, steps=4, gradient=gradient):
    with ParameterServer(parameters(), optimizer, staleness=staleness, world=world) as server:
        params = server.params
        for step in range(steps):
            params = server.push_pull(gradient(params, world.rank, step))
            job.log({"loss": float(params["s"])})
    return server.params


def run(ranks, **jobs):
    """Runs the jobs, each with its arguments of `train`. Returns their final states, by rank."""

    def work(world):
        runner = Runner(world)
        for name, arguments in jobs.items():
            runner.add(name, train, {"world": world, **arguments})
        runner.run()
        return [job.state for job in runner.jobs]

    return run_ranks(ranks, work)


def synchronous(optimizer, ranks, steps=4):
    params = parameters()
    state = optimizer.init(params)
    for step in range(steps):
        grads = [gradient(params, rank, step) for rank in range(ranks)]
        mean = jax.tree.map(lambda *g: sum(g) / ranks, *grads)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, want)
