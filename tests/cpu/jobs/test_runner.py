"""The runner with threads as ranks: jobs equal jobs run alone, and what they log and restore."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.errors import JobError
from jaxcross.interleave.instrument import SpanLog
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import loop, make_step, solo


@pytest.mark.parametrize("policy", [RoundRobin(), Weighted((1, 2, 1)), Sequential()])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_jobs_in_crossover_equal_jobs_alone(ranks, policy):
    data = {
        "a": [[1.0, 2.0, 3.0]] * ranks,
        "b": [[float(r), 5.0] for r in range(ranks)],
        "c": [[]] * ranks,
    }

    def work(world):
        log = SpanLog()
        with Runner(world, policy, instruments=[log]) as runner:
            for name, batches in data.items():
                runner.add(
                    name, loop, {"step": make_step(world, name), "data": batches[world.rank]}
                )
            report = runner.run()
        order = [(s.job, s.step) for s in log.spans if s.kind == "collective"]
        return (
            [(j.state, j.step) for j in runner.jobs],
            order,
            [f.facts.steps for f in report.rounds.jobs],
            log.notes,
        )

    results = run_ranks(ranks, work)
    for states, order, steps, notes in results:
        assert states == [(solo(batches), len(batches[0])) for batches in data.values()]
        assert order == results[0][1]
        assert steps == [3, 2, 0]
        assert {(job, value) for job, kind, _, value in notes if kind == "done"} == {
            (n, "ended") for n in data
        }
    if policy == Sequential():
        assert [job for job, _ in results[0][1]] == ["a"] * 3 + ["b"] * 2


@pytest.mark.parametrize("mode", ["check", "broadcast", "local"])
def test_a_restored_state_is_a_copy(mode):
    mine = {"host": np.zeros(2), "device": jnp.zeros(2)}

    def work(world):
        job = (runner := Runner(world)).add("a", lambda job: job.restore(mine, mode=mode))
        runner.run()
        return job.state

    (state,) = run_ranks(1, work)
    mine["host"][:] = 1
    mine["device"].delete()
    assert state["host"].tolist() == state["device"].tolist() == [0, 0]


def test_listeners_hear_how_a_job_ended():
    def fail(job):
        raise RuntimeError("the training loop failed")

    def work(world):
        log = SpanLog()
        runner = Runner(world, instruments=[log])
        runner.add("bad", fail)
        runner.add("good", lambda job: None)
        with pytest.raises(JobError):
            runner.run()
        return {
            name: [(kind, str(value)[:23]) for job, kind, _, value in log.notes if job == name][-2:]
            for name in ("bad", "good")
        }

    (notes,) = run_ranks(1, work)
    assert notes["bad"] == [("status", "Job `bad` failed on ran"), ("closed", "failed")]
    assert notes["good"][-1] == ("done", "ended")


def test_a_job_is_shown_in_a_line():
    def fails(job, step):
        step(0.0, 1.0)
        raise ValueError("the training loop failed")

    def work(world):
        runner = Runner(world)
        job = runner.add("a", fails, {"step": make_step(world)})
        shown = [repr(job)]
        with pytest.raises(JobError):
            runner.run()
        return [*shown, repr(job), repr(runner.report)]

    before, after, report = run_ranks(1, work)[0]
    assert before == "<job `a`, not over, after step 0>"
    assert (
        after.startswith("<job `a`, failed (")
        and after.endswith("), after step 1>")
        and "the training loop failed" in after
    )
    assert report.startswith("<Report of 1 job (1 failed): 1 step in ")


def test_logs_are_read_back_in_order():
    def work(world):
        log = SpanLog()
        runner = Runner(world, instruments=[log])
        job = runner.add(
            "a", loop, {"step": make_step(world), "data": [np.ones((4, 2), np.float32)] * 3}
        )
        report = runner.run()
        assert [n[2:] for n in log.notes if n[1] == "loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
        facts = report.rounds.jobs[0].facts
        assert (facts.final_loss, facts.examples_per_step) == (3.0, 4.0 * world.size)
        return job.history

    assert run_ranks(1, work) == [[(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0})]]


def test_what_was_logged_may_be_donated_or_overwritten():
    def train(job):
        step = jax.jit(
            lambda state, x: {"n": state["n"] + 1, "w": state["w"] @ x}, donate_argnums=0
        )
        state, buffer = {"n": jnp.zeros((), int), "w": jnp.eye(200)}, np.zeros(())
        for n in range(20):
            state = step(state, jnp.eye(200))
            buffer[...] = n
            job.log({"n": state["n"], "buffer": buffer})

    def work(world):
        job = (runner := Runner(world)).add("a", train)
        runner.run()
        return [(values["n"], values["buffer"]) for _, values in job.history]

    assert run_ranks(1, work) == [[(n + 1, n) for n in range(20)]]


def test_logged_key_is_read_back_as_its_key_data():
    key = jax.random.key(7)

    def work(world):
        job = (runner := Runner(world)).add("a", lambda job: job.log({"key": key, "keys": [key]}))
        runner.run()
        return job.history

    (((step, values),),) = run_ranks(1, work)
    assert step == 0
    assert values["key"].tolist() == values["keys"][0].tolist() == jax.random.key_data(key).tolist()


def test_logging_traced_values_error_says_where_to_log():
    def work(world):
        runner = Runner(world)
        runner.add("a", lambda job: jax.jit(lambda x: job.log({"loss": x}))(1.0))
        with pytest.raises(
            JobError,
            match=r"TypeError: `job.log` was called with traced values, inside a `jax.jit` or",
        ):
            runner.run()

    run_ranks(1, work)


def test_only_kinds_of_spans_can_be_measured():
    def work(world):
        def train(job):
            with (
                pytest.raises(
                    ValueError,
                    match="^`kind` of `job.measure` in job `a` must be one of 'compute', .*'host'",
                ),
                job.measure("evaluation"),
            ):
                raise AssertionError

        runner = Runner(world)
        runner.add("a", train)
        runner.run()

    run_ranks(1, work)


def test_run_is_the_plain_loop():
    def work(world):
        one = make_step(world)

        def step(state, batch):
            state = one(state, batch)
            return state, {"loss": 0.0}

        jobs = [Job(name, step, 0.0, [1.0] * 5, steps=n) for n, name in ((3, "a"), (9, "b"))]
        run(jobs, policy=RoundRobin(), world=world)
        return [(job.state, job.step) for job in jobs]

    assert run_ranks(2, work) == [[(solo([[1.0] * n] * 2), n) for n in (3, 5)]] * 2


def test_a_step_must_return_a_pair_in_the_plain_loop():
    def work(world):
        with pytest.raises(
            JobError, match=r"`step` of job `a` must return a pair `\(state, metrics\)`, got a "
        ):
            run([Job("a", make_step(world), 0.0, [1.0])], world=world)

    assert run_ranks(1, work) == [None]


def test_different_jobs_on_two_ranks():
    def work(world):
        runner = Runner(world)
        runner.add(f"a{world.rank}", lambda job: None)
        with pytest.raises(JobError, match=r"^Ranks 0 and 1 want to run different things: "):
            runner.run()

    assert run_ranks(2, work) == [None, None]


def test_different_shares_on_two_ranks():
    def work(world):
        runner = Runner(world, Weighted((1, 1 + world.rank)))
        runner.add("a", lambda job: None)
        runner.add("b", lambda job: None)
        with pytest.raises(
            JobError, match=r"^Ranks 0 and 1 want to run different things: .*shares=\(1\.0, 2\.0\)"
        ):
            runner.run()

    assert run_ranks(2, work) == [None, None]


def test_bad_arguments():
    def work(world):
        runner = Runner(world, Weighted((1, 2)))
        runner.add("a", lambda job: None)
        with pytest.raises(ValueError, match=r"^`Weighted` has 2 shares, but the run has 1 jobs"):
            runner.run()
        runner = Runner(world)
        with pytest.raises(ValueError, match=r"^A runner without jobs has nothing to run\."):
            runner.run()
        with pytest.raises(ValueError, match=r"^A runner without jobs has nothing to run\."):
            run([], world=world)
        job = runner.add("a", lambda job: None)
        with pytest.raises(ValueError, match=r"^There is a job `a` already\."):
            runner.add("a", lambda job: None)
        with pytest.raises(
            TypeError, match=r"^Job `b` needs a function `fn\(job, \*\*kwargs\)`, got a `int`"
        ):
            runner.add("b", 3)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"^the name of a job must be a text that is not empty, got ''$"
        ):
            runner.add("", lambda job: None)
        with pytest.raises(JobError, match=r"^Job `a` is not running\."):
            job.batches([])
        with pytest.raises(JobError, match=r"^Job `a` is not running\."):
            job.restore(0.0)
        with pytest.raises(
            TypeError,
            match=r"^`step` of job `x` must be a function of `\(state, batch\)`, got 1\.$",
        ):
            Job("x", 1, None, [])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^`steps` of job `x` must be at least 0, got -1\.$"):
            Job("x", print, None, [], steps=-1)
        runner.run()
        with pytest.raises(JobError, match=r"^`runner.run\(\)` was called twice"):
            runner.run()
        with pytest.raises(JobError, match=r"^Job `c` was added too late"):
            runner.add("c", lambda job: None)

    assert run_ranks(1, work) == [None]
