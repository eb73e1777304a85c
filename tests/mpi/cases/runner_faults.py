"""Every rank: jobs that fail, differ between ranks or are interrupted, while another continues."""

import os
import re
import signal
import threading

import jax
import jax.numpy as jnp
import pytest
from runner_steps import WORLD, alone, data, init, make_step, same, train

import jaxcross
from jaxcross import JobError, Runner


def failure_of_one_job():
    step, last = make_step(), WORLD.size - 1

    def fn(job):
        state = job.restore(init(0.1))
        for batch in job.batches(data(6)):
            if job.step == 3 and WORLD.rank == last:
                raise ValueError("the loader failed")
            state, _ = step(state, batch)
            job.state = state

    runner = Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, {"step": step, "rate": 0.2, "n": 6})
    with pytest.raises(
        JobError,
        match=rf"^Job `bad` failed on rank {last} after step 3: ValueError: the loader failed\.",
    ):
        runner.run()
    assert bad.step == 3
    same(bad.state, alone(step, 0.1, 3))
    same(good.state, alone(step, 0.2, 6))


def failure_of_a_job_that_saves_nothing():
    """Every step donated the job's state, but that of the last committed step still exists."""
    step, last = make_step(), WORLD.size - 1

    def fn(job):
        state = job.restore(init(0.1))
        for batch in job.batches(data(6)):
            if job.step == 3 and WORLD.rank == last:
                raise ValueError("the loader failed")
            state, metrics = step(state, batch)
            job.log(metrics)
        return state

    runner = Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, {"step": step, "rate": 0.2, "n": 6})
    with pytest.raises(
        JobError,
        match=rf"^Job `bad` failed on rank {last} after step 3: ValueError: the loader failed\.",
    ):
        runner.run()
    assert bad.step == 3
    same(bad.state, alone(step, 0.1, 3))
    same(good.state, alone(step, 0.2, 6))


def unlike_exchanges():
    if WORLD.size == 1:
        return
    step = jaxcross.crossover(lambda s, b: s + jax.lax.pmean(b, "batch"), axes="batch")
    runner = Runner(WORLD)
    runner.add("bad", lambda job: step(jnp.float32(0), jnp.ones((2 + (WORLD.rank == 1),))))
    good = runner.add("good", train, {"step": make_step(), "rate": 0.2, "n": 4})
    with pytest.raises(
        jaxcross.ExchangeError, match=r"^Job `bad`, step 1: ranks 0 and 1 exchange different things"
    ) as error:
        runner.run()
    assert re.search(
        r"rank 0: psum batch float32\[2\], at .*runner_faults.py:\d+", str(error.value)
    )
    assert re.search(
        r"rank 1: psum batch float32\[3\], at .*runner_faults.py:\d+", str(error.value)
    )
    assert good.step == 4


def unlike_exchanges_alone():
    """Even without a runner, ranks compare their exchanges before compiling, and can continue."""
    if WORLD.size == 1:
        return
    step = jaxcross.crossover(lambda b: jax.lax.pmean(b, "batch"), axes="batch")
    with pytest.raises(
        jaxcross.ExchangeError, match=r"^ranks 0 and 1 exchange different things in `<lambda>`: "
    ) as error:
        step(jnp.ones(2 + (WORLD.rank == 1)))
    assert re.search(
        r"rank 0: psum batch float32\[2\], at .*runner_faults.py:\d+", str(error.value)
    )
    assert re.search(
        r"rank 1: psum batch float32\[3\], at .*runner_faults.py:\d+", str(error.value)
    )
    same(step(jnp.ones(4)), jnp.ones(4))


def unlike_shapes():
    """A shorter batch on one rank, with the same exchanges, concerns no other rank, unless a cut
    has to be chosen.
    """
    if WORLD.size == 1:
        return

    def make(cut):
        return jaxcross.crossover(
            lambda s, b: s + jax.lax.pmean(b.mean(), "batch"), axes="batch", cut=cut
        )

    def fn(job, step):
        state = jnp.float32(0)
        for n in range(6):
            state = step(
                state,
                jnp.full(5 if n in (2, 5) and WORLD.rank == 1 else 8, n + WORLD.rank, jnp.float32),
            )
        return state

    runner = Runner(WORLD)
    jobs = [runner.add(f"cut {cut}", fn, {"step": make(cut)}) for cut in ("whole", 2)]
    runner.run()
    for job in jobs:
        assert job.state == fn(None, make("whole"))

    runner = Runner(WORLD)
    bad = runner.add("bad", fn, {"step": make("auto")})
    good = runner.add("good", train, {"step": make_step(), "rate": 0.2, "n": 4})
    with pytest.raises(
        JobError,
        match="^Job `bad` does different things on different ranks after step 2: "
        ".*Or did shapes or types",
    ):
        runner.run()
    assert (bad.step, good.step) == (2, 4)


def failure_to_compile_on_one_rank():
    """One rank's compiler fails after all have agreed.

    The job ends on all ranks, and the other job continues.
    """
    last = WORLD.size - 1

    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        if WORLD.rank == last:
            state = jax.ffi.ffi_call(
                "a_target_that_this_rank_lacks", jax.ShapeDtypeStruct((3,), jnp.float32)
            )(state)
        return jax.lax.pmean(state, "batch")

    def fn(job):
        for batch in job.batches(data(3)):
            step(jnp.ones(3), batch)

    good_step, runner = make_step(), Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, {"step": good_step, "rate": 0.2, "n": 4})
    with pytest.raises(
        JobError, match=rf"^Job `bad` failed on rank {last} .*a_target_that_this_rank_lacks"
    ):
        runner.run()
    assert bad.step == 0
    same(good.state, alone(good_step, 0.2, 4))


def unlike_numbers_of_steps():
    if WORLD.size == 1:
        return
    step = make_step()

    def fn(job):
        state = job.restore(init(0.1))
        for batch in data(3 if WORLD.rank == 0 else 2):  # not `job.batches`, which would end both
            state, _ = step(state, batch)

    runner = Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, {"step": step, "rate": 0.2, "n": 4})
    with pytest.raises(
        JobError,
        match=r"^Job `bad` does different things on different ranks after step 2: rank 0 called",
    ):
        runner.run()
    assert bad.step == 2
    same(good.state, alone(step, 0.2, 4))


def data_that_raises_on_one_rank():
    step, last = make_step(), WORLD.size - 1

    def broken():
        yield from data(2)
        if WORLD.rank == last:
            raise OSError("disk gone")
        yield from data(2)

    def fn(job):
        state = job.restore(init(0.1))
        for batch in job.batches(broken()):
            state, _ = step(state, batch)

    runner = Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, {"step": step, "rate": 0.2, "n": 4})
    with pytest.raises(
        JobError,
        match=rf"^Job `bad` failed on rank {last} after .*OSError: disk gone \(raised by the data",
    ):
        runner.run()
    assert bad.step == 2
    same(good.state, alone(step, 0.2, 4))


def stray_threads():
    step, caught = make_step(), []

    def stray():
        try:
            step(init(0.1), next(data(1)))
        except JobError as error:
            caught.append(str(error))

    def fn(job):
        thread = threading.Thread(target=stray, name="mine")
        thread.start()
        thread.join()

    runner = Runner(WORLD)
    runner.add("a", fn)
    runner.run()
    assert len(caught) == 1
    assert "was called from thread `mine`" in caught[0]


def interrupt():
    for saves in (True, False):
        interrupted(saves)


def interrupted(saves):
    step = make_step()

    def endless(job):
        state = job.restore(init(0.1))
        for batch in job.batches(data(10**9)):
            if job.step == 5 and WORLD.rank == 0 and job.name == "a":
                os.kill(os.getpid(), signal.SIGINT)
            state, _ = step(state, batch)
            if saves:
                job.state = state
        return state

    runner = Runner(WORLD)
    for name in "ab":
        runner.add(name, endless)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    steps = WORLD.control.allgather_text(str([job.step for job in runner.jobs]))
    assert len(set(steps)) == 1, steps
    assert runner.jobs[0].step >= 5
    for job in runner.jobs:
        same(job.state, alone(step, 0.1, job.step))


def a_branch_at_different_calls():
    """In a job, the ranks detect that they take the exchanging branch at different calls."""
    if WORLD.size == 1:
        return
    every_third = jaxcross.crossover(
        lambda n, x: (
            n + 1,
            jax.lax.cond(n % 3 == 2, lambda v: jax.lax.pmean(v, "batch"), lambda v: v, x),
        ),
        axes="batch",
    )

    def fn(job, first):
        n, x = jnp.int32(first), jnp.ones(3)
        for _ in range(6):
            n, x = every_third(n, x)

    runner = Runner(WORLD)
    bad = runner.add("bad", fn, {"first": int(WORLD.rank == 1)})
    good = runner.add("good", train, {"step": make_step(), "rate": 0.2, "n": 4})
    with pytest.raises(
        jaxcross.ExchangeError,
        match="^Job `bad` takes a branch with exchanges at different calls: "
        "rank 0 in step 3, rank 1 in step 2",
    ):
        runner.run()
    assert (bad.status, good.status, good.step) == ("failed", "ended", 4)
    alike = Runner(WORLD)
    job = alike.add("alike", fn, {"first": 0})
    alike.run()
    assert (job.status, job.step) == ("ended", 6)
