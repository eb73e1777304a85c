"""The sharded parameter server, stale gradients by a schedule, and norms shared out over ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import mean, parallel_norms
from jaxcross.exchange.sharded_optimizer import sharded_optimizer
from jaxcross.exchange.staleness import asynchronous, bounded_stale
from jaxcross.testing import vmapped

pytestmark = pytest.mark.exhaustive

RANKS = 3
SHAPES = {"w": (5, 3), "b": (3,), "s": (), "e": (0,)}


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in SHAPES.items()}


def quadratic(params, step):
    """Each rank's gradient; parameters of all ranks at once."""

    def one(x):
        rank = np.arange(len(x), dtype=np.float32).reshape(-1, *[1] * (x.ndim - 1))
        return (1 + rank) * (x - rank) * np.float32(0.5 + step % 2)

    return jax.tree.map(lambda x: one(np.asarray(x, np.float32)).astype(x.dtype), params)


def zero(params, step):
    return jax.tree.map(np.zeros_like, params)


def train(tx, params, steps, ranks=RANKS, gradients=quadratic, state=None):
    """Parameters of all ranks after each step, and the last state."""
    params = jax.tree.map(lambda x: np.stack([x] * ranks), params)
    state = jax.vmap(lambda p: tx.init(p), axis_name="batch")(params) if state is None else state

    @jax.jit
    @lambda f: jax.vmap(f, axis_name="batch")
    def step(g, state, p):
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    history = []
    for number in range(steps):
        params, state = jax.tree.map(np.asarray, step(gradients(params, number), state, params))
        history.append(params)
    return history, state


def assert_close(got, want, rtol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, want)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def distance(a, b):
    return max(
        float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True) if x.size
    )


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1, mask={"w": True, "b": False, "s": False, "e": True}),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_optimizer_is_synchronous_training(name, ranks):
    optimizer = OPTIMIZERS[name]
    (*_, got), _ = train(sharded_optimizer(optimizer, "batch"), parameters(), 3, ranks)
    (*_, want), _ = train(optax.chain(mean("batch"), optimizer), parameters(), 3, ranks)
    assert_close(got, want, 1e-5)
    assert all((x == x[:1]).all() for x in jax.tree.leaves(got))


def test_a_state_of_another_number_of_ranks_is_refused():
    state = sharded_optimizer(optax.adam(0.1), "batch", ranks=2).init(parameters())
    state = jax.tree.map(lambda x: np.stack([x] * RANKS), state)
    text = r"^the state of `sharded_optimizer` is \[2\] at `\[0\]\.mu\['b'\]`, but must be \[1\] here: it was made with"
    with pytest.raises(ValueError, match=text):
        train(sharded_optimizer(optax.adam(0.1), "batch"), parameters(), 1, state=state)


def test_a_state_of_as_wide_parts_cannot_be_told():
    one = {"w": jnp.ones(1)}
    state = sharded_optimizer(optax.adam(0.1), "batch", ranks=2).init(one)
    train(sharded_optimizer(optax.adam(0.1), "batch"), one, 1, state=jax.tree.map(lambda x: np.stack([x] * 3), state))


def test_each_rank_keeps_its_part_of_the_state():
    params = parameters()
    tx = sharded_optimizer(optax.adam(0.1), "batch", ranks=4)
    mu = tx.init(params).per_rank[0].mu
    assert jax.tree.map(lambda x: x.shape, mu) == {"w": (4,), "b": (1,), "s": (1,), "e": (0,)}
    inside = jax.vmap(lambda _: tx.init(params), axis_name="batch")(jnp.arange(4))
    assert_same(jax.tree.map(lambda x: x[0], inside), tx.init(params))


def test_types_travel_apart():
    params = {"w": jnp.ones((3, 2)), "h": jnp.ones(5, jnp.bfloat16)}
    (*_, got), _ = train(sharded_optimizer(optax.sgd(0.25), "batch"), params, 2)
    (*_, want), _ = train(optax.chain(mean("batch"), optax.sgd(0.25)), params, 2)
    assert got["h"].dtype == jnp.bfloat16
    assert_close(got["w"], want["w"])
    np.testing.assert_allclose(got["h"].astype(np.float32), want["h"].astype(np.float32), rtol=2e-2)


def test_16_bit_gradients_are_summed_in_32():
    grads = jnp.ones((8, 16), jnp.bfloat16).at[0].set(256)  # in bfloat16, 256 + 1 is 256
    tx = sharded_optimizer(optax.sgd(1.0), "batch")

    def one(g):
        return tx.update(g, tx.init(g), g)[0]

    updates = jax.vmap(one, axis_name="batch")(grads)
    np.testing.assert_array_equal(updates, jnp.full((8, 16), -263 / 8, jnp.bfloat16))


@pytest.mark.parametrize(
    "tx",
    [asynchronous(optax.identity(), "batch", delays=1), bounded_stale(optax.identity(), "batch", bound=1)],
    ids=["asynchronous", "bounded_stale"],
)
def test_what_waits_is_not_rounded_to_the_parameters_type(tx):
    params = jnp.zeros((2, 4), jnp.bfloat16)
    grads = jnp.stack([jnp.full(4, 1 / 3), jnp.full(4, 1 / 7)])  # float32
    init = jax.vmap(tx.init)(params)
    step = jax.vmap(lambda g, s: tx.update(g, s), axis_name="batch")
    first, state = step(grads, init)
    second, _ = step(jnp.zeros_like(grads), state)
    np.testing.assert_allclose(first + second, np.full((2, 4), (1 / 3 + 1 / 7) / 2), rtol=1e-6)


def starts_from_values():
    return optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (jax.tree.map(jnp.subtract, s, p), s))


def test_state_that_starts_from_values_starts_in_the_step():
    tx = sharded_optimizer(starts_from_values(), "batch", ranks=RANKS)
    with pytest.raises(
        ValueError, match=r"^the optimizer of `sharded_optimizer` starts its state from the parameters'"
    ):
        tx.init(parameters())
    _, state = train(tx, parameters(), 1)
    flat = np.asarray(parameters()["w"]).reshape(RANKS, -1)
    np.testing.assert_array_equal(state.per_rank["w"], flat)


def test_messages_of_the_sharded_optimizer():
    with pytest.raises(ValueError, match=r"^`init` of `sharded_optimizer` runs outside of the step and does not know"):
        sharded_optimizer(optax.sgd(0.1), "batch").init(parameters())
    tx = sharded_optimizer(optax.sgd(0.1), "batch", ranks=2)
    with pytest.raises(ValueError, match=r"^`ranks` of `sharded_optimizer` is 2, but the axis has 3: parameters and"):
        train(tx, parameters(), 1, state=optax.EmptyState())
    with pytest.raises(ValueError, match=r"^`axis_name` of `sharded_optimizer`"):
        sharded_optimizer(optax.sgd(0.1), ("a", "b"))


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(
    "stale",
    [
        lambda optimizer: bounded_stale(optimizer, "batch", bound=0),
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
def test_bounded_stale_sees_its_own_at_once_and_others_late(bound):
    rate, steps = 0.05, 7
    history, _ = train(bounded_stale(optax.sgd(rate), "batch", bound=bound), parameters(), steps)
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
        bounded_stale(optax.sgd(0.1), "batch", bound=2),
        asynchronous(optax.sgd(0.1), "batch", delays=[[0, 1, 3], [2, 2, 0]]),
    ],
)
def test_every_gradient_counts_once(stale):
    """After some steps of gradients and enough without, all ranks are where synchronous SGD would be."""
    rng = np.random.default_rng(0)
    fixed = [jax.tree.map(lambda x: rng.normal(size=(RANKS, *x.shape)).astype(np.float32), parameters())] * 3

    def gradients(params, step):
        return fixed[step] if step < len(fixed) else zero(params, step)

    history, _ = train(stale, parameters(), 8, gradients=gradients)
    (*_, want), _ = train(optax.chain(mean("batch"), optax.sgd(0.1)), parameters(), 3, gradients=gradients)
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
        (*_, last), _ = train(asynchronous(optax.sgd(rate), "batch", delays=delay), parameters(), 40, gradients=bowl)
        return max(float(np.abs(x).max()) for x in last.values() if x.size)

    assert size(0, 0.9) < 1e-6
    assert size(3, 0.9) > 10
    assert size(3, 0.2) < 1e-1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: bounded_stale(optax.sgd(0.1), "batch", bound=-1),
            r"^`bound` of `bounded_stale` is `-1`: it counts and",
        ),
        (lambda: asynchronous(optax.sgd(0.1), "batch", delays=-1), r"^`delays` of `asynchronous` are `-1`: they are"),
        (lambda: asynchronous(optax.sgd(0.1), "batch", delays=[]), r"^`delays` of `asynchronous` are `\[\]`"),
        (lambda: asynchronous(optax.sgd(0.1), "batch", delays=[[1], [1, 2]]), r"^`delays` of `asynchronous` are"),
        (lambda: asynchronous(optax.sgd(0.1), "batch", delays=0.5), r"^`delays` of `asynchronous` are `0.5`"),
    ],
)
def test_schedules_are_refused_when_they_are_made(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("of", "to"),
    [
        (bounded_stale(optax.sgd(1.0), "batch", bound=1), bounded_stale(optax.sgd(1.0), "batch", bound=3)),
        (bounded_stale(optax.sgd(1.0), "batch", bound=0), bounded_stale(optax.sgd(1.0), "batch", bound=3)),
        (asynchronous(optax.sgd(1.0), "batch", delays=1), asynchronous(optax.sgd(1.0), "batch", delays=2)),
        (asynchronous(optax.sgd(1.0), "batch", delays=1), asynchronous(optax.sgd(1.0), "batch", delays=0)),
    ],
)
def test_a_state_of_other_delays_is_refused(of, to):
    """What waits would be lost, or count twice."""
    step = jax.vmap(lambda g: to.update(g, of.init(jnp.zeros(2)), jnp.zeros(2))[0], axis_name="batch")
    with pytest.raises(ValueError, match=r"^`(bounded_stale|asynchronous)` got a state in which gradients wait in \d "):
        step(jnp.ones((2, 2)))


def test_an_optimizer_that_exchanges_is_refused():
    """Every rank steps another part: a mean over the same ranks would be one of unlike elements."""

    def step_on(axes, averaged):
        own = optax.chain(optax.stateless(lambda u, _: jax.lax.pmean(u, averaged)), optax.sgd(1.0))
        tx = sharded_optimizer(own, "batch")
        return vmapped(lambda g: tx.update(g, tx.init(g), g)[0], axes)

    with pytest.raises(
        ValueError, match=r"^the optimizer of `sharded_optimizer` exchanges over `batch` itself, by `psum"
    ):
        step_on({"batch": 2}, "batch")(jnp.ones((2, 4)))
    out = step_on({"other": 2, "batch": 2}, "other")(jnp.arange(16.0).reshape(2, 2, 4))
    np.testing.assert_array_equal(out, -jnp.broadcast_to(jnp.arange(6.0, 10.0), (2, 2, 4)))


@pytest.mark.parametrize("delays", [[0, 0], [1, 2]])
def test_a_schedule_for_another_world_is_refused(delays):
    with pytest.raises(ValueError, match=r"^`delays` of `asynchronous` are for 2 ranks, but the axis has 3"):
        train(asynchronous(optax.sgd(0.1), "batch", delays=delays), parameters(), 1)


def masked():
    return {"w": True, "b": False, "s": True, "e": False}


PARALLEL = {
    "lars": (parallel_norms.lars("batch", 0.1, weight_decay=0.01), optax.lars(0.1, weight_decay=0.01)),
    "lars with masks": (
        parallel_norms.lars("batch", 0.1, 0.01, masked(), trust_ratio_mask=masked(), nesterov=True),
        optax.lars(0.1, 0.01, masked(), trust_ratio_mask=masked(), nesterov=True),
    ),
    "lamb": (parallel_norms.lamb("batch", 0.1, weight_decay=0.01), optax.lamb(0.1, weight_decay=0.01)),
    "smallest norm": (
        parallel_norms.scale_by_trust_ratio("batch", min_norm=2.0, trust_coefficient=0.3, eps=0.1),
        optax.scale_by_trust_ratio(2.0, 0.3, 0.1),
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_norms_are_optax_s(name, ranks):
    shared, alone = PARALLEL[name]
    (*_, got), _ = train(optax.chain(mean("batch"), shared), parameters(), 2, ranks)
    (*_, want), _ = train(optax.chain(mean("batch"), alone), parameters(), 2, ranks)
    assert_close(got, want)
    assert all((x == x[:1]).all() for x in jax.tree.leaves(got))


def test_layers_that_are_zero_keep_their_update():
    params = {"zero": jnp.zeros(3), "one": jnp.ones(3), "h": jnp.ones(2, jnp.bfloat16)}
    tx = parallel_norms.scale_by_trust_ratio("batch")
    grads = {"zero": jnp.full(3, 2.0), "one": jnp.zeros(3), "h": jnp.full(2, 3.0, jnp.bfloat16)}
    got = jax.vmap(lambda _: tx.update(grads, optax.EmptyState(), params)[0], axis_name="batch")(jnp.arange(2))
    want = optax.scale_by_trust_ratio().update(grads, optax.EmptyState(), params)[0]
    assert_same(jax.tree.map(lambda x: x[0], got), want)
    assert got["h"].dtype == jnp.bfloat16


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_layers_are_shared_out_by_elements(ranks):
    sizes = [1000, 1, 10, 10, 500, 500, 3]
    owned = parallel_norms.shares(sizes, ranks)
    assert sorted(i for layers in owned for i in layers) == list(range(len(sizes)))
    assert max(map(len, owned)) <= -(-len(sizes) // ranks)
    assert max(sum(sizes[i] for i in layers) for layers in owned) <= sum(sizes) / ranks + max(sizes)
    if ranks == 2:
        assert sorted(sum(sizes[i] for i in layers) for layers in owned) == [1011, 1013]


def test_norms_need_parameters():
    with pytest.raises(ValueError, match=r"^`scale_by_trust_ratio` got no `params`, whose norms it needs"):
        parallel_norms.scale_by_trust_ratio("batch").update(jnp.ones(2), optax.EmptyState())
    assert parallel_norms.scale_by_trust_ratio("batch").update({}, optax.EmptyState(), {})[0] == {}
