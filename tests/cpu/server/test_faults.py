"""Parameter servers that fail, are stopped or are misused: an error on every rank, never a hang."""

import math
import re

import jax.numpy as jnp
import optax
import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.interleave import messages as m
from jaxcross.jobs.runner import Runner
from jaxcross.server import ParameterServer
from jaxcross.server.served_part import ServedPart
from tests.support.fakes import run_ranks
from tests.support.server_jobs import assert_close, gradient, parameters, synchronous, train


def failing(ranks, start):
    """Returns what `runner.run` raised on each rank, and the final state of job `good`."""

    def work(world):
        runner = Runner(world)
        runner.add("bad", start(world))
        good = runner.add(
            "good", train, {"world": world, "optimizer": optax.sgd(0.1), "staleness": 0}
        )
        with pytest.raises((JobError, ExchangeError)) as error:
            runner.run()
        return error.value, good.state

    return run_ranks(ranks, work)


@pytest.mark.mostly_integration("inf")
@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_failing_worker_ends_its_job_on_every_rank(staleness):
    def start(world):
        def fn(job):
            with ParameterServer(
                parameters(), optax.sgd(0.1), staleness=staleness, world=world
            ) as server:
                for step in range(5):
                    if step == 3 and world.rank == 1:
                        raise ValueError("the worker failed")
                    server.push_pull(gradient(server.params, world.rank, step))

        return fn

    for error, good in failing(3, start):
        assert str(error).startswith("Job `bad` failed on ")
        # From rank 1 itself, or from a rank that received its error before comparing its own text.
        assert re.search("rank 1 (failed )?after step 3: ValueError: the worker failed", str(error))
        assert_close(good, synchronous(optax.sgd(0.1), 3))


@pytest.mark.integration
def test_worker_failure_text_is_the_same_on_the_other_ranks():
    texts = {}

    def start(world):
        def fn(job):
            try:
                with ParameterServer(
                    parameters(), optax.sgd(0.1), staleness=0, world=world
                ) as server:
                    for step in range(3):
                        if step == 1 and world.rank == 2:
                            raise ValueError("the worker failed")
                        server.push_pull(gradient(server.params, world.rank, step))
            except ExchangeError as error:
                texts[world.rank] = str(error)
                raise

        return fn

    failing(3, start)
    text = (
        "The parameter server cannot continue: the worker of rank 2 failed after step 1: "
        "ValueError: the worker failed. Every rank leaves its `with` block. Fix that error, and "
        "run again."
    )
    assert texts == {0: text, 1: text}


@pytest.mark.integration
def test_failing_server_ends_its_job_on_every_rank(monkeypatch):
    apply = ServedPart.apply

    def broken(shard, gradients):
        if shard in bad:
            raise MemoryError("no room")
        apply(shard, gradients)

    bad = []
    monkeypatch.setattr(ServedPart, "apply", broken)

    def start(world):
        def fn(job):
            with ParameterServer(parameters(), optax.sgd(0.1), staleness=0, world=world) as server:
                if world.rank == 1:
                    bad.append(server._part)
                for step in range(3):
                    server.push_pull(gradient(server.params, world.rank, step))

        return fn

    for error, good in failing(2, start):
        assert "the server of rank 1 failed: MemoryError: no room" in str(error)
        assert_close(good, synchronous(optax.sgd(0.1), 2))


@pytest.mark.mostly_integration("0")
@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_an_interrupt_stops_all_ranks(staleness):
    def endless(job, world):
        with ParameterServer(
            parameters(), optax.sgd(0.01), staleness=staleness, world=world
        ) as server:
            while True:
                if world.rank == 0 and job.step == 3 and job.name == "a":
                    job._engine.driver.post(
                        m.StopRequested()
                    )  # what the main thread does on Ctrl-C
                server.push_pull(gradient(server.params, world.rank, job.step))

    def work(world):
        runner = Runner(world)
        for name in "ab":
            runner.add(name, endless, {"world": world})
        with pytest.raises(KeyboardInterrupt):
            runner.run()
        return [job.error for job in runner.jobs]

    assert run_ranks(2, work) == [[None, None]] * 2


@pytest.mark.mostly_integration("0")
@pytest.mark.parametrize("staleness", [0, math.inf])
def test_one_ranks_wish_stops_its_job_alone(staleness):
    def endless(job, world):
        with ParameterServer(
            parameters(), optax.sgd(0.01), staleness=staleness, world=world
        ) as server:
            while True:
                if world.rank == 1 and job.step == 3:
                    job.stop()
                server.push_pull(gradient(server.params, world.rank, job.step))

    def work(world):
        runner = Runner(world)
        endless_job = runner.add("endless", endless, {"world": world})
        good = runner.add(
            "good", train, {"world": world, "optimizer": optax.sgd(0.1), "staleness": 0}
        )
        report = runner.run()
        assert (
            [job.how for job in report.jobs]
            == [endless_job.status, good.status]
            == ["stopped", "ended"]
        )
        return good.state

    for state in run_ranks(2, work):
        assert_close(state, synchronous(optax.sgd(0.1), 2))


@pytest.mark.mostly_integration("unlike0-exchange different things in `bad`")
@pytest.mark.parametrize(
    ("unlike", "message"),
    [
        ({"staleness": lambda rank: rank}, "exchange different things in `bad`"),
        (
            {"params": lambda rank: {"w": jnp.full(3, float(rank))}},
            "The state differs between ranks",
        ),
    ],
)
def test_ranks_must_agree(unlike, message):
    def start(world):
        def fn(job):
            staleness = unlike["staleness"](world.rank) if "staleness" in unlike else 0
            params = unlike["params"](world.rank) if "params" in unlike else parameters()
            with ParameterServer(params, optax.sgd(0.1), staleness=staleness, world=world):
                raise AssertionError("not noticed")

        return fn

    for error, _ in failing(2, start):
        assert message in str(error)


def test_bad_arguments():
    def fn(job, world):
        with pytest.raises(
            ValueError, match=r"^`staleness` of a parameter server must be a .*`math.inf`, got -1"
        ):
            ParameterServer(parameters(), optax.sgd(0.1), staleness=-1, world=world)
        with pytest.raises(ValueError, match=r"^`staleness` of a parameter .* got 0\.5\."):
            ParameterServer(parameters(), optax.sgd(0.1), staleness=0.5, world=world)
        with pytest.raises(ValueError, match=r"^`staleness` of a parameter .* got True\."):
            ParameterServer(parameters(), optax.sgd(0.1), staleness=True, world=world)
        with pytest.raises(
            TypeError, match=r"^`\['n'\]` of the parameters is of type int32, but a parameter"
        ):
            ParameterServer({"n": jnp.arange(3)}, optax.sgd(0.1), staleness=0, world=world)
        server = ParameterServer(parameters(), optax.sgd(0.1), staleness=0, world=world)
        with pytest.raises(
            JobError, match=r"^`push_pull` of .* was called outside its `with` block\."
        ):
            server.push_pull(parameters())
        with server:
            with pytest.raises(ValueError, match=r"^`grads` of `push_pull` must have the same"):
                server.push_pull([1.0])
            for wrong in (jnp.ones(4), jnp.ones(3, jnp.bfloat16)):
                text = (
                    rf"^the gradient `\['b'\]` is {wrong.dtype}\[{wrong.size}\], "
                    r"but its parameter is float32\[3\]"
                )
                with pytest.raises(ValueError, match=text):
                    server.push_pull(parameters() | {"b": wrong})
        with pytest.raises(
            JobError, match=r"^`push_pull` of .* was called outside its `with` block\."
        ):
            server.push_pull(parameters())
        with pytest.raises(JobError, match=r"^This parameter server was used"), server:
            pass

    def work(world):
        runner = Runner(world)
        runner.add("a", fn, {"world": world})
        runner.run()

    run_ranks(1, work)
