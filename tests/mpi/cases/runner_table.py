"""Every rank: jobs over real exchanges.

Prints one line per case. If a check fails on any rank, that rank exits with an error.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
from runner_cuts import a_trial_that_fails_on_one_rank, the_cut_is_searched_for
from runner_faults import (
    a_branch_at_different_calls,
    data_that_raises_on_one_rank,
    failure_of_a_job_that_saves_nothing,
    failure_of_one_job,
    failure_to_compile_on_one_rank,
    interrupt,
    stray_threads,
    unlike_exchanges,
    unlike_exchanges_alone,
    unlike_numbers_of_steps,
    unlike_shapes,
)
from runner_steps import RATES, WORLD, alone, data, init, make_step, same, train

import jaxcross
from jaxcross import Link, RoundRobin, Runner, Sequential, lab
from jaxcross.plan import JobCost, choose_compression


def crossover_equals_alone():
    for cut in ("whole", 2):
        lengths = dict(zip(RATES, (8, 5, 6), strict=True))
        step = make_step(cut)
        expected = {name: alone(step, rate, lengths[name]) for name, rate in RATES.items()}
        for policy in (RoundRobin(), Sequential()):
            with Runner(WORLD, policy) as runner:
                for name, rate in RATES.items():
                    runner.add(name, train, {"step": step, "rate": rate, "n": lengths[name]})
                report = runner.run()
            for job in runner.jobs:
                same(job.state, expected[job.name])
                assert job.step == lengths[job.name] == len(job.history)
            assert [f.facts.steps for f in report.rounds.jobs] == list(lengths.values())


def jobs_from_one_state():
    """Each job donates its own copy, so neither the other job nor the caller loses the state."""
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
        b = runner.add("b", train, {"step": step, "rate": 0.2, "n": 9})
        runner.run()
    same(a.state, alone(step, 0.1, 4))
    same(b.state, alone(step, 0.2, 9))
    assert len(a.history) == 4


def emulated_link():
    """Exchanges last as long as on the emulated link, and every output says that it's emulated."""
    jobs = [
        jaxcross.Job(name, make_step(), init(rate), data(6), steps=6)
        for name, rate in RATES.items()
    ]
    with lab.emulated_link(Link(8, latency_s=1e-3)):
        report = jaxcross.run(jobs, world=WORLD)
    assert "emulated link" in str(report)
    exchanges = [s for s in report.spans if s.kind == "collective" and s.nbytes]
    assert exchanges
    for span in exchanges:
        assert span.label == "emulated"
        assert span.end_ns - span.start_ns > 0.99e9 * (1e-3 + span.nbytes / 1e6)


def compression_is_chosen_from_a_report():
    """Follows the docstring's example: every rank makes the same choice, and its exchange works."""
    jobs = [
        jaxcross.Job(name, make_step(), init(rate), data(4), steps=4)
        for name, rate in RATES.items()
    ]
    with lab.emulated_link(Link(0.8, latency_s=1e-3)):
        report = jaxcross.run(jobs, world=WORLD)
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


CASES = [
    crossover_equals_alone,
    jobs_from_one_state,
    unlike_lengths_of_data,
    evaluation_beside_training,
    failure_of_one_job,
    failure_of_a_job_that_saves_nothing,
    the_cut_is_searched_for,
    a_trial_that_fails_on_one_rank,
    unlike_exchanges,
    unlike_exchanges_alone,
    unlike_shapes,
    failure_to_compile_on_one_rank,
    unlike_numbers_of_steps,
    data_that_raises_on_one_rank,
    stray_threads,
    interrupt,
    emulated_link,
    compression_is_chosen_from_a_report,
    a_branch_at_different_calls,
]

wanted = sys.argv[1:] or [case.__name__ for case in CASES]
for case in [case for case in CASES if case.__name__ in wanted]:
    case()
    if WORLD.rank == 0:
        print(f"passed {case.__name__}", flush=True)
