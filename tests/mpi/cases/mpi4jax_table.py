"""Compares steps under `crossover` with `jax.jit`, bit for bit, for every call of mpi4jax.

Some steps make different calls on different ranks.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

import jaxcross

world = jaxcross.initialize(stall_timeout_s=60)
rank, size = world.rank, world.size
comm = MPI.COMM_WORLD
half = comm.Split(rank % 2, -rank)  # the halves don't overlap, and number their ranks backwards
alone = MPI.COMM_SELF
status = MPI.Status()
x = jnp.cos(jnp.arange(6.0)) + rank
up, down = (rank + 1) % size, (rank - 1) % size


def walls(x):
    """Ranks in a line. Those at the ends have only one neighbour."""
    if rank > 0:
        mpi4jax.send(x[:1], rank - 1, tag=1, comm=comm)
    if rank < size - 1:
        x = jnp.sin(x) + mpi4jax.recv(x[:1], rank + 1, tag=1, comm=comm)
        mpi4jax.send(x[-1:], rank + 1, tag=2, comm=comm)
    if rank > 0:
        x = x * mpi4jax.recv(x[:1], rank - 1, tag=2, comm=comm)
    return x


def worker_and_master(x):
    if rank:
        mpi4jax.send(x * rank, 0, tag=rank, comm=comm)
        return mpi4jax.recv(x, 0, comm=comm)
    parts = [mpi4jax.recv(x, r, tag=r, comm=comm) for r in range(1, size)]
    for r in range(1, size):
        mpi4jax.send(sum(parts), r, comm=comm)
    return x


def any_source(x):
    if rank:
        mpi4jax.send(x, 0, comm=comm)
        return x
    got = [mpi4jax.recv(x, comm=comm, status=status) for _ in range(1, size)]
    return functools.reduce(jnp.maximum, got)  # in whatever order the messages arrive


def in_loop(x):
    return jax.lax.fori_loop(
        0,
        70,
        lambda _, c: jnp.sin(mpi4jax.sendrecv(c, c, np.int64(down), np.int64(up), comm=comm)),
        x,
    )


def in_while(x):
    def more(carry):
        return carry[1] < 3

    return jax.lax.while_loop(
        more, lambda c: (mpi4jax.allreduce(c[0], MPI.SUM, comm=comm) / size, c[1] + 1), (x, 0)
    )[0]


def in_branch(x):
    return jax.lax.cond(
        x[1] > -9, lambda v: mpi4jax.allreduce(v, MPI.SUM, comm=half), lambda v: v, x
    )


def tags_overtake(x):
    if rank == 0:
        mpi4jax.send(x, size - 1, tag=5, comm=comm)
        mpi4jax.send(x + 1, size - 1, tag=6, comm=comm)
    if rank == size - 1:
        late = mpi4jax.recv(x, 0, tag=6, comm=comm)
        return late - 2 * mpi4jax.recv(x, 0, tag=5, comm=comm)
    return mpi4jax.allreduce(x, MPI.SUM, comm=alone)  # in a job, every rank must make some call


def both_fronts(x):
    y = mpi4jax.sendrecv(x, x, np.int64(down), np.int64(up), comm=comm)
    return jax.lax.pmean(jnp.exp(-y), "r") + mpi4jax.bcast(y, size - 1, comm=comm)


def two_communicators(x):
    first = mpi4jax.allreduce(x, MPI.MAX, comm=comm)
    return mpi4jax.allreduce(first * x, MPI.SUM)  # mpi4jax's own communicator, with the same ranks


STEPS = {
    "allgather": lambda x: mpi4jax.allgather(x, comm=comm),
    "allreduce": lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=half),
    "alltoall": lambda x: mpi4jax.alltoall(jnp.stack([x + r for r in range(size)]), comm=comm),
    "bcast": lambda x: mpi4jax.bcast(x, size - 1, comm=comm),
    "barrier": lambda x: (mpi4jax.barrier(comm=comm), x * 2)[1],
    "gather": lambda x: mpi4jax.gather(x, 0, comm=comm),
    "reduce": lambda x: mpi4jax.reduce(x, MPI.PROD, size - 1, comm=comm),
    "scan": lambda x: mpi4jax.scan(x, MPI.SUM, comm=comm),
    "scatter": lambda x: mpi4jax.scatter(
        jnp.stack([x * r for r in range(size)]) if rank == 0 else x, 0, comm=comm
    ),
    "sendrecv": lambda x: mpi4jax.sendrecv(
        x, x, np.int64(down), np.int64(up), comm=comm, status=status
    ),
    # Rank 0 receives from no rank here, so its result is undefined and may be NaN.
    "nowhere": lambda x: jnp.where(
        rank > 0,
        mpi4jax.sendrecv(
            x, x, down if rank else MPI.PROC_NULL, up if up else MPI.PROC_NULL, comm=comm
        ),
        0,
    ),
    "alone": lambda x: mpi4jax.allgather(x, comm=alone),
    "gradient": lambda x: jax.grad(
        lambda v: mpi4jax.allreduce(jnp.sin(v), MPI.SUM, comm=comm).sum()
    )(x),
    **{
        f.__name__: f
        for f in (
            walls,
            worker_and_master,
            any_source,
            in_loop,
            in_while,
            in_branch,
            tags_overtake,
            both_fronts,
            two_communicators,
        )
    },
}


def check_alone():
    for name, function in STEPS.items():
        want = None if name == "both_fronts" else jax.block_until_ready(jax.jit(function)(x))
        step = jaxcross.crossover(function, axes="r")
        for value in (x, x[:4], x):  # compiled again, then found in the cache
            got = jax.block_until_ready(step(value))
        if want is not None:
            np.testing.assert_array_equal(got, want, err_msg=name)
        program = step.latest_program
        assert program is not None
        assert len(program.collectives) == 1, name
        if name == "sendrecv":
            assert status.Get_source() == down
    print("alone done", flush=True)


def check_jobs():
    """All steps as jobs of one runner, taking turns with a job that exchanges over named axes."""
    want = {
        name: jax.block_until_ready(jaxcross.crossover(f, axes="r")(x)) for name, f in STEPS.items()
    }

    def repeat(job, name):
        step = jaxcross.crossover(STEPS[name], axes="r")
        state = job.restore(x, mode="local")
        for _ in range(3):
            got = step(state)
        return got

    def train(job):
        step = jaxcross.crossover(
            lambda w, x: w - 0.1 * jax.lax.pmean(jnp.sin(w * x), "r"), axes="r"
        )
        w = job.restore(jnp.ones(6))
        for _ in range(20):
            w = step(w, x)
        return w

    runner = jaxcross.Runner()
    jobs = {name: runner.add(name, repeat, {"name": name}) for name in STEPS}
    trained = runner.add("train", train)
    runner.run()
    for name, job in jobs.items():
        np.testing.assert_array_equal(job.state, want[name], err_msg=name)
    w, step = (
        jnp.ones(6),
        jaxcross.crossover(lambda w, x: w - 0.1 * jax.lax.pmean(jnp.sin(w * x), "r"), axes="r"),
    )
    for _ in range(20):
        w = step(w, x)
    np.testing.assert_array_equal(trained.state, w)
    assert world.job_comms.in_use() == []
    print("jobs done", flush=True)


{"alone": check_alone, "jobs": check_jobs}[sys.argv[1]]()
