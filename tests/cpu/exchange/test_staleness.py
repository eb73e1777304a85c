"""Scheduled stale gradients each count once, as late as scheduled; bad schedules are rejected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import mean
from jaxcross.exchange.staleness import asynchronous, bounded_stale
from tests.support.quadratic_training import (
    OPTIMIZERS,
    RANKS,
    assert_close,
    assert_same,
    distance,
    parameters,
    quadratic,
    train,
    zero,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "tx",
    [
        asynchronous(optax.identity(), "batch", delays=1),
        bounded_stale(optax.identity(), "batch", staleness=1),
    ],
    ids=["asynchronous", "bounded_stale"],
)
def test_waiting_gradients_are_not_rounded(tx):
    """Pending gradients aren't rounded to the parameters' type."""
    params = jnp.zeros((2, 4), jnp.bfloat16)
    grads = jnp.stack([jnp.full(4, 1 / 3), jnp.full(4, 1 / 7)])  # float32
    init = jax.vmap(tx.init)(params)
    step = jax.vmap(lambda g, s: tx.update(g, s), axis_name="batch")
    first, state = step(grads, init)
    second, _ = step(jnp.zeros_like(grads), state)
    np.testing.assert_allclose(first + second, np.full((2, 4), (1 / 3 + 1 / 7) / 2), rtol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(
    "stale",
    [
        lambda optimizer: bounded_stale(optimizer, "batch", staleness=0),
        lambda optimizer: asynchronous(optimizer, "batch", delays=0),
        lambda optimizer: asynchronous(optimizer, "batch", delays=[[0] * RANKS, [0] * RANKS]),
    ],
)
def test_without_delay_it_is_synchronous_to_the_bit(name, stale):
    optimizer = OPTIMIZERS[name]
    got, _ = train(stale(optimizer), parameters(), 3)
    want, _ = train(optax.chain(mean("batch"), optimizer), parameters(), 3)
    assert_same(got, want)


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_bounded_stale_delays_only_other_ranks(bound):
    """With `bounded_stale`, a rank applies its own gradients at once and others' late."""
    rate, steps = 0.05, 7
    history, _ = train(
        bounded_stale(optax.sgd(rate), "batch", staleness=bound), parameters(), steps
    )
    x = {k: np.stack([np.asarray(v, np.float64)] * RANKS) for k, v in parameters().items()}
    past = []
    for number, got in enumerate(history):
        g = quadratic(x, number)
        past.append(g)
        late = past[number - bound] if number >= bound else jax.tree.map(np.zeros_like, g)
        x = {k: x[k] - rate / RANKS * (g[k] + late[k].sum(0, keepdims=True) - late[k]) for k in x}
        assert_close(got, x, 1e-5)


@pytest.mark.parametrize(
    "stale",
    [
        bounded_stale(optax.sgd(0.1), "batch", staleness=2),
        asynchronous(optax.sgd(0.1), "batch", delays=[[0, 1, 3], [2, 2, 0]]),
    ],
)
def test_every_gradient_counts_once(stale):
    """After steps with gradients and enough without, all ranks are where synchronous SGD is."""
    rng = np.random.default_rng(0)
    fixed = [
        jax.tree.map(lambda x: rng.normal(size=(RANKS, *x.shape)).astype(np.float32), parameters())
    ] * 3

    def gradients(params, step):
        return fixed[step] if step < len(fixed) else zero(params, step)

    history, _ = train(stale, parameters(), 8, gradients=gradients)
    (*_, want), _ = train(
        optax.chain(mean("batch"), optax.sgd(0.1)), parameters(), 3, gradients=gradients
    )
    assert distance(history[2], want) > 1e-3
    assert_close(history[-1], want, 1e-5)


@pytest.mark.parametrize("delays", [2, [0, 1, 2], [[0, 1, 2], [3, 0, 1]], [[1], [0], [2]]])
def test_asynchronous_applies_what_arrives(delays):
    rate, steps = 0.05, 9
    history, _ = train(asynchronous(optax.sgd(rate), "batch", delays=delays), parameters(), steps)
    table = {2: [[2] * 3], 3: [[0, 1, 2]]}.get(delays if delays == 2 else None, delays)
    table = [table] if isinstance(table[0], int) else [row * (RANKS // len(row)) for row in table]
    x = {k: np.asarray(v, np.float64) for k, v in parameters().items()}
    arriving = [{k: np.zeros_like(v) for k, v in x.items()} for _ in range(steps + 4)]
    for number, got in enumerate(history):
        g = quadratic({k: np.stack([v] * RANKS) for k, v in x.items()}, number)
        for rank in range(RANKS):
            due = arriving[number + table[number % len(table)][rank]]
            for k, v in due.items():
                due[k] = v + g[k][rank] / RANKS
        x = {k: v - rate * arriving[number][k] for k, v in x.items()}
        assert all((v == v[:1]).all() for v in got.values())
        assert_close({k: v[0] for k, v in got.items()}, x, 1e-5)


def test_staleness_needs_a_smaller_rate():
    def bowl(params, step):
        return params

    def size(delay, rate):
        (*_, last), _ = train(
            asynchronous(optax.sgd(rate), "batch", delays=delay), parameters(), 40, gradients=bowl
        )
        return max(float(np.abs(x).max()) for x in last.values() if x.size)

    assert size(0, 0.9) < 1e-6
    assert size(3, 0.9) > 10
    assert size(3, 0.2) < 1e-1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: bounded_stale(optax.sgd(0.1), "batch", staleness=-1),
            r"^`staleness` of `bounded_stale` must be a whole number, 0 or more, got `-1`",
        ),
        (
            lambda: asynchronous(optax.sgd(0.1), "batch", delays=-1),
            r"^`delays` of `asynchronous` must be .*, got `-1`",
        ),
        (
            lambda: asynchronous(optax.sgd(0.1), "batch", delays=[]),
            r"^`delays` of `asynchronous` must be .*, got `\[\]`",
        ),
        (
            lambda: asynchronous(optax.sgd(0.1), "batch", delays=[[1], [1, 2]]),
            r"^`delays` of `asynchronous` must be",
        ),
        (
            lambda: asynchronous(optax.sgd(0.1), "batch", delays=0.5),
            r"^`delays` of `asynchronous` must be .*, got `0.5`",
        ),
    ],
)
def test_schedules_are_refused_when_they_are_made(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("of", "to"),
    [
        (
            bounded_stale(optax.sgd(1.0), "batch", staleness=1),
            bounded_stale(optax.sgd(1.0), "batch", staleness=3),
        ),
        (
            bounded_stale(optax.sgd(1.0), "batch", staleness=0),
            bounded_stale(optax.sgd(1.0), "batch", staleness=3),
        ),
        (
            asynchronous(optax.sgd(1.0), "batch", delays=1),
            asynchronous(optax.sgd(1.0), "batch", delays=2),
        ),
        (
            asynchronous(optax.sgd(1.0), "batch", delays=1),
            asynchronous(optax.sgd(1.0), "batch", delays=0),
        ),
    ],
)
def test_a_state_of_other_delays_is_refused(of, to):
    """With other delays, pending gradients would be lost or counted twice."""
    step = jax.vmap(
        lambda g: to.update(g, of.init(jnp.zeros(2)), jnp.zeros(2))[0], axis_name="batch"
    )
    with pytest.raises(
        ValueError,
        match=r"^`(bounded_stale|asynchronous)` got a state with \d slots for delayed gradients",
    ):
        step(jnp.ones((2, 2)))


@pytest.mark.parametrize("delays", [[0, 0], [1, 2]])
def test_a_schedule_for_another_world_is_refused(delays):
    with pytest.raises(
        ValueError, match=r"^`delays` of `asynchronous` are for 2 ranks, but the axis has 3"
    ):
        train(asynchronous(optax.sgd(0.1), "batch", delays=delays), parameters(), 1)
