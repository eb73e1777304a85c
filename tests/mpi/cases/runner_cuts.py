"""Every rank: searches for a job's cut while it runs alone, after a restart, while another job
joins, and with a trial that fails.
"""

import dataclasses
import tempfile
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from runner_steps import WORLD, data, init, same

import jaxcross
from jaxcross import Runner
from jaxcross.program import stages
from jaxcross.step import cut_tuner, timed_trial


def deep_step(cut, seen=lambda x: x):
    def deep(state, batch):
        def loss(layers):
            x = seen(batch["x"])
            for w in layers:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        grads = jax.lax.pmean(jax.grad(loss)(state), "batch")
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), None

    return jaxcross.crossover(deep, axes="batch", cut=cut, bucket_bytes=0, donate_argnums=0)


def layers():
    width = init(0.1)[0]["w1"].shape[0]
    return [jnp.eye(width) * (1 + n / 10) for n in range(6)]


def by_hand(step, n=4):
    state = layers()
    for batch in data(n):
        state, _ = step(state, batch)
    return state


def in_a_runner(step):
    job = jaxcross.Job(
        "one", step, layers(), data(4)
    )  # its end is its data's, which is unknown, so cuts are searched for
    jaxcross.run([job], world=WORLD)
    assert job.step == 4
    return job.state


def the_cut_is_searched_for():
    """While it is the only one running, a step tries cuts on copies, so only its speed changes."""
    expected = by_hand(deep_step("whole"))
    for run in (by_hand, in_a_runner):
        step = deep_step("auto")
        with mock.patch.object(cut_tuner, "_race", wraps=cut_tuner._race) as race:
            got = run(step)
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        assert race.called == (WORLD.size > 1)
        chosen = str(step.latest_program)
        assert set(WORLD.control.allgather_text(chosen)) == {chosen}
    if WORLD.size > 1:
        joined_while_it_is_searched_for()
        resumed_beside_another()
        a_short_run_is_not_searched_for()


def a_short_run_is_not_searched_for():
    """Only the uncut step is compiled and timed, on all ranks."""
    step = deep_step("auto")
    with mock.patch.object(stages, "compile", wraps=stages.compile) as compiled:
        job = jaxcross.Job("one", step, layers(), data(8), steps=8)
        jaxcross.run([job], world=WORLD)
    assert [len(call.args[0].collectives) for call in compiled.call_args_list] == [1]
    same(job.state, by_hand(deep_step(1), 8))


def joined_while_it_is_searched_for():
    """Two jobs share a step, and the second one joins during the search.

    Each keeps the cut that it started with.
    """
    step, runner, begun, measure = (
        deep_step("auto"),
        Runner(WORLD),
        threading.Event(),
        cut_tuner._race,
    )
    added = []

    def fn(job, n, begun):
        state = job.restore(layers())
        for batch in job.batches(data(n)):
            state, _ = step(state, batch)
            begun.set()
        return state

    def race(*args):
        if not added:
            added.append(runner.add("b", fn, {"n": 6, "begun": begun}))
            assert begun.wait(60)
        measure(*args)
        return 2.0, 1.0  # the finest cut wins on all ranks

    a = runner.add("a", fn, {"n": 4, "begun": threading.Event()})
    with mock.patch.object(cut_tuner, "_race", race):
        runner.run()
    (b,) = added
    (pieces,), (beside,) = a._engine.cuts.values(), b._engine.cuts.values()
    assert pieces > 1 and beside == 0
    same(a.state, by_hand(deep_step(pieces)))
    same(b.state, by_hand(deep_step(1), 6))
    with mock.patch.object(cut_tuner, "_race", never):
        same(by_hand(step), a.state)


def resumed_beside_another():
    """A job resumes with the cut that was found for it alone, even alongside another job.

    A job that ran alongside another one stays uncut, even if it resumes alone.
    """
    (folder, *_) = WORLD.control.allgather_text(tempfile.mkdtemp())

    def fn(job, steps):
        step, state = deep_step("auto"), job.restore(layers())
        for batch in job.batches(data(10), steps):
            state, _ = step(state, batch)
        return state

    def run(steps, *names):
        runner = Runner(WORLD, checkpoints=jaxcross.Checkpoints(folder))
        jobs = [runner.add(name, fn, {"steps": steps}) for name in names]
        runner.run()
        assert all(job.step == steps for job in jobs)
        return jobs

    def race(*args):
        return 2e6, 1e6  # the run is long enough for a search

    with mock.patch.object(cut_tuner, "_race", race):
        (a,) = run(3, "a")
    (pieces,) = a._engine.cuts.values()
    assert pieces > 1
    with mock.patch.object(cut_tuner, "_race", never):
        a, b = run(6, "a", "b")
        same(a.state, by_hand(deep_step(pieces), 6))
        (b,) = run(9, "b")
        same(b.state, by_hand(deep_step(1), 9))


def never(*args):
    raise AssertionError("cuts are tried")


def a_trial_that_fails_on_one_rank():
    """A copy, the compiler or a computation fails while cuts are tried.

    No rank hangs, and all train uncut.
    """
    if WORLD.size == 1:
        return
    compiled_as, expected = stages.compile, by_hand(deep_step(1))

    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    def compile_uncut(program, inputs, **kwargs):
        return (compiled_as if len(program.collectives) == 1 else fail)(program, inputs, **kwargs)

    def break_cut(program, inputs, **kwargs):
        compiled = compiled_as(program, inputs, **kwargs)
        if len(program.collectives) == 1:
            return compiled
        last = [r for r in compiled.runnables if r.segment.kind == "compute"][1]
        runnables = [
            dataclasses.replace(r, call=fail) if r is last else r for r in compiled.runnables
        ]
        return dataclasses.replace(compiled, runnables=tuple(runnables))

    for target, name, broken in (
        (timed_trial, "jnp", SimpleNamespace(copy=fail)), (stages, "compile", compile_uncut),
        (stages, "compile", break_cut)
    ):  # fmt: skip
        for run in (by_hand, in_a_runner):
            with (
                mock.patch.object(target, name, broken)
                if WORLD.rank == WORLD.size - 1
                else nullcontext()
            ):
                same(run(deep_step("auto")), expected)

    seen = []

    def once(x):  # XLA reports this error after the dispatch, when the device reaches the callback
        seen.append(x)
        if len(seen) == 1 and WORLD.rank == WORLD.size - 1:
            raise ValueError("the first time")
        return x

    def by_callback(x):
        return jax.pure_callback(once, jax.typeof(x), x)

    same(by_hand(deep_step("auto", by_callback)), by_hand(deep_step(1, by_callback)))
