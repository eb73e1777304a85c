"""Every rank: jobs that book memory before their first step, over real exchanges.

Prints one line per case.
"""

import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross import JobError, Runner
from jaxcross.jobs.memory import PROCESS_BYTES

WORLD = jaxcross.initialize(stall_timeout_s=60)
LAST = WORLD.size - 1
SMALL, BIG = 20_011, 150_001


@jaxcross.crossover(axes="batch", donate_argnums=0)
def step(state, batch):
    def loss(w):
        return jnp.mean((jnp.tanh(batch * w) - 1) ** 2)

    w, momentum = state
    value, grads = jax.lax.pmean(jax.value_and_grad(loss)(w), "batch")
    momentum = 0.9 * momentum + grads
    return (w - 0.1 * momentum, momentum), {"loss": value}


def init(width):
    rng = np.random.default_rng(99)  # NumPy, because it compiles nothing
    return jnp.asarray(rng.normal(size=width), jnp.float32), jnp.asarray(
        np.zeros(width, np.float32)
    )


def data(width, n):
    rng = np.random.default_rng(WORLD.rank)
    for _ in range(n):
        yield rng.normal(size=width).astype(np.float32)


def train(job, width, n=4, first=lambda: None):
    state = job.restore(init(width))
    first()
    for batch in job.batches(data(width, n)):
        state, metrics = step(state, batch)
        job.log(metrics)
    return state


def same(job, other):
    for x, y in zip(jax.tree.leaves(job.state), jax.tree.leaves(other.state), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))
    assert job.history == other.history


def all_see(job, what):
    return bool(
        job.run_on_all_ranks(
            "all", lambda control: control.allreduce_min(np.array([what()], np.int64))
        )[0]
    )


def run(*widths, memory: int | str = "1 TB", **options):
    """Runs one job per width. Returns the runner, and the error on all ranks."""
    runner = Runner(WORLD, memory=memory, **options)
    for number, width in enumerate(widths):
        runner.add(f"job{number}", train, {"width": width})
    try:
        runner.run()
    except JobError as error:
        text = str(error)
    else:
        text = ""
    assert len(set(WORLD.control.allgather_text(text))) == 1, "one error on every rank"
    booked = WORLD.control.allgather_text(
        json.dumps([runner.booked_bytes, [job.status for job in runner.jobs]])
    )
    assert len(set(booked)) == 1, booked
    return runner, text


def refused(text, name, rank):
    # The vote that ends the job doesn't wait for a late thread, so its rank isn't in the text.
    begin = (
        rf"Job `{name}` failed on ranks? [\d, ]+ after step 0: JobError: "
        "it does not fit into the memory of rank "
    )
    assert re.match(f"{begin}{rank}: ", text), text


def a_job_too_many_fails_alone():
    """The other jobs' results are bit for bit those of a run without it."""
    two, _ = run(SMALL, SMALL)
    three, text = run(SMALL, SMALL, BIG, memory=two.booked_bytes)
    refused(text, "job2", 0)
    assert [(job.status, job.step) for job in three.jobs] == [
        ("ended", 4),
        ("ended", 4),
        ("failed", 0),
    ]
    assert three.booked_bytes == two.booked_bytes
    for job, other in zip(three.jobs, two.jobs, strict=False):
        same(job, other)
    assert re.search(
        r"Even alone, it needs [\d.]+ MB, which is too much\. "
        "To make it fit, run fewer jobs at once, ",
        text,
    )


def the_last_of_equal_jobs_is_refused():
    """Jobs that start together book memory in their order, whichever compiles first."""
    one, three = run(BIG)[0].booked_bytes, run(BIG, BIG, BIG)[0].booked_bytes
    came = threading.Event()
    runner = Runner(WORLD, memory=three - 1)

    def slow(job):
        with job._engine.preparing():
            came.wait()
        return train(job, BIG)

    runner.add("slow", slow)
    runner.add("b", train, {"width": BIG})
    runner.add("c", train, {"width": BIG, "first": came.set})
    with pytest.raises(JobError) as raised:
        runner.run()
    refused(str(raised.value), "c", 0)
    assert "It fits together with 1 of them: alone, it needs " in str(raised.value)
    assert one < runner.booked_bytes < three


def a_job_that_joins_is_refused():
    late = []

    def parent(job):
        state = job.restore(init(SMALL))
        for n, batch in enumerate(job.batches(data(SMALL, 6))):
            # By now this job has booked memory. Before, a failed job's state would count, too.
            if n == 1:
                late.append(runner.add("late", train, {"width": BIG}))
            state, metrics = step(state, batch)
            job.log(metrics)
        while not all_see(job, late[0].done.is_set):
            pass
        return state

    alone = Runner(WORLD)
    expected = alone.add("a", train, {"width": SMALL, "n": 6})
    alone.run()
    runner = Runner(WORLD, memory=alone.booked_bytes)
    first = runner.add("a", parent)
    with pytest.raises(JobError) as raised:
        runner.run()
    refused(str(raised.value), "late", 0)
    same(first, expected)


def a_job_that_leaves_makes_room():
    """Frees what the job booked, except its state, which it holds until `job.state = None`."""

    def parent(job):
        state = job.restore(init(SMALL))
        for n, batch in enumerate(job.batches(data(SMALL, 9))):
            state, _ = step(state, batch)
            if n == 3:
                while not all_see(job, big.done.is_set):
                    pass
                late.append(runner.add("too early", train, {"width": BIG}))
                while not all_see(job, late[0].done.is_set):
                    pass
                big.state = late[0].state = None
                late.append(runner.add("late", train, {"width": BIG}))
        return state

    late, limit = [], run(SMALL, BIG)[0].booked_bytes
    runner = Runner(WORLD, memory=limit)
    runner.add("a", parent)
    big = runner.add("big", train, {"width": BIG})
    with pytest.raises(
        JobError, match=r"jobs that have ended hold 1\.2 MB: set their `job\.state` to None"
    ) as e:
        runner.run()
    refused(str(e.value), "too early", 0)
    assert [job.status for job in late] == ["failed", "ended"]
    same(late[1], run(BIG)[0].jobs[0])


def ranks_with_other_limits_agree():
    fits = run(SMALL, BIG)[0].booked_bytes
    runner, text = run(SMALL, BIG, memory=fits - (WORLD.rank == LAST))
    refused(text, "job1", LAST)
    assert "It fits only alone: " in text and "1 B is missing" in text
    assert [job.status for job in runner.jobs] == ["ended", "failed"]


@jaxcross.crossover(axes="batch", donate_argnums=0)
def adapted(scale, base, batch):
    return scale + jax.lax.pmean(jnp.mean(base) * jnp.mean(batch), "batch")


def adapt(job, base):
    scale = job.restore(jnp.float32(1))
    for batch in job.batches(data(8, 2)):
        scale = adapted(scale, base, batch)
    return scale


def a_base_that_jobs_share_is_booked_once():
    """Each rank counts for itself. If one rank's jobs have copies, all ranks refuse the second."""
    base = jnp.ones(BIG)
    for copies in (False, True):
        runner = Runner(WORLD, memory=PROCESS_BYTES + int(1.9 * base.nbytes))
        for n in range(4):
            runner.add(
                f"job{n}",
                adapt,
                {"base": jnp.copy(base) if copies and WORLD.rank == LAST else base},
            )
        if copies:
            with pytest.raises(JobError) as raised:
                runner.run()
            refused(str(raised.value), "job1", LAST)
            assert [job.status for job in runner.jobs] == ["ended", "failed", "failed", "failed"]
        else:
            runner.run()
            assert runner.booked_bytes - PROCESS_BYTES <= 1.1 * base.nbytes


CASES = [
    a_job_too_many_fails_alone,
    the_last_of_equal_jobs_is_refused,
    a_job_that_joins_is_refused,
    a_job_that_leaves_makes_room,
    ranks_with_other_limits_agree,
    a_base_that_jobs_share_is_booked_once,
]

for case in CASES:
    case()
    if WORLD.rank == 0:
        print(f"passed {case.__name__}", flush=True)
