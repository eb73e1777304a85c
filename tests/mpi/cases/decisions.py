"""Conditionals that exchange, and whose branch depends on values.

If ranks decide differently, every rank gets an error.

Prints `rank R: decisions done`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcross

WORLD = jaxcross.initialize(stall_timeout_s=60)
RANK, P = WORLD.rank, WORLD.size
SAID = r"ranks decided the conditional at .* differently\. Of those that exchange in it over "


def trainer(wrap):
    """A step whose optimizer exchanges, and its initial state. The batch is the gradient."""
    tx = wrap(optax.chain(jaxcross.exchange.mean("batch"), optax.sgd(1.0)))

    @jaxcross.crossover(axes="batch")
    def train_step(state, gradient):
        params, opt_state = state
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.asarray(np.zeros((4, 3), np.float32))
    return train_step, (params, tx.init(params))


def gradient(value, bad=()):
    return np.full((4, 3), np.nan if RANK in bad else value, np.float32)


def in_a_job(step, *args):
    """Makes one call in a job. If the call fails, all ranks leave the job."""
    runner = jaxcross.Runner(WORLD)
    runner.add("one", lambda job: step(*args))
    runner.run()


def skips_what_is_not_finite(tx):
    return optax.MultiSteps(tx, 1, should_skip_update_fn=optax.skip_not_finite)


def alone():
    forks_alone(lambda tx: optax.apply_if_finite(tx, 5), branch=1)
    forks_alone(skips_what_is_not_finite, branch=0)


def forks_alone(wrap, branch):
    step, state = trainer(wrap)
    state = step(state, gradient(1.0))
    with pytest.raises(jaxcross.ExchangeError) as error:
        step(state, gradient(1.0, bad=[P - 1]))
    text = str(error.value)
    assert text.startswith("in step 2 of `train_step`: ranks decided the conditional at "), text
    assert (
        f"over `batch`, {P - 1} took branch {branch}, which exchanges, and 1 took one that does "
        "not." in text
    ), text
    # The failed step still made its exchanges, so ranks that kept their state may continue.
    params, _ = step(state, gradient(2.0))
    assert (params == -3).all()
    # If all ranks have a NaN, all of them skip the step as usual.
    params, _ = step(state, gradient(1.0, bad=range(P)))
    assert (params == -1).all()


def a_job_leaves_and_another_stays():
    def fn(job, bad):
        step, state = trainer(lambda tx: optax.apply_if_finite(tx, 5))
        for n in range(4):
            state = step(state, gradient(1.0, bad=bad if n == 2 else ()))
        return state

    runner = jaxcross.Runner(WORLD)
    forked, good = runner.add("forked", fn, {"bad": [0]}), runner.add("good", fn, {"bad": []})
    ranks = ", ".join(map(str, range(P)))
    with pytest.raises(
        jaxcross.JobError,
        match=f"^Job `forked` failed on ranks {ranks} in step 3, .*ExchangeError: {SAID}",
    ):
        runner.run()
    assert (forked.status, good.status, good.step) == ("failed", "ended", 4)
    assert (good.state[0] == -4).all()


def who_exchanges_nothing_may_differ():
    @jaxcross.crossover(axes="batch")
    def step(which, x):
        ways = [lambda v: lax.psum(v, "batch"), lambda v: v + 1, lambda v: v + 2]
        return lax.switch(which, ways, x)

    x = jnp.ones(3)
    assert (step(jnp.float32(1 + RANK % 2).astype(jnp.int32), x) == 2 + RANK % 2).all()


def by_value(ways):
    """A step with a `switch` whose index the host can't know."""

    @jaxcross.crossover(axes={"row": 2, "col": -1})
    def step(which, x):
        return lax.switch(jnp.round(which).astype(jnp.int32), ways, x)

    return lambda which: step(jnp.float32(which), jnp.ones(3))


def only_those_count_who_exchange_with_one_another():
    row = RANK // (P // 2)
    step = by_value([lambda v: lax.psum(v, "col"), lambda v: v])
    assert (step(row) == (1 if row else P // 2)).all()
    groups = [list(range(m, P, 2)) for m in range(2)]
    step = by_value([lambda v: lax.psum(v, ("row", "col"), axis_index_groups=groups), lambda v: v])
    assert (step(RANK % 2) == (1 if RANK % 2 else len(groups[0]))).all()
    if P > 2:
        with pytest.raises(
            jaxcross.JobError, match=SAID + "`row`, `col`, 1 took branch 0, .*, and 1 took one that"
        ):
            in_a_job(step, RANK > 1)


def several_branches_exchange():
    step = by_value([lambda v: lax.psum(v, "row"), lambda v: lax.pmax(v * 3, "row"), lambda v: v])
    assert (step(1) == 3).all() and (step(0) == 2).all() and (step(2) == 1).all()
    with pytest.raises(
        jaxcross.JobError,
        match=SAID + "`row`, 1 took branch 0, .*, and 1 took branch 1, which exch",
    ):
        in_a_job(step, RANK // (P // 2))


def one_inside_another():
    def inner(v):
        total = lax.psum(v, "col")
        return lax.cond(v[0] > 2, lambda u: lax.psum(u, ("row", "col")), lambda u: u - 1, total)

    @jaxcross.crossover(axes={"row": 2, "col": -1})
    def step(v):
        return lax.cond(v[1] > 0, inner, lambda u: u, v)

    many = P // 2
    assert (step(jnp.array([1.0, 0.0])) == jnp.array([1.0, 0.0])).all()
    assert (step(jnp.array([1.0, 1.0])) == many - 1).all()
    assert (step(jnp.array([3.0, 1.0])) == jnp.array([3.0, 1.0]) * many * P).all()
    with pytest.raises(
        jaxcross.JobError, match=SAID + r"`row`, `col`, \d took branch 1, .*, and \d took one that"
    ):
        in_a_job(step, jnp.array([3.0 if RANK == 0 else 1.0, 1.0]))


def a_loop_inside():
    def twice(v):
        return lax.scan(lambda c, _: (lax.psum(c, "batch"), None), v, None, length=2)[0]

    step = jaxcross.crossover(lambda v: lax.cond(v[0] > 0, twice, lambda u: u, v), axes="batch")
    assert (step(jnp.ones(2)) == P**2).all()
    with pytest.raises(jaxcross.JobError, match=SAID):
        in_a_job(step, jnp.full(2, float(RANK)))


def who_failed_is_not_taken_for_one_that_decided_otherwise():
    def check(v):
        if RANK == 1:
            raise ValueError("a bad batch")
        return np.asarray(v)

    def fn(job):
        @jaxcross.crossover(axes="batch")
        def step(x):
            x = jax.pure_callback(check, jax.ShapeDtypeStruct((3,), jnp.float32), x)
            return lax.cond(x[0] > 0, lambda v: lax.psum(v, "batch"), lambda v: v, x)

        step(jnp.ones(3))

    runner = jaxcross.Runner(WORLD)
    runner.add("a", fn)
    with pytest.raises(
        jaxcross.JobError, match="(?s)^Job `a` failed on rank 1 in step 1, .*a bad batch"
    ) as error:
        runner.run()
    assert "decided" not in str(error.value)


CASES = [
    alone,
    a_job_leaves_and_another_stays,
    who_exchanges_nothing_may_differ,
    only_those_count_who_exchange_with_one_another,
    several_branches_exchange,
    one_inside_another,
    a_loop_inside,
    who_failed_is_not_taken_for_one_that_decided_otherwise,
]

for case in CASES:
    case()
print(f"rank {RANK}: decisions done", flush=True)
