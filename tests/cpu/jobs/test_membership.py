"""Jobs that skip steps or leave: what they free and keep, and which exchange the error names."""

import gc
import itertools
import json
import time
import weakref
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross.errors import JobError
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.membership_jobs import loop, solo, until
from tests.support.runner_jobs import make_step


class Data:
    """Held by a job's arguments, so the test can check that it's released."""


@pytest.mark.integration
@pytest.mark.parametrize("how", ["ended", "stopped", "failed", "ejected"])
def test_memory_of_a_job_that_left_is_released(how):
    """The memory of a job that left is freed while other jobs continue to run."""
    size, probes = 4099, {}

    def arrays():
        gc.collect()
        return [a for a in jax.live_arrays() if a.shape == (size,)]

    def leave(job, step, held):
        probes["held"], state = weakref.ref(held), job.restore(jnp.zeros(size))
        if how == "ejected":
            job.nonfinite = "eject"
        own = jnp.ones(size)
        for n, batch in enumerate(job.batches(itertools.repeat(np.ones(size, np.float32)))):
            state = step(state, batch * (np.nan if how == "ejected" and n == 3 else 1) + own)
            if n == 3 and how == "failed":
                raise ValueError("the job failed in batch 4")
            if n == 3 and how == "ended":
                break
            if n == 3 and how == "stopped":
                job.stop()
        return state

    def work(world):
        runner = Runner(world)

        def watch(job, step):
            until(job, step, other.done.is_set)
            late = (
                time.monotonic() + 30
            )  # work it had started may still be on the device, or being read
            until(job, step, lambda: len(arrays()) <= 1 or time.monotonic() > late)
            probes["arrays"] = len(arrays())
            other.state = None
            probes["afterwards"] = len(arrays())
            return step(0.0, 1.0)

        runner.add("watch", watch, {"step": make_step(world, "watch")})
        other = runner.add("other", leave, {"step": make_step(world, "other"), "held": Data()})
        if how == "failed":
            with pytest.raises(JobError):
                runner.run()
        else:
            runner.run()
        return other.status

    assert run_ranks(1, work) == [how]
    assert probes["held"]() is None
    assert (probes["arrays"], probes["afterwards"]) == (
        1,
        0,
    )  # the last committed state, as long as it's referenced


# Uses a real step, cut and compiled, on a single rank.


def real_step(**options):
    @jaxcross.crossover(axes="batch", **options)
    def step(state, batch):
        w, count = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
        grads, loss = jax.lax.pmean((grads, loss), "batch")
        return (w - 0.1 * grads, count + 1), {"loss": loss}

    return step


def batches(*bad, n=6):
    rng = np.random.default_rng(0)
    for k in range(n):
        x = rng.normal(size=(4, 8)).astype(np.float32)
        if k in bad:
            x[0, 0] = np.inf
        yield x


@pytest.mark.mostly_integration("options2")
@pytest.mark.parametrize(
    "options", [{"donate_argnums": 0}, {}, {"cut": 2, "bucket_bytes": 0, "donate_argnums": 0}]
)
def test_skipped_step_equals_a_missing_batch(options):
    """A skipped step has the same effect as if its batch didn't exist."""
    world, step = jaxcross.initialize(), real_step(**options)

    def state():
        return jnp.ones(8), jnp.int32(0)

    skips = Job("skips", step, state(), batches(1, 4), nonfinite="skip")
    never = Job(
        "never",
        step,
        state(),
        (b for k, b in enumerate(batches()) if k not in (1, 4)),
        nonfinite="skip",
    )
    still_open = Job("beside", step, state(), batches())
    report = run([skips, never, still_open], world=world)
    alone = state()
    for batch in batches():
        alone, _ = step(alone, batch)
    for one, other in ((skips, never), (still_open, None)):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(one.state, alone if other is None else other.state, strict=True)
        )
    assert [job.skipped for job in report.jobs] == [2, 0, 0]
    assert (skips.step, int(skips.state[1])) == (6, 4)


def test_step_that_returns_no_state_cannot_be_skipped():
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def step(state, batch):
        return (state[:1] + jax.lax.pmean(batch.sum(), "batch"), None)

    @jaxcross.crossover(axes="batch")
    def twice(state, batch):
        new = state + jax.lax.pmean(batch.sum(), "batch")
        return new, new + 1

    for each, message in ((step, "none of its results has"), (twice, "2 of its results have")):
        job = Job("a", each, jnp.ones(3), [np.ones(4, np.float32)], nonfinite="skip")
        with pytest.raises(JobError, match=rf"CutError: `\w+` cannot skip a step: {message}"):
            run([job], world=world)


def test_nonfinite_exchange_midway_is_named_with_line():
    """A non-finite exchange in the middle of a step is named with its line."""
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        mean = jax.lax.pmean(batch.mean(), "batch")
        wide = jax.lax.pmean(
            batch.astype(jnp.bfloat16) / 0, "batch"
        )  # infinite because of the division by zero
        return state + jax.lax.pmean(mean * state, "batch") + wide.sum(), None

    job = Job("a", step, jnp.ones(3), [np.ones(4, np.float32)], nonfinite="raise")
    with pytest.raises(
        JobError,
        match=r"FloatingPointError: `psum batch bfloat16\[4\]` at \S*test_membership.py:\d+",
    ):
        run([job], world=world)
    assert job.step == 0


@pytest.mark.parametrize("cut", ["whole", 2])
def test_infinite_norm_divided_by_its_segment_is_seen(cut):
    """Gradients divided by it are zero, so the segment's outputs don't show it was infinite."""
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch", cut=cut, donate_argnums=0)
    def step(state, grads):
        norm = jnp.sqrt(jax.lax.psum(jnp.sum(grads * grads), "batch"))
        return state - jax.lax.pmean(grads / jnp.maximum(norm, 1), "batch"), None

    data = [np.full(4, x, np.float32) for x in (1, 1e25, 1)]
    skips = Job("skips", step, jnp.ones(4), data, nonfinite="skip")
    (job_summary,) = run([skips], world=world).jobs
    assert (skips.step, job_summary.skipped, skips.state.tolist()) == (3, 1, [0.0] * 4)
    raises = Job("raises", step, jnp.ones(4), data, nonfinite="raise")
    with pytest.raises(
        JobError, match=r"FloatingPointError: `psum batch float32\[\]` at \S*test_membership.py:\d+"
    ):
        run([raises], world=world)
    assert raises.step == 1


def test_first_nonfinite_exchange_is_named_if_read():
    """The first non-finite exchange is named even if its own segment reads it."""
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch")
    def step(state, grads):
        norm = jax.lax.psum(jnp.sum(grads * grads), "batch")
        return state - jax.lax.pmean(grads / jnp.minimum(norm, 9) + grads, "batch"), None

    job = Job("a", step, jnp.ones(4), [np.full(4, np.nan, np.float32)], nonfinite="raise")
    with pytest.raises(JobError, match=r"FloatingPointError: `psum batch float32\[\]` at"):
        run([job], world=world)


@pytest.mark.parametrize("ends", ["stops", "fails"])
def test_a_job_that_catches_everything_is_left_behind(ends, caplog):
    """Every call reports that the job has ended, but the job keeps calling forever."""

    def work(world):
        step = make_step(world)

        def compute(index, values):
            return 1 / 0 if ends == "fails" and bad.step == 3 else sum(values)

        breaks = make_step(world, "breaks", compute=compute)

        def catches_all(job):
            state = job.restore(0.0)
            while True:
                with suppress(BaseException):
                    state = breaks(state, 1e-3)

        runner = Runner(world)
        bad = runner.add("endless", catches_all)
        other = runner.add("other", loop, {"step": step, "data": [1.0] * 5})

        def stops(job):
            until(job, step, lambda: bad.step >= 3)
            if ends == "stops":
                bad.stop()

        runner.add("stops", stops)
        if ends == "stops":
            runner.run()
        else:
            with pytest.raises(JobError, match="division by zero"):
                runner.run()
        return bad.status, bad.state is not None, other.state

    (how, kept, state), second = run_ranks(2, work)
    assert (how, kept, state) == second
    assert (how, kept, state) == (
        "stopped" if ends == "stops" else "failed",
        True,
        solo(2, [1.0] * 5),
    )
    assert sum("catches every exception" in r.getMessage() for r in caplog.records) == 2


def test_huge_numbers_and_tuple_names_are_reported():
    """Numbers too large for a float and names that aren't valid in JSON are still reported."""

    def work(world):
        def fn(job):
            job.log({"huge": 10**400, "low": -(10**400)})
            job.log({("a", 1): 2.0})

        runner = Runner(world)
        runner.add("a", fn)
        report = runner.run()
        json.dumps(report.summary())
        return report.jobs[0].metrics

    assert run_ranks(1, work)[0] == {"huge": np.inf, "('a', 1)": 2.0, "low": -np.inf}
