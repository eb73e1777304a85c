"""Every rank: jobs over real exchanges. Prints one line a case; any rank that disagrees exits with an error."""

import dataclasses
import os
import signal
import sys
import tempfile
import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcross
from jaxcross import JobError, RoundRobin, Runner, Sequential
from jaxcross.plan import JobCost, choose_compression
from jaxcross.program import stages
from jaxcross.runtime.emulated_link import Link
from jaxcross.step import cut_tuner, timed_trial

WORLD = jaxcross.initialize(stall_timeout_s=60)
RATES = {"lr-0.1": 0.1, "lr-0.4": 0.4, "lr-0.2": 0.2}
TX = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.9)


def make_step(cut="whole", explode_at=None):
    """A small network, with synchronised statistics (an exchange that others depend on) and averaged gradients."""

    def step(state, batch):
        params, opt_state = state

        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["w1"])
            mean = jax.lax.pmean(hidden.mean(0), "batch")
            return jnp.mean((((hidden - mean) @ params["w2"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        grads = jax.lax.pmean(grads, "batch")
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": jax.lax.pmean(value, "batch")}

    return jaxcross.crossover(step, axes="batch", cut=cut, donate_argnums=0)


def init(rate):
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w1": jax.random.normal(keys[0], (8, 16)), "w2": jax.random.normal(keys[1], (16, 1))}
    opt_state = TX.init(params)
    opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
    return params, opt_state


def data(n, seed=0):
    rng = np.random.default_rng(100 * seed + WORLD.rank)
    for _ in range(n):
        yield {"x": rng.normal(size=(4, 8)).astype(np.float32), "y": rng.normal(size=(4, 1)).astype(np.float32)}


def train(job, step, rate, n):
    state = job.restore(init(rate))
    for batch in job.batches(data(n)):
        state, metrics = step(state, batch)
        job.log(metrics)
    return state


def alone(step, rate, n):
    state = init(rate)
    for batch in data(n):
        state, _ = step(state, batch)
    return state


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def crossover_equals_alone():
    for cut in ("whole", 2):
        lengths = dict(zip(RATES, (8, 5, 6), strict=True))
        step = make_step(cut)
        expected = {name: alone(step, rate, lengths[name]) for name, rate in RATES.items()}
        for policy in (RoundRobin(), Sequential()):
            with Runner(WORLD, policy) as runner:
                for name, rate in RATES.items():
                    runner.add(name, train, step=step, rate=rate, n=lengths[name])
                report = runner.run()
            for job in runner.jobs:
                same(job.state, expected[job.name])
                assert job.step == lengths[job.name] == len(job.history)
            assert [f.facts.steps for f in report.rounds.jobs] == list(lengths.values())


def jobs_from_one_state():
    """Each donates its own copy: neither loses it to the other, nor does the caller."""
    step, state = make_step(), init(0.1)
    jobs = [jaxcross.Job(name, step, state, data(n)) for name, n in (("a", 3), ("b", 5))]
    jaxcross.run(jobs, world=WORLD)
    for job, n in zip(jobs, (3, 5), strict=True):
        same(job.state, alone(step, 0.1, n))
    same(state, init(0.1))


def unlike_lengths_of_data():
    runner = Runner(WORLD)
    step = make_step()

    def fn(job):
        state = job.restore(init(0.1))
        for batch in job.batches(data(3 + 2 * WORLD.rank)):
            state, _ = step(state, batch)
        return state

    job = runner.add("a", fn)
    runner.run()
    same(job.state, alone(step, 0.1, 3))


def evaluation_beside_training():
    step = make_step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @jaxcross.crossover(axes="batch")
        def evaluate(state, batch):
            return jnp.mean(batch["x"] @ state[0]["w1"])

        def fn(job):
            state = job.restore(init(0.1))
            for batch in job.batches(data(4)):
                state, _ = step(state, batch)
                job.log({"eval": evaluate(state, batch)})
            return state

        runner = Runner(WORLD)
        a = runner.add("a", fn)
        b = runner.add("b", train, step=step, rate=0.2, n=9)
        runner.run()
    same(a.state, alone(step, 0.1, 4))
    same(b.state, alone(step, 0.2, 9))
    assert len(a.history) == 4


def failure_of_one_job():
    step, last = make_step(), WORLD.size - 1

    def fn(job):
        state = job.restore(init(0.1))
        for batch in job.batches(data(6)):
            if job.step == 3 and WORLD.rank == last:
                raise ValueError("boom")
            state, _ = step(state, batch)
            job.state = state

    runner = Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, step=step, rate=0.2, n=6)
    with pytest.raises(JobError, match=rf"^Job `bad` failed on rank {last} after step 3: ValueError: boom\."):
        runner.run()
    assert bad.step == 3
    same(bad.state, alone(step, 0.1, 3))
    same(good.state, alone(step, 0.2, 6))


def failure_of_a_job_that_saves_nothing():
    """Its state was donated again and again; what the last committed step made of it is still there."""
    step, last = make_step(), WORLD.size - 1

    def fn(job):
        state = job.restore(init(0.1))
        for batch in job.batches(data(6)):
            if job.step == 3 and WORLD.rank == last:
                raise ValueError("boom")
            state, metrics = step(state, batch)
            job.log(metrics)
        return state

    runner = Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, step=step, rate=0.2, n=6)
    with pytest.raises(JobError, match=rf"^Job `bad` failed on rank {last} after step 3: ValueError: boom\."):
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
    good = runner.add("good", train, step=make_step(), rate=0.2, n=4)
    with pytest.raises(jaxcross.ExchangeError, match=r"^Job `bad`, step 1: ranks 0 and 1 exchange different things"):
        runner.run()
    assert good.step == 4


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
    job = jaxcross.Job("one", step, layers(), data(4))  # as long as its data, which nobody knows: cuts are searched for
    jaxcross.run([job], world=WORLD)
    assert job.step == 4
    return job.state


def the_cut_is_searched_for():
    """A step that is the only one running tries cuts on copies: nothing of it shows but the speed."""
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
    """Its uncut step alone is compiled and timed, on all ranks."""
    step = deep_step("auto")
    with mock.patch.object(stages, "compile", wraps=stages.compile) as compiled:
        job = jaxcross.Job("one", step, layers(), data(8), steps=8)
        jaxcross.run([job], world=WORLD)
    assert [len(call.args[0].collectives) for call in compiled.call_args_list] == [1]
    same(job.state, by_hand(deep_step(1), 8))


def joined_while_it_is_searched_for():
    """The job that was there and the one that comes share a step, and each keeps the cut that it began with."""
    step, runner, begun, measure = deep_step("auto"), Runner(WORLD), threading.Event(), cut_tuner._race
    added = []

    def fn(job, n, begun):
        state = job.restore(layers())
        for batch in job.batches(data(n)):
            state, _ = step(state, batch)
            begun.set()
        return state

    def race(*args):
        if not added:
            added.append(runner.add("b", fn, n=6, begun=begun))
            assert begun.wait(60)
        measure(*args)
        return 2.0, 1.0  # the finest wins, on all ranks

    a = runner.add("a", fn, n=4, begun=threading.Event())
    with mock.patch.object(cut_tuner, "_race", race):
        runner.run()
    (b,) = added
    (pieces,), (beside,) = a.cuts.values(), b.cuts.values()
    assert pieces > 1 and beside == 0
    same(a.state, by_hand(deep_step(pieces)))
    same(b.state, by_hand(deep_step(1), 6))
    with mock.patch.object(cut_tuner, "_race", never):
        same(by_hand(step), a.state)


def resumed_beside_another():
    """A job whose cut was searched for goes on with it, though another one runs beside it now; and the other way."""
    (folder, *_) = WORLD.control.allgather_text(tempfile.mkdtemp())

    def fn(job, steps):
        step, state = deep_step("auto"), job.restore(layers())
        for batch in job.batches(data(10), steps):
            state, _ = step(state, batch)
        return state

    def run(steps, *names):
        runner = Runner(WORLD, checkpoints=jaxcross.Checkpoints(folder))
        jobs = [runner.add(name, fn, steps=steps) for name in names]
        runner.run()
        assert all(job.step == steps for job in jobs)
        return jobs

    def race(*args):
        return 2e6, 1e6  # a run so long that it has time for a search

    with mock.patch.object(cut_tuner, "_race", race):
        (a,) = run(3, "a")
    (pieces,) = a.cuts.values()
    assert pieces > 1
    with mock.patch.object(cut_tuner, "_race", never):
        a, b = run(6, "a", "b")
        same(a.state, by_hand(deep_step(pieces), 6))
        (b,) = run(9, "b")
        same(b.state, by_hand(deep_step(1), 9))


def never(*args):
    raise AssertionError("cuts are tried")


def a_trial_that_fails_on_one_rank():
    """Copies, the compiler or a computation, while cuts are tried: no rank waits, and all train uncut."""
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
        runnables = [dataclasses.replace(r, call=fail) if r is last else r for r in compiled.runnables]
        return dataclasses.replace(compiled, runnables=tuple(runnables))

    for target, name, broken in (
        (timed_trial, "jnp", SimpleNamespace(copy=fail)), (stages, "compile", compile_uncut),
        (stages, "compile", break_cut)
    ):  # fmt: skip
        for run in (by_hand, in_a_runner):
            with mock.patch.object(target, name, broken) if WORLD.rank == WORLD.size - 1 else nullcontext():
                same(run(deep_step("auto")), expected)

    seen = []

    def once(x):  # XLA says so where the device has come to it, behind the dispatch
        seen.append(x)
        if len(seen) == 1 and WORLD.rank == WORLD.size - 1:
            raise ValueError("the first time")
        return x

    def by_callback(x):
        return jax.pure_callback(once, jax.typeof(x), x)

    same(by_hand(deep_step("auto", by_callback)), by_hand(deep_step(1, by_callback)))


def unlike_exchanges_alone():
    """Without a runner, too: the ranks compare before anything is compiled, and can go on afterwards."""
    if WORLD.size == 1:
        return
    step = jaxcross.crossover(lambda b: jax.lax.pmean(b, "batch"), axes="batch")
    with pytest.raises(
        jaxcross.ExchangeError, match=r"^ranks 0 and 1 exchange different things in `<lambda>`: "
    ) as error:
        step(jnp.ones(2 + (WORLD.rank == 1)))
    assert "rank 0: psum batch float32[2]" in str(error.value)
    assert "rank 1: psum batch float32[3]" in str(error.value)
    same(step(jnp.ones(4)), jnp.ones(4))


def unlike_shapes():
    """A shorter batch on one rank, with the same exchanges: nobody else need know, but where a cut is to be chosen."""
    if WORLD.size == 1:
        return

    def make(cut):
        return jaxcross.crossover(lambda s, b: s + jax.lax.pmean(b.mean(), "batch"), axes="batch", cut=cut)

    def fn(job, step):
        state = jnp.float32(0)
        for n in range(6):
            state = step(state, jnp.full(5 if n in (2, 5) and WORLD.rank == 1 else 8, n + WORLD.rank, jnp.float32))
        return state

    runner = Runner(WORLD)
    jobs = [runner.add(f"cut {cut}", fn, step=make(cut)) for cut in ("whole", 2)]
    runner.run()
    for job in jobs:
        assert job.state == fn(None, make("whole"))

    runner = Runner(WORLD)
    bad = runner.add("bad", fn, step=make("auto"))
    good = runner.add("good", train, step=make_step(), rate=0.2, n=4)
    with pytest.raises(
        JobError, match=r"^Job `bad` does different things on different ranks after step 2: .*Or did shapes or types"
    ):
        runner.run()
    assert (bad.step, good.step) == (2, 4)


def failure_to_compile_on_one_rank():
    """The compiler of one rank fails after all agreed: the job ends everywhere, the other one goes on."""
    last = WORLD.size - 1

    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        if WORLD.rank == last:
            state = jax.ffi.ffi_call("a_target_that_this_rank_lacks", jax.ShapeDtypeStruct((3,), jnp.float32))(state)
        return jax.lax.pmean(state, "batch")

    def fn(job):
        for batch in job.batches(data(3)):
            step(jnp.ones(3), batch)

    good_step, runner = make_step(), Runner(WORLD)
    bad = runner.add("bad", fn)
    good = runner.add("good", train, step=good_step, rate=0.2, n=4)
    with pytest.raises(JobError, match=rf"^Job `bad` failed on rank {last} .*a_target_that_this_rank_lacks"):
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
    good = runner.add("good", train, step=step, rate=0.2, n=4)
    with pytest.raises(
        JobError, match=r"^Job `bad` does different things on different ranks after step 2: rank 0 called"
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
    good = runner.add("good", train, step=step, rate=0.2, n=4)
    with pytest.raises(
        JobError, match=rf"^Job `bad` failed on rank {last} after .*OSError: disk gone \(raised by the data"
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


def emulated_link():
    """Exchanges last as long as the link would, and every output says that it is emulated."""
    report = jaxcross.run(
        [jaxcross.Job(name, make_step(), init(rate), data(6), steps=6) for name, rate in RATES.items()],
        world=WORLD, link=Link(rate_bytes_per_s=1e6, latency_s=1e-3),
    )  # fmt: skip
    assert "emulated link" in str(report)
    exchanges = [s for s in report.spans if s.kind == "collective" and s.nbytes]
    assert exchanges
    for span in exchanges:
        assert span.label == "emulated"
        assert span.end_ns - span.start_ns > 0.99e9 * (1e-3 + span.nbytes / 1e6)


def compression_is_chosen_from_a_report():
    """As the example of its docstring does: every rank chooses alike, and what it chooses exchanges."""
    jobs = [jaxcross.Job(name, make_step(), init(rate), data(4), steps=4) for name, rate in RATES.items()]
    report = jaxcross.run(jobs, world=WORLD, link=Link(rate_bytes_per_s=1e5, latency_s=1e-3))
    params, logged = init(0.0)[0], []
    costs = [
        JobCost(name=j.facts.name, compute_s=j.compute_s, exchange_s=j.exchange_s, params=params)
        for j in report.rounds.jobs
    ]
    exchanges = choose_compression(1.0, costs, "batch", ranks=WORLD.size, log=logged.append)
    assert len(exchanges) == len(jobs) and all(f"\n  {name}: " in logged[0] for name in RATES)
    assert len(set(WORLD.control.allgather_text(logged[0]))) == 1
    for tx in exchanges:
        updates, _ = jaxcross.crossover(tx.update, axes="batch")(params, tx.init(params), params)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def a_branch_at_different_calls():
    """Alone an error of `agree_alone`; in a job the ranks find out where they would meet."""
    if WORLD.size == 1:
        return
    every_third = jaxcross.crossover(
        lambda n, x: (n + 1, jax.lax.cond(n % 3 == 2, lambda v: jax.lax.pmean(v, "batch"), lambda v: v, x)),
        axes="batch",
    )

    def fn(job, first):
        n, x = jnp.int32(first), jnp.ones(3)
        for _ in range(6):
            n, x = every_third(n, x)

    runner = Runner(WORLD)
    bad = runner.add("bad", fn, first=int(WORLD.rank == 1))
    good = runner.add("good", train, step=make_step(), rate=0.2, n=4)
    with pytest.raises(
        jaxcross.ExchangeError,
        match=r"^Job `bad` takes a branch with exchanges at different calls: rank 0 in step 3, rank 1 in step 2",
    ):
        runner.run()
    assert (bad.status, good.status, good.step) == ("failed", "ended", 4)
    alike = Runner(WORLD)
    job = alike.add("alike", fn, first=0)
    alike.run()
    assert (job.status, job.step) == ("ended", 6)


CASES = [
    crossover_equals_alone, jobs_from_one_state, unlike_lengths_of_data, evaluation_beside_training, failure_of_one_job,
    failure_of_a_job_that_saves_nothing, the_cut_is_searched_for, a_trial_that_fails_on_one_rank, unlike_exchanges,
    unlike_exchanges_alone, unlike_shapes, failure_to_compile_on_one_rank, unlike_numbers_of_steps,
    data_that_raises_on_one_rank, stray_threads, interrupt, emulated_link, compression_is_chosen_from_a_report,
    a_branch_at_different_calls,
]  # fmt: skip

wanted = sys.argv[1:] or [case.__name__ for case in CASES]
for case in [case for case in CASES if case.__name__ in wanted]:
    case()
    if WORLD.rank == 0:
        print(f"passed {case.__name__}", flush=True)
