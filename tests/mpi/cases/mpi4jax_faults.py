"""Steps whose mpi4jax calls don't match, ranks that fail or make no call, calls outside steps."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from jax import lax
from mpi4jax_jobs import check_train, comm, rank, repeated, run, size, train, walls, world, x
from mpi4py import MPI

import jaxcross


def opposite_orders():
    """Some ranks call over rows before columns and others after, which would deadlock."""
    row, column = comm.Split(rank // 2, rank), comm.Split(rank % 2, rank)
    first, second = (column, row) if rank in (0, 3) else (row, column)

    def step(x):
        along = mpi4jax.allreduce(x, MPI.SUM, comm=first)
        return mpi4jax.allreduce(along, MPI.SUM, comm=second)

    def check(text):
        assert "would wait for each other forever" in text, text
        for r in range(4):
            assert f"rank {r} is blocked in its call 1 of 2: `allreduce`" in text, text
        assert text.count("mpi4jax_faults.py") == 4, text

    try:
        jaxcross.crossover(step, axes="r")(x)
    except jaxcross.ExchangeError as error:
        check(str(error))
    else:
        raise AssertionError("no error")
    jobs, text = run(bad=repeated(step, x), good=repeated(train, jnp.ones(3)))
    check(text)
    assert [job.status for job in jobs.values()] == ["failed", "ended"]
    check_train(jobs["good"])


def a_shorter_message():
    def step(x):
        if rank == 0:
            mpi4jax.send(x[:3], 1, comm=comm)
            return x
        return mpi4jax.recv(x, 0, comm=comm)

    _, text = run(bad=repeated(step, x))
    assert (
        "`send` of float32[3] to rank 1" in text and "`recv` of float32[4] from rank 0" in text
    ), text


def a_rank_fails_before_its_calls():
    """A rank that fails makes its calls with zeros, so all ranks reach the vote and leave.

    No rank's state changes.
    """

    def check(v):
        if rank == 1 and v.sum() > 100:
            raise ValueError("too large")
        return v

    def step(x):
        y = jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.minimum(walls(c), 50) + 1, y)

    jobs, text = run(bad=repeated(step, x, n=40), good=repeated(train, jnp.ones(3)))
    assert "too large" in text, text
    assert [job.status for job in jobs.values()] == ["failed", "ended"], text
    check_train(jobs["good"])
    state = x
    plain = jax.jit(
        lambda c: jax.lax.fori_loop(0, 3, lambda _, c: jnp.minimum(walls(c), 50) + 1, c)
    )
    for _ in range(jobs["bad"].step):
        state = plain(state)
    assert 0 < jobs["bad"].step < 40
    np.testing.assert_array_equal(jobs["bad"].state, state)


def a_rank_without_calls():
    """Outside a job, the rank just computes. In a job, it must declare that it takes turns."""

    def step(x):
        if rank == 0:
            mpi4jax.send(x, 1, comm=comm)
        return mpi4jax.recv(x, 0, comm=comm) if rank == 1 else x + 1

    np.testing.assert_array_equal(
        jaxcross.crossover(step, axes="r")(x), x - 1 if rank == 1 else x + 1
    )
    jobs, text = run(bad=repeated(step, x), good=repeated(train, jnp.ones(3)))
    assert "mpi4jax.barrier(comm=MPI.COMM_SELF)" in text, text
    check_train(jobs["good"])

    def remedied(x):
        mpi4jax.barrier(comm=MPI.COMM_SELF)
        return step(x)

    jobs, text = run(one=repeated(remedied, x), good=repeated(train, jnp.ones(3)))
    assert not text, text
    check_train(jobs["good"])


def eager_calls_in_another_job():
    """Eager calls use the user's communicator, and the step's calls use the job's own."""

    def step(x):
        return mpi4jax.allreduce(jnp.sin(x), MPI.SUM, comm=comm)

    def eager(job):
        total = jnp.zeros(5)
        for n in range(40):
            total = total + mpi4jax.allreduce(jnp.arange(5.0) + n + rank, MPI.SUM, comm=comm)
        return jax.block_until_ready(total)

    jobs, text = run(
        step=repeated(step, jnp.ones(1000), n=40),
        again=repeated(step, jnp.ones(7), n=40),
        eager=eager,
    )
    assert not text, text
    want = sum(size * (jnp.arange(5.0) + n) + size * (size - 1) / 2 for n in range(40))
    np.testing.assert_array_equal(jobs["eager"].state, want)
    for name, count in (("step", 1000), ("again", 7)):
        state = jnp.ones(count)
        for _ in range(40):
            state = jax.jit(step)(state)
        np.testing.assert_array_equal(jobs[name].state, state)
    assert (
        len(world.job_comms.for_job(jobs["step"]._engine))
        == len(world.job_comms.for_job(jobs["again"]._engine))
        == 1
    )
    # A later job gets a communicator of the jobs that have ended.
    jobs, text = run(later=repeated(step, jnp.ones(7)))
    assert not text, text
    assert len(world.job_comms.for_job(jobs["later"]._engine)) == 1
    assert sum(map(len, map(world.job_comms.for_job, (job._engine for job in jobs.values())))) == 1


def communicators_that_look_alike():
    first, second = comm.Dup(), comm.Dup()

    def step(x):
        return mpi4jax.allreduce(x, MPI.SUM, comm=first) + mpi4jax.allreduce(
            2 * x, MPI.SUM, comm=second
        )

    want = jax.jit(step)(x)
    np.testing.assert_array_equal(jaxcross.crossover(step, axes="r")(x), want)
    _, text = run(bad=repeated(step, x, n=1))
    assert "comm.Set_name" in text, text
    first.Set_name("first"), second.Set_name("second")
    jobs, text = run(named=repeated(step, x, n=1))
    assert not text, text
    np.testing.assert_array_equal(jobs["named"].state, want)


def batches_of_other_shapes():
    """A shorter batch on one rank is fine if all ranks make the same calls.

    So are different shapes on all ranks if the calls differ.
    """

    def mean(w, batch):
        return w - mpi4jax.allreduce(jnp.mean(batch) * w, MPI.SUM, comm=comm)

    def function(job):
        step, domain = jaxcross.crossover(mean, axes="r"), jaxcross.crossover(walls, axes="r")
        w, lines = jnp.ones(3), []
        for n in range(6):
            w = step(w, jnp.ones(3 if n == 3 and rank == 0 else 5) * 0.1)
            lines.append(domain(jnp.arange(float(4 + n // 2)) + rank))
        return w, lines

    class Outside:
        """A stand-in for the job, without a runner."""

    w, lines = function(Outside())
    jobs, text = run(job=function)
    assert not text, text
    for got, want in zip(
        jax.tree.leaves(jobs["job"].state), jax.tree.leaves((w, lines)), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    for n, line in enumerate(lines):
        own = jnp.arange(float(4 + n // 2)) + rank
        np.testing.assert_array_equal(line, own + own - 1 if rank else own)


def values_that_are_not_finite():
    """The job's policy applies to values that a call received, even if the step drops them."""

    def step(x):
        got = walls(x)
        return jnp.where(jnp.isfinite(got), x + 1, x + 1), jnp.log(
            0 * x[:2]
        )  # a result that is infinite in every step

    def function(job, policy):
        job.nonfinite = policy
        crossed = jaxcross.crossover(step, axes="r")
        state = job.restore(x, mode="local")
        for n in range(5):
            state, _ = crossed(jnp.full(4, jnp.nan) if n == 4 and rank == 0 else state)
        return state

    jobs, text = run(eject=partial(function, policy="eject"), skip=partial(function, policy="skip"))
    assert not text, text
    ejected, skipped = jobs.values()
    assert (ejected.status, ejected.step) == ("ejected", 4), (ejected.status, ejected.error)
    np.testing.assert_array_equal(ejected.state, x + 4)
    assert (skipped.status, skipped.step, skipped.skipped) == ("ended", 5, 1), (
        skipped.status,
        skipped.error,
    )
    np.testing.assert_array_equal(skipped.state, jnp.full(4, jnp.nan) if rank == 0 else x + 4)


def groups_with_steps_of_their_own():
    """Outside a runner, ranks agree only with the ranks they exchange with.

    Here these are pairs, and the other pairs do something else.
    """
    pair = comm.Split(rank // 2, rank)
    for n in range(1 + 2 * (rank // 2)):
        step = jaxcross.crossover(
            lambda x, n=n: mpi4jax.allreduce(x * n, MPI.SUM, comm=pair), axes="r"
        )
        np.testing.assert_array_equal(step(x), n * (2 * jnp.arange(4.0) + 4 * (rank // 2) + 1))
    if rank:  # rank 0 receives each rank's message in a separate step
        jaxcross.crossover(lambda x: mpi4jax.send(x, 0, tag=rank, comm=comm), axes="r")(x)
    else:
        got = [
            jaxcross.crossover(lambda x, r=r: mpi4jax.recv(x, tag=r, comm=comm), axes="r")(x)
            for r in (1, 2, 3)
        ]
        np.testing.assert_array_equal(jnp.stack(got), jnp.arange(4.0) + jnp.arange(1.0, 4)[:, None])
    total = jaxcross.crossover(lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=comm), axes="r")(x)
    np.testing.assert_array_equal(total, 4 * jnp.arange(4.0) + 6)


def a_chain_through_all_ranks():
    """An error between two ranks reaches ranks that don't exchange with either of them."""

    def step(x, wrong):
        if rank:
            x = mpi4jax.recv(x, rank - 1, tag=2 if wrong and rank == 1 else 1, comm=comm)
        if rank < size - 1:
            mpi4jax.send(x + 1, rank + 1, tag=1, comm=comm)
        return x

    crossed = jaxcross.crossover(step, axes="r", static_argnums=1)
    np.testing.assert_array_equal(crossed(jnp.zeros(2), False), jnp.full(2, rank))
    try:
        crossed(jnp.zeros(2), True)
    except jaxcross.ExchangeError as error:
        assert (
            "rank 1 is blocked in its call 1 of 2: `recv` of float32[2] from rank 0, receive tag 2"
            in str(error)
        )
    else:
        raise AssertionError("no error")
    np.testing.assert_array_equal(crossed(jnp.zeros(2), False), jnp.full(2, rank))


def numbers_that_mpi_does_not_have():
    """MPI would terminate all ranks. Here the step is refused with its line; the next one works."""
    part = comm.Split(0 if rank == 0 else MPI.UNDEFINED)
    wrong = {
        "`root` of `mpi4jax.bcast` must be a rank of its communicator, 0 to 1, got 9, at ": (
            lambda x: mpi4jax.bcast(x, 9, comm=comm)
        ),
        "`dest` of `mpi4jax.send` must be a rank of its communicator, 0 to 1, got 2, at ": (
            lambda x: mpi4jax.send(x, 2, comm=comm)
        ),
        "`source` of `mpi4jax.recv` must be a rank of its communicator, 0 to 1, got -7, at ": (
            lambda x: mpi4jax.recv(x, -7, comm=comm)
        ),
        "`tag` of `mpi4jax.recv` must be 0 or more, got -5, at ": lambda x: mpi4jax.recv(
            x, 0, tag=-5, comm=comm
        ),
        "`sendtag` of `mpi4jax.sendrecv` must be 0 or more, got -1, at ": (
            lambda x: mpi4jax.sendrecv(x, x, 1 - rank, 1 - rank, sendtag=-1, comm=comm)
        ),
    }
    if rank == 1:
        wrong["`mpi4jax.allreduce` is called with `MPI.COMM_NULL`, at "] = lambda x: (
            mpi4jax.allreduce(x, MPI.SUM, comm=part)
        )
    for message, step in wrong.items():
        try:
            jaxcross.crossover(step, axes="r")(x)
        except jaxcross.ExchangeError as error:
            assert str(error).startswith(message) and "mpi4jax_faults.py" in str(error), error
        else:
            raise AssertionError(f"no error: {message}")
    total = jaxcross.crossover(lambda x: mpi4jax.allreduce(x, MPI.SUM, comm=comm), axes="r")(x)
    np.testing.assert_array_equal(total, 2 * jnp.arange(4.0) + 1)


def a_shorter_batch_where_calls_differ():
    """Only one rank's batch is shorter, and it continues with the calls that were agreed."""

    def step(state, batch):
        state = state + jnp.mean(batch)
        if rank == 0:
            mpi4jax.send(state, 1, comm=comm)
            return state
        return state + mpi4jax.recv(state, 0, comm=comm)

    def train(step):
        state = jnp.zeros(3)
        for n in range(6):
            state = step(state, jnp.ones(3 if n == 3 and rank == 0 else 5) * 0.5)
        return state

    want = train(jax.jit(step))
    np.testing.assert_array_equal(train(jaxcross.crossover(step, axes="r")), want)
    crossed = jaxcross.crossover(step, axes="r")
    jobs, text = run(job=lambda job: train(crossed))
    assert not text, text
    np.testing.assert_array_equal(jobs["job"].state, want)


def conditionals_of_both_kinds():
    """The host or all ranks decide a `cond` that calls mpi4jax and exchanges over a named axis."""

    def both(v):
        return lax.psum(v, "r") + mpi4jax.allreduce(v, MPI.SUM, comm=comm)

    def step(p, v):
        return lax.cond(p, both, lambda v: v, v), lax.psum(100 * v, "r")

    def agreed(p, v):
        return step(lax.pmax(p, "r"), v)

    def in_a_loop(v):
        """Ranks disagree at a conditional that only has named axes, so all of them run the branch,
        as under `vmap`.
        """

        def body(c, _):
            c = 0.5 * mpi4jax.allreduce(c, MPI.SUM, comm=comm)
            return lax.cond(c + 10 * rank > 5, lambda c: c + lax.psum(c, "r"), lambda c: c, c), None

        return lax.scan(body, v, None, length=3)[0], lax.psum(100 * v, "r")

    def in_a_loop_apart(v):
        return lax.scan(
            lambda c, _: (lax.cond(c + 10 * rank > 5, both, lambda c: c, c), None),
            v,
            None,
            length=2,
        )[0]

    v = jnp.float32(1 + rank)
    total = size * (size + 1) / 2
    for function, p, wanted in (
        (step, True, 2 * total),
        (step, False, 1 + rank),
        (agreed, rank == 0, 2 * total),
        (agreed, False, 1 + rank),
    ):
        got = jaxcross.crossover(function, axes="r")(jnp.bool_(p), v)
        assert [*map(float, got)] == [wanted, 100 * total], (function, p, got)

    def oracle(v):
        def body(c, _):
            c = 0.5 * lax.psum(c, "r")
            return lax.cond(
                c + 10 * lax.axis_index("r") > 5, lambda c: c + lax.psum(c, "r"), lambda c: c, c
            ), None

        return lax.scan(body, v, None, length=3)[0], lax.psum(100 * v, "r")

    want = jax.vmap(oracle, axis_name="r")(jnp.arange(1.0, size + 1))
    got = jaxcross.crossover(in_a_loop, axes="r")(v)
    assert [float(x) for x in got] == [float(x[rank]) for x in want], (got, want)
    by_data = lambda v: step(v > 1, v)  # noqa: E731
    for function in (by_data, in_a_loop_apart):
        try:
            jaxcross.crossover(function, axes="r")(v)
        except jaxcross.CutError as error:
            assert "mpi4jax_faults.py" in str(error) and "ranks may take different branches" in str(
                error
            ), error
        else:
            raise AssertionError("no error")


for name in sys.argv[1:]:
    globals()[name]()
    print(f"{name} done", flush=True)
