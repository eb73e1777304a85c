"""Every rank: parameter servers over real messages.

Prints one line per case. If a check fails on any rank, that rank raises.
"""

import math
import re
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcross
from jaxcross import ExchangeError, JobError, ParameterServer, Runner, Sequential
from jaxcross.server.clocks import Clocks

WORLD = jaxcross.initialize(stall_timeout_s=60)
LAST = WORLD.size - 1
TARGET = jnp.arange(12, dtype=jnp.float32).reshape(3, 4) + WORLD.rank
PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.zeros(()), "h": jnp.ones(5, jnp.bfloat16)}


@jax.jit
def gradient(params, step):
    """The gradient of a quadratic whose minimum differs between ranks."""

    def loss(params):
        return (
            jnp.sum((params["w"] - TARGET) ** 2) * (1 + step % 2)
            + params["b"] ** 2
            + jnp.sum(params["h"] ** 2)
        )

    return jax.grad(loss)(params)


def train(job=None, *, staleness, steps=6, rate=0.05):
    with ParameterServer(PARAMS, optax.sgd(rate, momentum=0.5), staleness=staleness) as server:
        params = server.params
        for step in range(steps):
            params = server.push_pull(gradient(params, step))
    WORLD.broadcast_or_check(server.params) if job is None else job.restore(server.params)
    return server.params


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(x), np.asarray(y))


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        rtol = 2e-2 if x.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=rtol, atol=rtol
        )


def staleness_0_is_synchronous():
    tx = optax.sgd(0.05, momentum=0.5)

    @jaxcross.crossover(axes="batch")
    def step(params, state, number):
        updates, state = tx.update(jax.lax.pmean(gradient(params, number), "batch"), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for number in range(6):
        params, state = step(params, state, number)
    first = train(staleness=0)
    close(first, params)
    same(first, train(staleness=0))


def the_bound_holds():
    push = Clocks.push
    for staleness in (0, 1, 3):
        spreads = []

        def recorded(clocks, rank, spreads=spreads):
            push(clocks, rank)
            at_work = [clock for clock in clocks.now if clock < math.inf]
            spreads.append(max(at_work) - min(at_work))

        with mock.patch.object(Clocks, "push", recorded):
            train(staleness=staleness, steps=20)
        assert len(spreads) == 20 * WORLD.size
        assert max(spreads) <= staleness + 1


def asynchronous_training_converges():
    for staleness in (2, math.inf):
        with ParameterServer(jnp.zeros(5), optax.sgd(0.1), staleness=staleness) as server:
            params = server.params
            for _ in range(200):
                params = server.push_pull((1 + WORLD.rank) * (params - 3))
        np.testing.assert_allclose(server.params, 3, rtol=1e-3)


def a_slow_worker_holds_others_up_at_the_bound_only():
    for staleness in (0, 2):
        with ParameterServer(PARAMS, optax.sgd(0.01), staleness=staleness) as server:
            pause = threading.Event()
            while WORLD.rank == 0 and min(server.clocks[1:], default=math.inf) < staleness + 1:
                pause.wait(0.001)
            for step in range(5):
                server.push_pull(gradient(server.params, step))


def without_a_bound_others_run_ahead():
    """Shows that the staleness bound is what holds workers back in the cases above.

    Without a bound, rank 0 can start after the others have finished.
    """
    steps = 20
    with ParameterServer(PARAMS, optax.sgd(0.01), staleness=math.inf) as server:
        pause = threading.Event()
        while WORLD.rank == 0 and min(server.clocks[1:], default=math.inf) < steps:
            pause.wait(0.001)
        for step in range(steps):
            server.push_pull(gradient(server.params, step))


def unlike_numbers_of_steps():
    for staleness in (0, 1, math.inf):
        train(staleness=staleness, steps=2 + 3 * WORLD.rank)


def large_messages():
    """Messages above MPI's eager limit: both ends must take part, with all pairs at once."""
    params = jnp.zeros(3_000_000 * WORLD.size)
    with ParameterServer(params, optax.sgd(1.0), staleness=0) as server:
        for _ in range(3):
            params = server.push_pull(jnp.full_like(params, WORLD.rank))
    np.testing.assert_allclose(params, -3 * LAST / 2, rtol=1e-6)


def what_is_not_finite_shows_on_every_rank():
    for bad in (math.nan, math.inf):
        with ParameterServer(jnp.zeros(5 * WORLD.size), optax.sgd(0.1), staleness=1) as server:
            for step in range(3):
                grads = np.zeros(5 * WORLD.size, np.float32)
                grads[-1] = bad if (WORLD.rank, step) == (LAST, 1) else 0.0
                server.push_pull(jnp.asarray(grads))
        assert np.isfinite(server.params).tolist() == [True] * (5 * WORLD.size - 1) + [False]


def failure_of_a_worker():
    for staleness in (0, 1, math.inf):

        def fail(staleness=staleness):
            with ParameterServer(PARAMS, optax.sgd(0.01), staleness=staleness) as server:
                for step in range(5):
                    if WORLD.rank == LAST and step == 3:
                        raise ValueError("the worker failed")
                    server.push_pull(gradient(server.params, step))

        with pytest.raises(ValueError if WORLD.rank == LAST else ExchangeError) as raised:
            fail()
        if WORLD.rank != LAST:
            assert str(raised.value).startswith(
                f"The parameter server cannot continue: the worker of rank {LAST} failed after "
                "step 3: ValueError: the worker failed."
            )
    train(staleness=0)  # nothing is left in flight


def failure_of_a_server():
    def fail():
        with ParameterServer(PARAMS, optax.sgd(0.01), staleness=0) as server:
            if WORLD.rank == LAST:
                server._part.apply = mock.Mock(side_effect=MemoryError("no room"))
            server.push_pull(gradient(server.params, 0))

    with pytest.raises(
        ExchangeError, match=rf"the server of rank {LAST} failed: MemoryError: no room"
    ):
        fail()


def unlike_rules():
    if WORLD.size == 1:
        return
    server = ParameterServer(PARAMS, optax.sgd(0.01), staleness=WORLD.rank)
    with pytest.raises(
        ExchangeError, match=r"^ranks 0 and 1 exchange different things in `parameter server`"
    ):
        server.__enter__()
    params = {"w": jnp.full(3, float(WORLD.rank))}
    with pytest.raises(
        ExchangeError, match=r"^The state differs between ranks 0 and 1, first at `\['w'\]`"
    ):
        ParameterServer(params, optax.sgd(0.01), staleness=0).__enter__()


def two_jobs_in_crossover_equal_jobs_alone():
    expected = [train(staleness=0, rate=rate) for rate in (0.05, 0.02)]
    for policy in (None, Sequential()):
        with Runner(WORLD, policy) as runner:
            jobs = [
                runner.add(f"{rate}", train, {"staleness": 0, "rate": rate})
                for rate in (0.05, 0.02)
            ]
            report = runner.run()
        for job, want in zip(jobs, expected, strict=True):
            same(job.state, want)
            assert job.step == 6
        assert [f.facts.steps for f in report.rounds.jobs] == [6, 6]


def beside_an_ordinary_job():
    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        return state + jax.lax.pmean(batch, "batch")

    def ordinary(job):
        state = jnp.zeros(4)
        for batch in job.batches([jnp.ones(4)] * 30):
            state = step(state, batch)
        return state

    with Runner(WORLD) as runner:
        jobs = [
            runner.add(f"stale {s}", train, {"staleness": s, "steps": 30, "rate": 0.01})
            for s in (1, math.inf)
        ]
        other = runner.add("ordinary", ordinary)
        runner.run()
    assert [job.step for job in (*jobs, other)] == [30, 30, 30]
    assert other.state.tolist() == [30.0] * 4


def failure_of_a_job_beside_another():
    def bad(job):
        with ParameterServer(PARAMS, optax.sgd(0.01), staleness=1) as server:
            for step in range(5):
                if WORLD.rank == LAST and step == 3:
                    raise ValueError("the worker failed")
                server.push_pull(gradient(server.params, step))

    runner = Runner(WORLD)
    runner.add("bad", bad)
    good = runner.add("good", train, {"staleness": 0})
    with pytest.raises(JobError) as error:
        runner.run()
    assert re.search(
        rf"^Job `bad` failed on .*rank {LAST} (failed )?after step 3: ValueError: the worker "
        "failed",
        str(error.value),
    )
    same(good.state, train(staleness=0))


CASES = [
    staleness_0_is_synchronous,
    the_bound_holds,
    asynchronous_training_converges,
    a_slow_worker_holds_others_up_at_the_bound_only,
    without_a_bound_others_run_ahead,
    unlike_numbers_of_steps,
    large_messages,
    what_is_not_finite_shows_on_every_rank,
    failure_of_a_worker,
    failure_of_a_server,
    unlike_rules,
    two_jobs_in_crossover_equal_jobs_alone,
    beside_an_ordinary_job,
    failure_of_a_job_beside_another,
]

for case in CASES:
    case()
    if WORLD.rank == 0:
        print(f"passed {case.__name__}", flush=True)
