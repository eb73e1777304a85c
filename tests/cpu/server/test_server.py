"""The parameter server with threads as ranks: its rule and numerics."""

import math
import threading
from collections import Counter

import jax
import optax
import pytest

from jaxcross.jobs.runner import Runner
from jaxcross.server import ParameterServer
from jaxcross.server.clocks import Clocks
from tests.support.fakes import FakeMailbox, run_ranks
from tests.support.server_jobs import (
    assert_close,
    assert_same,
    constant,
    gradient,
    parameters,
    run,
    synchronous,
    train,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.mostly_integration("optimizer0-2")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
def test_with_staleness_0_it_is_synchronous_training(ranks, optimizer):
    job = {"optimizer": optimizer, "staleness": 0}
    first = run(ranks, a=job)
    assert_close(first[0][0], synchronous(optimizer, ranks))
    for [state] in (*first, *run(ranks, a=job)):
        assert_same(state, first[0][0])


@pytest.mark.mostly_integration("1", "3")
@pytest.mark.parametrize("staleness", [0, 1, 3, math.inf])
def test_every_gradient_counts_once(staleness):
    results = run(
        3, a={"optimizer": optax.sgd(0.1), "staleness": staleness, "gradient": constant, "steps": 5}
    )
    total = sum(rank + step for rank in range(3) for step in range(5))
    for [state] in results:
        assert_same(state, results[0][0])
        assert_close(state, jax.tree.map(lambda x: x - 0.1 * total / 3, parameters()))


@pytest.mark.integration
def test_two_servers_at_once_do_what_each_does_alone():
    a, b = (
        {"optimizer": optax.adam(0.1), "staleness": 0},
        {"optimizer": optax.sgd(0.2), "staleness": 0},
    )
    both = run(2, a=a, b=b)
    for rank in range(2):
        assert_same(both[rank], [run(2, a=a)[0][0], run(2, b=b)[0][0]])


@pytest.mark.mostly_integration("1", "2")
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_workers_stay_within_the_staleness_bound(staleness, monkeypatch):
    spreads, push = [], Clocks.push

    def recorded(clocks, rank):
        push(clocks, rank)
        at_work = [clock for clock in clocks.now if clock < math.inf]
        spreads.append(max(at_work) - min(at_work))

    monkeypatch.setattr(Clocks, "push", recorded)
    run(3, a={"optimizer": optax.sgd(0.01), "staleness": staleness, "steps": 12})
    assert len(spreads) == 3 * 3 * 12
    assert max(spreads) <= staleness + 1


@pytest.mark.parametrize("staleness", [0, 2])
def test_slow_worker_delays_others_only_at_the_bound(staleness):
    def fn(job, world):
        with ParameterServer(
            parameters(), optax.sgd(0.1), staleness=staleness, world=world
        ) as server:
            pause = threading.Event()
            while world.rank == 0 and server.clocks[1] < staleness + 1:
                pause.wait(0.001)
            for step in range(5):
                server.push_pull(gradient(server.params, world.rank, step))
        return server.clocks

    def work(world):
        runner = Runner(world)
        job = runner.add("a", fn, {"world": world})
        runner.run()
        return job.state, job.step

    assert run_ranks(2, work) == [((math.inf, math.inf), 5)] * 2


@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_workers_may_make_unlike_numbers_of_steps(staleness):
    def work(world):
        runner = Runner(world)
        job = runner.add(
            "a",
            train,
            {
                "world": world,
                "optimizer": optax.sgd(0.1),
                "staleness": staleness,
                "steps": 2 + 4 * world.rank,
                "gradient": constant,
            },
        )
        runner.run()
        return job.state, job.step

    (a, two), (b, six) = run_ranks(2, work)
    assert (two, six) == (2, 6)
    assert_same(a, b)
    total = sum(rank + step for rank, steps in ((0, 2), (1, 6)) for step in range(steps))
    assert_close(a, jax.tree.map(lambda x: x - 0.1 * total / 2, parameters()))


def test_the_report_counts_steps():
    def work(world):
        runner = Runner(world)
        jobs = [
            runner.add(name, train, {"world": world, "optimizer": optax.sgd(0.1), "staleness": 1})
            for name in "ab"
        ]
        report = runner.run()
        assert [job.step for job in jobs] == [4, 4]
        assert [step for step, _ in jobs[0].history] == [1, 2, 3, 4]
        assert [job.facts.steps for job in report.rounds.jobs] == [4, 4]
        assert {span.lane for span in report.spans if span.kind == "collective"} == {1, 2}

    run_ranks(2, work)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_report_counts_the_bytes_that_leave(ranks, monkeypatch):
    left, send = Counter(), FakeMailbox.send

    def counted(box, rank, tag, message):
        left[box.rank] += message.nbytes if rank != box.rank else 0
        send(box, rank, tag, message)

    monkeypatch.setattr(FakeMailbox, "send", counted)

    def work(world):
        runner = Runner(world)
        runner.add(
            "a", train, {"world": world, "optimizer": optax.sgd(0.1), "staleness": 1, "steps": 4}
        )
        (job,) = runner.run().rounds.jobs
        return job.bytes_per_step

    for rank, in_a_step in enumerate(run_ranks(ranks, work)):
        # A step consists of gradients and answers. At the end, every server answers once more.
        assert left[rank] == (4 + 1 / 2) * in_a_step
        assert bool(in_a_step) == (ranks > 1)


def test_only_a_server_without_staleness_repeats():
    def work(world):
        return [
            ParameterServer(parameters(), optax.sgd(0.1), staleness=s, world=world).deterministic
            for s in (0, 1, math.inf)
        ]

    assert run_ranks(1, work) == [[True, False, False]]


def test_parameters_may_be_donated():
    def fn(job, world):
        given = parameters()
        with ParameterServer(given, optax.sgd(0.1), staleness=0, world=world) as server:
            jax.tree.map(lambda x: x.delete(), given)
            return server.push_pull(gradient(server.params, 0, 0))

    def work(world):
        runner = Runner(world)
        job = runner.add("a", fn, {"world": world})
        runner.run()
        return job.state

    assert_close(run_ranks(1, work)[0], synchronous(optax.sgd(0.1), 1, steps=1))
