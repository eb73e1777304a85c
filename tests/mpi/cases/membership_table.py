"""Every rank: jobs that join, leave and rest during a run, over real exchanges.

Prints one line per case.
"""

import gc
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross import JobError, RoundRobin, Runner
from jaxcross.interleave.instrument import SpanLog

WORLD = jaxcross.initialize(stall_timeout_s=60)
LAST = WORLD.size - 1
WIDTH = 4099  # a length that no other array has


def make_step(**options):
    @jaxcross.crossover(axes="batch", donate_argnums=0, **options)
    def step(state, batch):
        def loss(w):
            hidden = jnp.tanh(batch * w)
            mean = jax.lax.pmean(hidden.mean(), "batch")  # later exchanges depend on this one
            return jnp.mean((hidden - mean - 1) ** 2)

        w, momentum = state
        value, grads = jax.value_and_grad(loss)(w)
        value, grads = jax.lax.pmean((value, grads), "batch")
        momentum = 0.9 * momentum + grads
        return (w - 0.1 * momentum, momentum), {"loss": value}

    return step


def init(seed=0):
    rng = np.random.default_rng(1000 + seed)  # NumPy, because it compiles nothing
    return jnp.asarray(rng.normal(size=WIDTH), jnp.float32), jnp.asarray(
        np.zeros(WIDTH, np.float32)
    )


def data(n, bad=(), skip=()):
    rng = np.random.default_rng(WORLD.rank)
    for k in range(n):
        x = rng.normal(size=WIDTH).astype(np.float32)
        if k in bad and WORLD.rank == LAST:
            x[7] = np.nan
        if k not in skip:
            yield x


def train(job, step, n, bad=(), skip=(), nonfinite="ignore", seed=0):
    job.nonfinite = nonfinite
    state = job.restore(init(seed))
    for batch in job.batches(data(n, bad, skip)):
        state, metrics = step(state, batch)
        job.log(metrics)
    return state


def alone(step, n, seed=0):
    state = init(seed)
    for batch in data(n):
        state, _ = step(state, batch)
    return state


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def equal_on_ranks(value):
    texts = WORLD.control.allgather_text(json.dumps(value))
    assert len(set(texts)) == 1, texts
    return value


def all_see(job, what):
    return bool(
        job.run_on_all_ranks(
            "all", lambda control: control.allreduce_min(np.array([what()], np.int64))
        )[0]
    )


def jobs_join_and_leave():
    """A job and a control thread add jobs, in a different order on each rank.

    The first job is unaffected.
    """
    step, begun = make_step(), threading.Event()
    runner = Runner(WORLD)

    def parent(job):
        begun.set()
        state = job.restore(init())
        for n, batch in enumerate(job.batches(data(30))):
            if n == 3:
                for name in ("b", "c") if WORLD.rank % 2 else ("c", "b"):
                    runner.add(name, train, {"step": step, "n": 5, "seed": 1})
            state, _ = step(state, batch)
        while not all_see(job, lambda: len(late) == 1 and late[0].done.is_set()):
            pass
        return state

    def control():
        begun.wait()
        late.append(runner.add("d", train, {"step": step, "n": 4, "seed": 2}))

    late, thread = [], threading.Thread(target=control)
    first = runner.add("a", parent)
    thread.start()
    report = runner.run()
    thread.join()
    equal_on_ranks([(job.name, job.step, job.status) for job in runner.jobs])
    assert sorted(job.name for job in report.jobs) == ["a", "b", "c", "d"]
    same(first.state, alone(step, 30))
    for job in runner.jobs:
        if job is not first:
            same(job.state, alone(step, job.step, seed=2 if job.name == "d" else 1))


def jobs_begin_together():
    """Neither job's first step starts before both have compiled.

    Either way, each job's result is bit for bit that of the job alone.
    """
    expected = {}
    for start in ("together", "as_ready"):
        log, steps = SpanLog(), {"a": make_step(), "b": make_step(cut=2)}
        runner = Runner(WORLD, RoundRobin(start=start), instruments=[log])
        jobs = [runner.add(name, train, {"step": step, "n": 4}) for name, step in steps.items()]
        runner.run()
        compiled = [span.end_ns for span in log.spans if span.kind == "compile"]
        began = min(span.start_ns for span in log.spans if span.kind in ("compute", "collective"))
        assert len(compiled) == 2
        assert start == "as_ready" or max(compiled) <= began
        for job in jobs:
            same(job.state, expected.setdefault(job.name, alone(steps[job.name], 4)))


def one_is_stopped():
    """The last rank stops a job, which keeps its last committed state. The other is unaffected."""
    step, runner = make_step(), Runner(WORLD)

    def parent(job):
        state = job.restore(init())
        for n, batch in enumerate(job.batches(data(20))):
            if n == 5 and WORLD.rank == LAST:
                other.stop()
            state, _ = step(state, batch)
        return state

    first = runner.add("a", parent)
    other = runner.add("b", train, {"step": step, "n": 10**6, "seed": 1})
    report = runner.run()
    same(first.state, alone(step, 20))
    assert [job.how for job in report.jobs] == ["ended", "stopped"]
    same(other.state, alone(step, equal_on_ranks(other.step), seed=1))


def one_rests():
    step, runner = make_step(), Runner(WORLD)

    def parent(job):
        state = job.restore(init())
        for n, batch in enumerate(job.batches(data(20))):
            if n == 3 and WORLD.rank == LAST:
                other.pause()
            if n == 3:
                while not all_see(job, lambda: other.paused):
                    pass
            state, _ = step(state, batch)
        rested_at = other.step
        if WORLD.rank == 0:
            other.resume()
        while not all_see(job, lambda: other.step > rested_at):
            pass
        other.stop()
        return state

    first = runner.add("a", parent)
    other = runner.add("b", train, {"step": step, "n": 10**6, "seed": 1})
    report = runner.run()
    same(first.state, alone(step, 20))
    same(other.state, alone(step, equal_on_ranks(other.step), seed=1))
    ends = {
        name: max(s.end_ns for s in report.spans if s.job == name and s.kind == "collective")
        for name in "ab"
    }
    assert ends["a"] < ends["b"]
    while_it_rested = [
        s.step
        for s in report.spans
        if s.job == "b" and s.kind == "collective" and s.end_ns < ends["a"]
    ]
    assert max(while_it_rested, default=0) < other.step


def one_is_ejected():
    """A NaN on the last rank ejects a job.

    The other job's state is bit for bit the same as if the job had left by request.
    """
    step = make_step()
    runner = Runner(WORLD)
    bad = runner.add("bad", train, {"step": step, "n": 8, "bad": (3,), "nonfinite": "eject"})
    good = runner.add("good", train, {"step": step, "n": 8, "seed": 1})
    report = runner.run()
    assert (bad.step, bad.status, good.status) == (3, "ejected", "ended")
    same(bad.state, alone(step, 3))
    by_request = Runner(WORLD)
    left = by_request.add("bad", train, {"step": step, "n": 3})
    other = by_request.add("good", train, {"step": step, "n": 8, "seed": 1})
    by_request.run()
    same(good.state, other.state)
    same(bad.state, left.state)
    ranks = "ranks " + ", ".join(map(str, range(WORLD.size))) if WORLD.size > 1 else "rank 0"
    assert f"`bad` was ejected on {ranks} in step 4" in equal_on_ranks(report.jobs[0].why)


def one_raises_for_it():
    step, runner = make_step(cut=2, bucket_bytes=0), Runner(WORLD)
    bad = runner.add("bad", train, {"step": step, "n": 8, "bad": (2,), "nonfinite": "raise"})
    good = runner.add("good", train, {"step": step, "n": 8, "seed": 1})
    with pytest.raises(
        JobError,
        match=r"^Job `bad` failed on ranks? \d.* in step 3, .*FloatingPointError: `psum batch f",
    ):
        runner.run()
    assert (bad.step, bad.status) == (2, "failed")
    same(bad.state, alone(step, 2))
    same(good.state, alone(step, 8, seed=1))


def one_skips():
    """Skipped batches have no effect on any rank, as if they had not existed."""
    step, runner = make_step(), Runner(WORLD)
    skips = runner.add("skips", train, {"step": step, "n": 8, "bad": (2, 5), "nonfinite": "skip"})
    without = runner.add(
        "without", train, {"step": step, "n": 8, "skip": (2, 5), "nonfinite": "skip"}
    )
    beside = runner.add("beside", train, {"step": step, "n": 8, "seed": 1})
    runner.run()
    same(skips.state, without.state)
    same(beside.state, alone(step, 8, seed=1))
    assert (skips.step, skips.skipped, without.step, without.skipped) == (8, 2, 6, 0)
    equal_on_ranks(np.asarray(skips.state[0]).tobytes().hex())


def jobs_are_submitted():
    step, runner = make_step(), Runner(WORLD)
    runner.register("train", lambda job, **arguments: train(job, step, **arguments))

    def parent(job):
        state = job.restore(init())
        for n, batch in enumerate(job.batches(data(6))):
            if n == 2 and WORLD.rank == 0:
                runner.submit("train", job="late", kwargs={"n": 5, "seed": 3})
            state, _ = step(state, batch)
        return state

    first = runner.add("a", parent)
    runner.run()
    assert [job.name for job in runner.jobs] == ["a", "late"]
    same(first.state, alone(step, 6))
    same(runner.jobs[1].state, alone(step, 5, seed=3))


def memory_is_freed():
    step, runner, alive = make_step(), Runner(WORLD, RoundRobin(start="as_ready")), []

    def count():
        gc.collect()
        return len([a for a in jax.live_arrays() if a.shape == (WIDTH,)])

    def parent(job):
        while not all_see(job, other.done.is_set):
            pass
        late = time.monotonic() + 30  # the job's arrays may still be on the device or in use
        while not all_see(job, lambda: count() <= before + 2 or time.monotonic() > late):
            pass
        alive.append(count())

    runner.add("a", parent)  # makes no step
    other = runner.add("b", train, {"step": step, "n": 10, "bad": (6,), "nonfinite": "eject"})
    before = count()
    runner.run()
    assert other.step == 6
    assert alive == [before + 2]  # the last committed state


CASES = [
    jobs_join_and_leave,
    jobs_begin_together,
    one_is_stopped,
    one_rests,
    one_is_ejected,
    one_raises_for_it,
    one_skips,
    jobs_are_submitted,
    memory_is_freed,
]

for case in CASES:
    case()
    if WORLD.rank == 0:
        print(f"passed {case.__name__}", flush=True)
