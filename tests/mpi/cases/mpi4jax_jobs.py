"""Every rank: jobs whose steps call mpi4jax, and a job that they must not affect."""

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

import jaxcross

world = jaxcross.initialize(stall_timeout_s=60)
rank, size = world.rank, world.size
comm = MPI.COMM_WORLD
x = jnp.arange(4.0) + rank


def walls(x):
    if rank < size - 1:
        mpi4jax.send(x, rank + 1, comm=comm)
    return x + mpi4jax.recv(x, rank - 1, comm=comm) if rank else x


def run(**functions):
    """Runs each function as a job of one runner. Returns the jobs, and what `run` raised."""
    runner = jaxcross.Runner()
    jobs = {name: runner.add(name, function) for name, function in functions.items()}
    try:
        runner.run()
    except Exception as error:
        return jobs, str(error)
    return jobs, ""


def repeated(function, start, n=10):
    """A job that calls a step repeatedly, each time with the result of the call before."""

    def job_function(job):
        step = jaxcross.crossover(function, axes="r")
        state = job.restore(start, mode="local")
        for _ in range(n):
            state = step(state)
        return state

    return job_function


def train(w):
    return w - 0.1 * jax.lax.pmean(jnp.sin(w + rank), "r")


def check_train(job):
    state, step = jnp.ones(3), jaxcross.crossover(train, axes="r")
    for _ in range(10):
        state = step(state)
    np.testing.assert_array_equal(job.state, state)
