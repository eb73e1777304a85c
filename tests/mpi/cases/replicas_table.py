"""Every rank: are replicas compared, and diverged ranks named? Prints one line per case."""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from replicas_jobs import (
    RANK,
    SIZE,
    STEPS,
    WORLD,
    alike,
    averaged,
    crossed,
    data,
    logged,
    loop,
    make,
    run,
    sgd,
)

import jaxcross
from jaxcross import exchange


def plain_jit_is_warned_of_twice():
    def own_loop(donate):
        return lambda: run(
            loop, step=jax.jit(make(sgd())[0], donate_argnums=donate), state=make(sgd())[1]
        )[1:]

    def plain_loop():
        with logged() as lines:
            report = jaxcross.run(
                [jaxcross.Job("a", jax.jit(make(sgd())[0]), make(sgd())[1], data())]
            )
        return report, lines

    for train in (own_loop(()), own_loop(0), plain_loop):
        report, lines = train()
        (text,) = [job.replicas for job in report.jobs]
        assert (
            text
            == f"differ after batch {STEPS}, first `[0]['b']` on ranks 0 and 1; equal at the start"
        ), text
        assert f"a: replicas {text}." in str(report)
        if RANK == 0:
            first, last, apart = lines
            assert first.startswith(
                "Job `a` has used its first batch and has not exchanged anything with other ranks"
            )
            assert last.startswith("Job `a` came to its end and has not exchanged anything")
            assert (
                "jaxcross.crossover(axes=" in first
                and f"each of the {SIZE} ranks has trained a model" in last
            )
            assert "its replicas differ" in apart
    # Batches count, whether or not the job has set its state in between.
    step, state = make(sgd())
    job = jaxcross.Job("a", jax.jit(step), state, data(), check_replicas=3)
    with (
        logged(),
        pytest.raises(
            jaxcross.ExchangeError,
            match=r"^Job `a`: its replicas differ after batch 3, first in `\[0\]\['b'\]`",
        ),
    ):
        jaxcross.run([job])


def a_state_that_was_handed_over_and_donated_is_no_fault():
    add = jax.jit(lambda s, b: s + b["x"].mean(), donate_argnums=0)

    def train(job):
        state = job.restore(np.zeros(3, np.float32))
        for batch in job.batches(data()):
            state = job.state = add(state, batch)
            state = add(state, batch)
        return state

    job, report, lines = run(train)
    assert job.status == "ended" and report.jobs[0].replicas.startswith("differ after batch")
    assert RANK or ("each of the" in lines[0] and "If it trains" not in lines[0]), lines


def a_rate_of_each_rank_is_found_at_the_end():
    step, state = averaged(rate=1.0 + RANK)
    job, report, lines = run(loop, step=step, state=state)
    assert report.jobs[0].replicas.startswith(
        f"differ after step {STEPS}, first `[0]['b']` on ranks 0 and 1"
    )
    assert job.status == "ended" and job.error is None
    assert RANK or len(lines) == 1, lines
    assert report.summary()["jobs"][0]["replicas"] == report.jobs[0].replicas


def a_rate_of_each_rank_is_raised_and_another_job_untouched():
    good, start = averaged(seed=1)
    alone = start
    for batch in data():
        alone, _ = good(jax.tree.map(jnp.copy, alone), batch)
    bad, state = averaged(rate=1.0 + RANK)
    runner = jaxcross.Runner(WORLD)
    jobs = [
        runner.add("bad", loop, {"step": bad, "state": state, "check_replicas": 3}),
        runner.add("good", loop, {"step": good, "state": start, "check_replicas": 3}),
    ]
    with logged() as lines, pytest.raises(jaxcross.ExchangeError) as caught:
        runner.run()
    assert not lines
    for part in (
        "Job `bad`",
        "after step 3",
        "`[0]['b']`",
        "ranks 0 and 1",
        "equal at the start",
        "rank_local=",
    ):
        assert part in str(caught.value), (part, caught.value)
    assert [(job.status, job.step) for job in jobs] == [("failed", 3), ("ended", STEPS)]
    assert alike(jobs[1].state, alone)
    assert runner.report is not None
    assert runner.report.jobs[1].replicas == "equal in 4 of 5 leaves"


def what_is_not_due_any_more_is_raised_at_the_end():
    step, state = averaged(rate=1.0 + RANK)
    runner = jaxcross.Runner(WORLD)
    job = runner.add("a", loop, {"step": step, "state": state, "check_replicas": 100})
    with pytest.raises(jaxcross.ExchangeError, match=f"differ after step {STEPS}"):
        runner.run()
    assert job.status == "ended" and job.step == STEPS


def exceptions_are_left_out():
    step, state = averaged(rate=1.0 + RANK)
    named = ("[0]", "trace")
    _, report, _ = run(loop, check_replicas=2, step=step, state=state, rank_local=named)
    assert "all of its leaves are rank-local" in report.jobs[0].replicas
    step, state = crossed(optax.adam(0.1), average=True)
    _, report, _ = run(loop, check_replicas=2, step=step, state=state, rank_local="[0]")
    assert (
        report.jobs[0].replicas == "equal in 5 of 8 leaves"
    )  # Adam's counter and two moments each


def strategies_raise_no_false_alarm():
    """A strategy with residuals, one with a model per rank, and one that never gets to exchange."""
    no_false_alarms("top_k", "gossip", "a short run of local_sgd")


def every_strategy_raises_no_false_alarm():
    no_false_alarms()


def no_false_alarms(*names):
    alpha = 0.4 / SIZE
    powers = (
        {}
        if SIZE & (SIZE - 1)
        else {"gtop_k": lambda: optax.chain(exchange.gtop_k(0.2, "batch"), sgd())}
    )
    table = powers | {
        "mean": lambda: optax.chain(exchange.mean("batch"), sgd()),
        "top_k": lambda: optax.chain(exchange.top_k(0.2, "batch"), sgd()),
        "decoupled_momentum": lambda: optax.chain(exchange.decoupled_momentum(0.2, "batch"), sgd()),
        "power_sgd": lambda: optax.chain(exchange.power_sgd(1, "batch"), sgd()),
        "qsgd": lambda: optax.chain(exchange.qsgd(16, "batch"), sgd()),
        "sign_sgd": lambda: optax.chain(exchange.sign_sgd("batch"), sgd()),
        "one_bit_adam": lambda: optax.chain(
            exchange.one_bit_adam(2, "batch", ranks=SIZE, eps=1e-3, block=8), optax.scale(-0.1)
        ),
        "adasum": lambda: exchange.adasum("batch", sgd()),
        "asynchronous": lambda: exchange.asynchronous(sgd(), "batch", delays=list(range(SIZE))),
        "bounded_stale": lambda: exchange.bounded_stale(sgd(), "batch", staleness=2),
        "local_sgd": lambda: exchange.local_sgd(sgd(), "batch", every=3),
        "federated_average": lambda: exchange.federated_average(sgd(), "batch", every=3),
        "elastic_average": lambda: exchange.elastic_average(sgd(), "batch", every=3, alpha=alpha),
        "gossip": lambda: exchange.gossip(sgd(), "batch"),
        "sparse_loco": lambda: exchange.sparse_loco(sgd(), optax.sgd(1.0), "batch", every=3),
        "no_loco": lambda: exchange.no_loco(sgd(), "batch", every=3),
        "sharded_optimizer": lambda: exchange.sharded_optimizer(
            optax.adam(0.1), "batch", ranks=SIZE
        ),
        "accumulated": lambda: exchange.accumulate(
            optax.chain(exchange.mean("batch"), sgd()), every=3
        ),
        "MultiSteps": lambda: optax.MultiSteps(optax.chain(exchange.mean("batch"), sgd()), 3),
        "a short run of local_sgd": lambda: exchange.local_sgd(sgd(), "batch", every=100),
    }
    models = {
        "bounded_stale",
        "local_sgd",
        "federated_average",
        "elastic_average",
        "gossip",
        "no_loco",
        "sparse_loco",
    }
    for name in names or table:
        tx = table[name]
        step, state = crossed(tx())
        for mode in ("check", "local"):
            job, report, lines = run(
                loop, check_replicas=2, step=step, state=jax.tree.map(jnp.copy, state), mode=mode
            )
            text = report.jobs[0].replicas
            assert not lines and job.step == STEPS, (name, mode, lines)
            assert "differ" not in text, (name, mode, text)
            # The two strategies that accumulate have their last step between two exchanges.
            if name not in models and mode == "check" and "short" not in name:
                assert text.startswith("equal in "), (name, text)
            # Parameters are compared, unless each rank has its own model.
            common = job._engine.replicas._common
            assert ("[0]['w']" in common) == (not models & set(name.split())), (name, mode, common)


def statistics_of_a_rank_are_left_out_of_nnx_too():
    class Model(nnx.Module):
        def __init__(self):
            self.dense, self.norm = (
                nnx.Linear(6, 2, rngs=nnx.Rngs(0)),
                nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
            )

    model = Model()
    optimizer = nnx.Optimizer(model, sgd(), wrt=nnx.Param)
    graph, start = nnx.split((model, optimizer))

    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(
            lambda m: jnp.mean((m.norm(m.dense(batch["x"])) - batch["y"]) ** 2)
        )(model)
        optimizer.update(model, jax.lax.pmean(grads, "batch"))
        return nnx.state((model, optimizer)), {"loss": loss}

    job, report, lines = run(loop, check_replicas=2, step=step, state=start)
    assert not lines and report.jobs[0].replicas == "equal in 9 of 11 leaves", (
        lines,
        report.jobs[0].replicas,
    )
    mean = np.asarray(job.state[0]["norm"]["mean"][...])
    assert len(set(WORLD.control.allgather_text(str(mean)))) == SIZE  # they do differ


def parts_of_a_model_raise_no_false_alarm():
    """A sharded model's biases and moments start as zeros on every rank, yet they are shards."""

    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        params, moments, table = state
        grads = jax.lax.psum(batch["x"].sum(0), "batch") * (1 + jax.lax.axis_index("batch"))
        moments = 0.9 * moments + grads
        table = table + jax.lax.pmean(batch["x"].sum(0), "batch")
        return (params - 0.1 * moments, moments, table), {}

    key = jax.random.key(0)
    start = (
        jax.random.normal(jax.random.fold_in(key, RANK), (6,)),  # this rank's shard
        jnp.zeros(6),  # the shard's moments
        jax.random.normal(key, (6,)),  # identical on every rank
    )
    _, report, lines = run(loop, check_replicas=2, step=step, state=start, mode="local")
    assert not lines and report.jobs[0].replicas == "equal in 1 of 3 leaves", report.jobs[
        0
    ].replicas


def jobs_that_are_silent():
    step, start = averaged()
    plain = jax.jit(lambda state, batch: (state, {"loss": jnp.mean(batch["x"] @ state[0]["w"])}))

    def evaluates(job, params):
        for batch in job.batches(data()):
            job.log({"loss": jnp.mean(batch["x"] @ params["w"])})

    def gradient(params, batch):
        return jax.tree.map(lambda p: p * batch["x"].mean(), params)

    def served(job):
        with jaxcross.ParameterServer(start[0], optax.sgd(0.1), staleness=math.inf) as server:
            for batch in job.batches(data()):
                server.push_pull(gradient(server.params, batch))
        return server.params

    def trains_and_evaluates(job):
        state = job.restore(start)
        for batch in job.batches(data()):
            state, _ = step(state, batch)
            for held_out in job.batches(data(2)):
                jax.block_until_ready(plain(state, held_out))
        return state

    def evaluates_restored(job):
        params, loss = job.restore(start[0]), jax.jit(lambda p, b: jnp.mean(b["x"] @ p["w"]))
        for batch in job.batches(data()):
            job.log({"loss": loss(params, batch)})

    def evaluates_and_trains(job):
        state = job.restore(start)
        for held_out in job.batches(data(2)):
            jax.block_until_ready(plain(state, held_out))
        return loop(job, step, state)

    for fn in (evaluates_restored, evaluates_and_trains):
        with logged():
            _, report, lines = run(fn)
        assert "differ" not in report.jobs[0].replicas, report.jobs[0].replicas
        if RANK == 0:
            (line,) = lines
            assert line.startswith(
                "Job `a` has used its first batch and has not exchanged anything with other ranks."
            )
            assert f" If it trains, each of the {SIZE} ranks trains a model of its own." in line
    for fn, arguments in (
        (evaluates, {"params": start[0]}),
        (served, {}),
        (trains_and_evaluates, {}),
    ):
        _, report, lines = run(fn, **arguments)
        assert not lines and "differ" not in report.jobs[0].replicas, (
            fn,
            lines,
            report.jobs[0].replicas,
        )
    with logged() as lines:
        report = jaxcross.run([jaxcross.Job("a", plain, start, data())])
    assert not lines and report.jobs[0].replicas == "equal in 4 of 5 leaves", (
        lines,
        report.jobs[0].replicas,
    )


def checkpoints_compare_and_a_restart_resumes(folder):
    for rate, name in ((1.0, "alike"), (1.0 + RANK, "apart")):
        runs = []
        for steps in (5, STEPS):
            step, state = averaged(rate=rate)
            jobs = [jaxcross.Job("a", step, state, data(), steps=steps)]
            where = jaxcross.Checkpoints(f"{folder}/{name}", every=2)
            with logged() as lines:
                runs.append(jaxcross.run(jobs, checkpoints=where).jobs[0].replicas)
            if RANK == 0 and name == "apart":  # named at the first comparison
                assert (
                    len(lines) == 1 and f"differ after step {2 if steps == 5 else 6}" in lines[0]
                ), lines
            assert name == "apart" or not lines
        if name == "alike":
            assert runs == ["equal in 4 of 5 leaves"] * 2
        else:
            assert runs[0].endswith("on ranks 0 and 1; equal at the start"), runs
            assert runs[1].endswith("on ranks 0 and 1; never found equal in this run"), runs
    with pytest.raises(jaxcross.ExchangeError, match="They were never found equal in this run"):
        jaxcross.run(
            [jaxcross.Job("a", step, state, data(20), steps=20, check_replicas=9)],
            checkpoints=jaxcross.Checkpoints(f"{folder}/apart"),
        )


def comparisons_change_no_bit():
    tx = optax.chain(exchange.top_k(0.2, "batch"), sgd())
    states = []
    for checks in (None, 1):
        step, state = crossed(tx)
        states.append(run(loop, check_replicas=checks, step=step, state=state)[0].state)
    assert alike(*states)


def ranks_must_want_the_same_checks():
    step, state = averaged()
    runner = jaxcross.Runner(WORLD)
    runner.add("a", loop, {"step": step, "state": state, "check_replicas": 2 + RANK})
    with pytest.raises(jaxcross.JobError, match="check_replicas"):
        runner.run()


CASES = (
    plain_jit_is_warned_of_twice,
    a_state_that_was_handed_over_and_donated_is_no_fault,
    a_rate_of_each_rank_is_found_at_the_end,
    a_rate_of_each_rank_is_raised_and_another_job_untouched,
    what_is_not_due_any_more_is_raised_at_the_end,
    exceptions_are_left_out,
    strategies_raise_no_false_alarm,
    every_strategy_raises_no_false_alarm,
    statistics_of_a_rank_are_left_out_of_nnx_too,
    parts_of_a_model_raise_no_false_alarm,
    jobs_that_are_silent,
    checkpoints_compare_and_a_restart_resumes,
    comparisons_change_no_bit,
    ranks_must_want_the_same_checks,
)

for case in CASES:
    if sys.argv[2:] and case.__name__ not in sys.argv[2:]:
        continue
    case(*([sys.argv[1]] if case is checkpoints_compare_and_a_restart_resumes else []))
    if RANK == 0:
        print(f"passed {case.__name__}", flush=True)
