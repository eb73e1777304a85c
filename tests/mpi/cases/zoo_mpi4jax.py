"""Steps that call mpi4jax: all-reduce as in its manual, and messages that differ by rank."""

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

import jaxcross
from jaxcross.program import stages

world = jaxcross.initialize(stall_timeout_s=120)
comm = MPI.COMM_WORLD.Dup()
rank, size = world.rank, world.size
x = jnp.arange(6.0) + 10 * rank


def train_step(w, x):
    grads = jax.grad(lambda w: jnp.sum((w * x) ** 2))(w)
    total = mpi4jax.allreduce(grads, op=MPI.SUM, comm=comm)
    norm = mpi4jax.allreduce(jnp.max(jnp.abs(total)), op=MPI.MAX, comm=comm)
    return w - total / norm, mpi4jax.allgather(norm + rank, comm=comm)


w = jnp.ones(6)
grads = sum(2 * np.ones(6) * (np.arange(6.0) + 10 * r) ** 2 for r in range(size))
for cut in ("whole", 1, 2, 3):
    step = jaxcross.crossover(train_step, axes="batch", cut=cut, bucket_bytes=0)
    assert [e.op for e in stages.cut(step.trace(w, x), cut).exchanges] == [
        "mpi.allreduce",
        "mpi.allreduce",
        "mpi.allgather",
    ]
    new, norms = step(w, x)
    np.testing.assert_allclose(new, 1 - grads / grads.max(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(norms, grads.max() + np.arange(size), rtol=1e-6)


def talk(x):
    # After receiving a message, rank 0 sends two. The first of these is computed from the received
    # data, whereas the second one doesn't depend on it. If only data dependencies determined the
    # order, the second one could be sent first.
    if rank == 0:
        got = mpi4jax.recv(jnp.zeros(6), source=1, tag=1, comm=comm)
        mpi4jax.send(jnp.sin(jnp.cumsum(got)), dest=1, tag=1, comm=comm)
        mpi4jax.send(x, dest=1, tag=1, comm=comm)
        return got, x
    mpi4jax.send(x, dest=0, tag=1, comm=comm)
    first = mpi4jax.recv(jnp.zeros(6), source=0, tag=1, comm=comm)
    second = mpi4jax.recv(jnp.zeros(6), source=0, tag=1, comm=comm)
    return first, second


theirs = jnp.arange(6.0) + 10 * (1 - rank)
for cut in ("whole", 1, 3):
    program = stages.cut(jaxcross.crossover(talk, axes="batch").trace(x), cut)
    execution = stages.compile(program, cache=world.executables).execution([x])
    for segment in program.segments:
        execution.run(segment.index)
    first, second = execution.outputs()
    np.testing.assert_allclose(first, theirs if rank == 0 else np.sin(np.cumsum(x)), rtol=1e-6)
    np.testing.assert_array_equal(second, x if rank == 0 else theirs)
print("mpi4jax done", flush=True)
