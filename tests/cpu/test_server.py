"""The parameter server on ranks that are threads: rule, numerics, failures and every message."""

import math
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.runner import Runner
from jaxcross.runtime import messages as m
from jaxcross.server import ParameterServer, parameter_server
from jaxcross.server.clocks import Clocks
from jaxcross.server.layout import Layout
from jaxcross.server.shard import Shard
from jaxcross.testing import run_ranks

SHAPES = {"w": (5, 3), "b": (3,), "s": (), "e": (0,)}


def parameters(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=shape), dtype) for k, shape in SHAPES.items()}


def gradient(params, rank, step):
    return jax.tree.map(lambda x: ((1 + rank) * (x - rank) * (0.5 + step % 2)).astype(x.dtype), params)


def constant(params, rank, step):
    return jax.tree.map(lambda x: jnp.full_like(x, rank + step), params)


def train(job, world, optimizer, staleness, steps=4, gradient=gradient):
    with ParameterServer(parameters(), optimizer, staleness=staleness, world=world) as server:
        params = server.params
        for step in range(steps):
            params = server.push_pull(gradient(params, world.rank, step))
            job.log({"loss": float(params["s"])})
    return server.params


def run(ranks, **jobs):
    """Final states of the jobs, each given as the arguments of `train`, by rank."""

    def work(world):
        runner = Runner(world)
        for name, arguments in jobs.items():
            runner.add(name, train, world=world, **arguments)
        runner.run()
        return [job.state for job in runner.jobs]

    return run_ranks(ranks, work)


def synchronous(optimizer, ranks, steps=4):
    params = parameters()
    state = optimizer.init(params)
    for step in range(steps):
        grads = [gradient(params, rank, step) for rank in range(ranks)]
        mean = jax.tree.map(lambda *g: sum(g) / ranks, *grads)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, want)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
def test_with_staleness_0_it_is_synchronous_training(ranks, optimizer):
    job = {"optimizer": optimizer, "staleness": 0}
    first = run(ranks, a=job)
    assert_close(first[0][0], synchronous(optimizer, ranks))
    for [state] in (*first, *run(ranks, a=job)):
        assert_same(state, first[0][0])


@pytest.mark.parametrize("staleness", [0, 1, 3, math.inf])
def test_every_gradient_counts_once(staleness):
    results = run(3, a={"optimizer": optax.sgd(0.1), "staleness": staleness, "gradient": constant, "steps": 5})
    total = sum(rank + step for rank in range(3) for step in range(5))
    for [state] in results:
        assert_same(state, results[0][0])
        assert_close(state, jax.tree.map(lambda x: x - 0.1 * total / 3, parameters()))


def test_two_servers_at_once_do_what_each_does_alone():
    a, b = {"optimizer": optax.adam(0.1), "staleness": 0}, {"optimizer": optax.sgd(0.2), "staleness": 0}
    both = run(2, a=a, b=b)
    for rank in range(2):
        assert_same(both[rank], [run(2, a=a)[0][0], run(2, b=b)[0][0]])


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_workers_are_never_further_apart_than_the_bound(staleness, monkeypatch):
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
def test_a_slow_worker_holds_others_up_at_the_bound_only(staleness):
    def fn(job, world):
        with ParameterServer(parameters(), optax.sgd(0.1), staleness=staleness, world=world) as server:
            pause = threading.Event()
            while world.rank == 0 and server.clocks[1] < staleness + 1:
                pause.wait(0.001)
            for step in range(5):
                server.push_pull(gradient(server.params, world.rank, step))
        return server.clocks

    def work(world):
        runner = Runner(world)
        job = runner.add("a", fn, world=world)
        runner.run()
        return job.state, job.step

    assert run_ranks(2, work) == [((math.inf, math.inf), 5)] * 2


@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_workers_may_make_unlike_numbers_of_steps(staleness):
    def work(world):
        runner = Runner(world)
        job = runner.add(
            "a", train, world=world, optimizer=optax.sgd(0.1), staleness=staleness, steps=2 + 4 * world.rank,
            gradient=constant,
        )  # fmt: skip
        runner.run()
        return job.state, job.step

    (a, two), (b, six) = run_ranks(2, work)
    assert (two, six) == (2, 6)
    assert_same(a, b)
    total = sum(rank + step for rank, steps in ((0, 2), (1, 6)) for step in range(steps))
    assert_close(a, jax.tree.map(lambda x: x - 0.1 * total / 2, parameters()))


def test_the_report_counts_steps_and_bytes():
    def work(world):
        runner = Runner(world)
        jobs = [runner.add(name, train, world=world, optimizer=optax.sgd(0.1), staleness=1) for name in "ab"]
        report = runner.run()
        assert [job.step for job in jobs] == [4, 4]
        assert [step for step, _ in jobs[0].history] == [1, 2, 3, 4]
        layout = Layout(parameters(), world.size)
        assert [job.bytes_per_step for job in report.rounds.jobs] == [2 * layout.nbytes] * 2
        assert [job.facts.steps for job in report.rounds.jobs] == [4, 4]
        assert {span.lane for span in report.spans if span.kind == "collective"} == {1, 2}

    run_ranks(2, work)


def failing(ranks, start):
    """What `runner.run` raised on each rank where job `bad` fails, and the final state of job `good`."""

    def work(world):
        runner = Runner(world)
        runner.add("bad", start(world))
        good = runner.add("good", train, world=world, optimizer=optax.sgd(0.1), staleness=0)
        with pytest.raises((JobError, ExchangeError)) as error:
            runner.run()
        return error.value, good.state

    return run_ranks(ranks, work)


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_a_worker_that_fails_ends_its_job_on_every_rank(staleness):
    def start(world):
        def fn(job):
            with ParameterServer(parameters(), optax.sgd(0.1), staleness=staleness, world=world) as server:
                for step in range(5):
                    if step == 3 and world.rank == 1:
                        raise ValueError("boom")
                    server.push_pull(gradient(server.params, world.rank, step))

        return fn

    for error, good in failing(3, start):
        assert str(error).startswith("Job `bad` failed on ")
        # Of rank 1 itself, or of one that it told before its own text was asked for.
        assert re.search("rank 1 (failed )?after step 3: ValueError: boom", str(error))
        assert_close(good, synchronous(optax.sgd(0.1), 3))


def test_what_the_other_ranks_are_told():
    told = {}

    def start(world):
        def fn(job):
            try:
                with ParameterServer(parameters(), optax.sgd(0.1), staleness=0, world=world) as server:
                    for step in range(3):
                        if step == 1 and world.rank == 2:
                            raise ValueError("boom")
                        server.push_pull(gradient(server.params, world.rank, step))
            except ExchangeError as error:
                told[world.rank] = str(error)
                raise

        return fn

    failing(3, start)
    text = (
        "The parameter server cannot go on: the worker of rank 2 failed after step 1: ValueError: boom. Every rank"
        " leaves it."
    )
    assert told == {0: text, 1: text}


def test_a_server_that_fails_ends_its_job_on_every_rank(monkeypatch):
    apply = Shard.apply

    def broken(shard, gradients):
        if shard in bad:
            raise MemoryError("no room")
        apply(shard, gradients)

    bad = []
    monkeypatch.setattr(Shard, "apply", broken)

    def start(world):
        def fn(job):
            with ParameterServer(parameters(), optax.sgd(0.1), staleness=0, world=world) as server:
                if world.rank == 1:
                    bad.append(server._shard)
                for step in range(3):
                    server.push_pull(gradient(server.params, world.rank, step))

        return fn

    for error, good in failing(2, start):
        assert "the server of rank 1 failed: MemoryError: no room" in str(error)
        assert_close(good, synchronous(optax.sgd(0.1), 2))


@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_an_interrupt_stops_all_ranks(staleness):
    def endless(job, world):
        with ParameterServer(parameters(), optax.sgd(0.01), staleness=staleness, world=world) as server:
            while True:
                if world.rank == 0 and job.step == 3 and job.name == "a":
                    job._driver.post(m.StopRequested())  # what the main thread does on Ctrl-C
                server.push_pull(gradient(server.params, world.rank, job.step))

    def work(world):
        runner = Runner(world)
        for name in "ab":
            runner.add(name, endless, world=world)
        with pytest.raises(KeyboardInterrupt):
            runner.run()
        return [job.error for job in runner.jobs]

    assert run_ranks(2, work) == [[None, None]] * 2


@pytest.mark.parametrize(
    ("unlike", "message"),
    [
        ({"staleness": lambda rank: rank}, "exchange different things in `bad`"),
        ({"params": lambda rank: {"w": jnp.full(3, float(rank))}}, "The state differs between ranks"),
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
        with pytest.raises(ValueError, match=r"^`staleness` of a parameter server is `-1`: it counts steps"):
            ParameterServer(parameters(), optax.sgd(0.1), staleness=-1, world=world)
        with pytest.raises(ValueError, match=r"^`staleness` of a parameter server is `0.5`"):
            ParameterServer(parameters(), optax.sgd(0.1), staleness=0.5, world=world)
        with pytest.raises(TypeError, match=r"^`\['n'\]` of the parameters is of type int32: a parameter server"):
            ParameterServer({"n": jnp.arange(3)}, optax.sgd(0.1), staleness=0, world=world)
        server = ParameterServer(parameters(), optax.sgd(0.1), staleness=0, world=world)
        with pytest.raises(JobError, match=r"^`push_pull` of a parameter server works inside its `with` block"):
            server.push_pull(parameters())
        with server:
            with pytest.raises(ValueError, match=r"^gradients have the structure"):
                server.push_pull([1.0])
            for wrong in (jnp.ones(4), jnp.ones(3, jnp.bfloat16)):
                text = rf"^the gradient `\['b'\]` is {wrong.dtype}\[{wrong.size}\], the parameter float32\[3\]"
                with pytest.raises(ValueError, match=text):
                    server.push_pull(parameters() | {"b": wrong})
        with pytest.raises(JobError, match=r"^`push_pull` of a parameter server works inside its `with` block"):
            server.push_pull(parameters())
        with pytest.raises(JobError, match=r"^This parameter server was used"), server:
            pass

    def work(world):
        runner = Runner(world)
        runner.add("a", fn, world=world)
        runner.run()

    run_ranks(1, work)


def test_only_a_server_without_staleness_repeats():
    def work(world):
        return [
            ParameterServer(parameters(), optax.sgd(0.1), staleness=s, world=world).deterministic
            for s in (0, 1, math.inf)
        ]

    assert run_ranks(1, work) == [[True, False, False]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_layout_puts_together_what_it_took_apart(ranks):
    params = parameters() | {"h": jnp.arange(11, dtype=jnp.bfloat16), "c": jnp.ones((2, 2), jnp.complex64)}
    layout = Layout(params, ranks)
    leaves = jax.tree.leaves(params)
    messages = layout.parts(leaves)
    assert {message.nbytes for message in messages} == {layout.nbytes}
    for got, want in zip(layout.join(messages), leaves, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    for message in messages:
        np.testing.assert_array_equal(layout.message(layout.views(message)), message)


def test_16_bit_gradients_are_added_in_32():
    params = {"h": jnp.zeros(2, jnp.bfloat16)}
    layout = Layout(params, 1)
    shard = Shard(optax.sgd(1.0), layout, layout.parts([params["h"]])[0], ranks=3)
    grads = [jnp.asarray([x, 1], jnp.bfloat16) for x in (256, 1, 1)]
    shard.apply({rank: layout.parts([g])[0] for rank, g in enumerate(grads)})
    (got,) = layout.join([shard.message()])
    assert got.astype(np.float32).tolist() == [-86, -1]


def test_parameters_may_be_donated():
    def fn(job, world):
        given = parameters()
        with ParameterServer(given, optax.sgd(0.1), staleness=0, world=world) as server:
            jax.tree.map(lambda x: x.delete(), given)
            return server.push_pull(gradient(server.params, 0, 0))

    def work(world):
        runner = Runner(world)
        job = runner.add("a", fn, world=world)
        runner.run()
        return job.state

    assert_close(run_ranks(1, work)[0], synchronous(optax.sgd(0.1), 1, steps=1))


def test_the_ranks_that_are_waited_for_have_names():
    lane = object.__new__(parameter_server.Lane)
    lane._clocks, lane._answers = Clocks(3, 1), {0: None, 2: None}
    lane._mailbox = type("Box", (), {"rank": 0, "size": 3})()
    assert lane.awaited() == {1: "its server has not answered"}
    for _ in range(2):
        lane._clocks.push(0)
    lane._clocks.push(2)
    assert lane.awaited() == {1: "its worker is at step 0"}
