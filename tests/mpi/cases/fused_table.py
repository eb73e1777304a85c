"""Every rank: compares fused jobs with the same jobs alone. Prints one line per case."""

import itertools
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from runner_steps import RATES, WORLD, data, init, make_step, same

import jaxcross
from jaxcross import exchange
from jaxcross.errors import JobError
from jaxcross.gains.fusion import fused_step
from jaxcross.jobs.fused import FusedJob

K, STEPS = 3, 4


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(24)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.relu(nn.Dense(24)(x)))


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


class Attention(nn.Module):
    """Attention over an image, with its rows as the tokens."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


class Mixed(nn.Module):
    """One layer of each kind, so that a single compilation covers all of them."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (4, 4), (4, 4)).reshape(x.shape[0], 16, 4)
        return nn.Dense(10)((x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))).mean(1))


NETS = {"dense": Dense(), "conv": Conv(), "attention": Attention()}
EXCHANGES = {
    "mean": lambda: exchange.mean("batch"),
    "top-k": lambda: exchange.top_k(0.1, "batch"),
    "powersgd": lambda: exchange.power_sgd(2, "batch"),
}


def images(job, n=STEPS):
    rng = np.random.default_rng(100 * job + WORLD.rank)
    for _ in range(n):
        x = rng.normal(size=(8, 16, 16, 1)).astype(np.float32)
        yield {"x": x, "y": rng.integers(0, 10, 8).astype(np.int32)}


def network(net, make_exchange):
    tx = optax.chain(
        make_exchange(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.9)
    )

    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def step(state, batch):
        params, opt_state = state

        def loss(params):
            found = net.apply(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(found, batch["y"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    def state(job):
        params = net.init(jax.random.key(job), jnp.zeros((1, 16, 16, 1)))
        opt_state: Any = tx.init(params)
        opt_state[1].hyperparams["learning_rate"] = jnp.float32(0.02 * (job + 1))
        return params, opt_state

    return step, state


def a_network_keeps_its_bits():
    keep_their_bits([(("mixed", Mixed()), ("mean", EXCHANGES["mean"]))], 2)


def every_network_and_exchange_keeps_its_bits():
    keep_their_bits(itertools.product(NETS.items(), EXCHANGES.items()), K)


def keep_their_bits(pairs, k):
    for (name, net), (what, make_exchange) in pairs:
        step, state = network(net, make_exchange)
        # Exchanges with residuals have rank-local state, hence `mode="local"`.
        jobs = [
            jaxcross.Job(f"{name}-{n}", step, state(n), images(n), mode="local") for n in range(k)
        ]
        jaxcross.run(jaxcross.fuse(jobs, when="always"))
        for n, job in enumerate(jobs):
            expected = state(n)
            for batch in images(n):
                expected, _ = step(expected, batch)
            differs = sum(int(np.sum(np.asarray(x) != np.asarray(y))) for x, y in zip(
                jax.tree.leaves(job.state), jax.tree.leaves(expected), strict=True))  # fmt: skip
            assert differs == 0, f"{name} {what} job {n}: {differs} elements"
            assert job.step == STEPS == len(job.history)


def jobs(step, lengths=(6, 3, 6)):
    rates = [*RATES.values()]
    return [
        jaxcross.Job(f"j{n}", step, init(rates[n]), data(length, n))
        for n, length in enumerate(lengths)
    ]


def expected(step, n, length):
    state = init([*RATES.values()][n])
    for batch in data(length, n):
        state, _ = step(state, batch)
    return state


def one_ends_first():
    """A job leaves as soon as its data has ended on any rank.

    Statistics are exchanged before gradients.
    """
    step = make_step()
    found = jobs(step, (6, 3 + 2 * WORLD.rank, 6))
    report = jaxcross.run(jaxcross.fuse(found, when="always"))
    for n, length in enumerate((6, 3, 6)):
        same(found[n].state, expected(step, n, length))
        assert found[n].step == length == len(found[n].history)
    assert [job.name for job in report.jobs] == ["j0+j1+j2"] and report.jobs[0].steps == 6
    assert "fused, as asked" in str(report)


def one_stops_early():
    step = make_step()
    found = jobs(step, (6, 6, 6))
    found[2].every(1, lambda state: 1.0 + WORLD.rank)
    found[2].stop_early("eval", mode="min", patience=2)
    jaxcross.run(jaxcross.fuse(found, when="always"))
    for n, length in enumerate((6, 6, 3)):
        same(found[n].state, expected(step, n, length))
    assert [each for each in found[2].history if "eval" in each[1]] == [
        (n, {"eval": 1.0}) for n in (1, 2, 3)
    ]  # of rank 0


def data_of_one_raise_on_one_rank():
    def broken():
        yield from data(2, 1)
        if WORLD.rank == WORLD.size - 1:
            raise OSError("no such shard")
        yield from data(4, 7)

    step = make_step()
    found = jobs(step)
    found[1] = jaxcross.Job("j1", step, init(RATES["lr-0.4"]), broken())
    try:
        jaxcross.run(jaxcross.fuse(found, when="always"))
    except JobError as error:
        assert f"Job `j1` failed on rank {WORLD.size - 1}" in str(error) and "no such shard" in str(
            error
        ), error
    else:
        raise AssertionError("the job did not fail")
    for n, length in enumerate((6, 2, 6)):
        same(found[n].state, expected(step, n, length))


def one_is_not_finite():
    step = make_step()
    found = jobs(step, (4, 4, 4))
    bad = init(float("nan"))
    found[1] = jaxcross.Job("j1", step, bad, data(4, 1))
    jaxcross.run(jaxcross.fuse(found, when="always"))
    assert all(np.isnan(np.asarray(leaf)).all() for leaf in jax.tree.leaves(found[1].state[0]))
    for n in (0, 2):
        same(found[n].state, expected(step, n, 4))


def an_error_after_a_step():
    """The failing call donated the previous state, so all ranks keep the committed one."""
    step, calls = make_step(), []
    fused = fused_step(step)

    def fails(states, batches):
        results = fused(states, batches)
        calls.append(None)
        if len(calls) == 3 and WORLD.rank == 0:
            raise ArithmeticError("no more")
        return results

    found = jobs(step, (6, 6, 6))
    try:
        jaxcross.run([FusedJob(found, fails)])
    except JobError as error:
        assert "no more" in str(error)
    else:
        raise AssertionError("the jobs did not fail")
    for n, job in enumerate(found):
        assert job.step == 3
        same(job.state, expected(step, n, 3))


def it_is_measured():
    """Which way is faster depends on the machine, but all ranks choose the same one."""
    step = make_step()
    found = jobs(step, (6, 6, 6))
    fusion = jaxcross.fuse(found)
    (text,) = fusion.reasons
    assert len({*WORLD.control.allgather_text(text)}) == 1
    assert len(fusion) == (1 if ": fused, " in text else 3) and "alone takes" in text, text
    report = jaxcross.run(fusion)
    assert report.fusion == fusion.reasons
    for n in range(3):
        same(found[n].state, expected(step, n, 6))


def unlike_jobs():
    step = make_step()
    found = jobs(step)[: 3 - WORLD.rank]
    try:
        jaxcross.fuse(found, when="always")
    except JobError as error:
        assert "fuse different jobs" in str(error)
    else:
        raise AssertionError("the ranks fused different jobs")
    # On rank 0 both jobs share a step; on other ranks each has its own. Only rank 0 would measure.
    found = jobs(step)[:2]
    if WORLD.rank:
        found[1] = jaxcross.Job("j1", make_step(), found[1].state, data(3, 1))
    try:
        jaxcross.fuse(found)
    except JobError as error:
        assert "let the same jobs share a step" in str(error)
    else:
        raise AssertionError("the ranks fused different jobs")


def conditionals():
    """A conditional on data may take a different branch in each job.

    One that the host decides isn't fused.
    """

    @jaxcross.crossover(axes="batch")
    def by_data(state, batch):
        return jax.lax.cond(
            batch > 1, lambda x: jax.lax.psum(x, "batch"), lambda x: x + 1, state
        ), {}

    @jaxcross.crossover(axes="batch")
    def by_counter(state, batch):
        count, x = state
        return (
            count + 1,
            jax.lax.cond(count % 2 == 0, lambda x: jax.lax.psum(x, "batch"), lambda x: x + 1, x),
        ), {}

    for step, state in ((by_data, jnp.ones(2)), (by_counter, (jnp.int32(0), jnp.ones(2)))):
        traced = step.trace(state, jnp.float32(1))
        batches = {"a": [1.0, 2.0, 1.0], "b": [2.0, 2.0, 1.0]}
        found, alone = (
            [
                jaxcross.Job(name, step, state, map(jnp.float32, each))
                for name, each in batches.items()
            ]
            for _ in range(2)
        )
        jaxcross.run(alone)
        fusion = jaxcross.fuse(found)
        assert ("conditional that the host decides" in str(fusion)) == (
            traced.undecided is not None
        )
        jaxcross.run(
            fusion if traced.undecided is not None else jaxcross.fuse(found, when="always")
        )
        for one, other in zip(found, alone, strict=True):
            same(one.state, other.state)
            assert one.step == other.step == 3


CASES = [
    a_network_keeps_its_bits, every_network_and_exchange_keeps_its_bits,
    one_ends_first, one_stops_early, data_of_one_raise_on_one_rank,
    one_is_not_finite, an_error_after_a_step, it_is_measured, unlike_jobs,
    conditionals,
]  # fmt: skip

wanted = sys.argv[1:] or [case.__name__ for case in CASES]
for case in [case for case in CASES if case.__name__ in wanted]:
    case()
    if WORLD.rank == 0:
        print(f"passed {case.__name__}", flush=True)
