"""The sharded parameter server: synchronous training with a sharded optimizer state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import mean
from jaxcross.exchange.sharded_optimizer import sharded_optimizer
from jaxcross.testing import vmapped
from tests.support.quadratic_training import (
    OPTIMIZERS,
    RANKS,
    assert_close,
    assert_same,
    parameters,
    train,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("compiled_quickly")]


@pytest.mark.parametrize(
    "ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 5, 16))]
)
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
    text = (
        r"^the state of `sharded_optimizer` is \[2\] at `\[0\]\.mu\['b'\]`, "
        r"but must be \[1\] here: it was created with"
    )
    with pytest.raises(ValueError, match=text):
        train(sharded_optimizer(optax.adam(0.1), "batch"), parameters(), 1, state=state)


def test_state_of_another_rank_count_with_equal_widths_is_undetected():
    one = {"w": jnp.ones(1)}
    state = sharded_optimizer(optax.adam(0.1), "batch", ranks=2).init(one)
    train(
        sharded_optimizer(optax.adam(0.1), "batch"),
        one,
        1,
        state=jax.tree.map(lambda x: np.stack([x] * 3), state),
    )


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


def starts_from_values():
    return optax.GradientTransformation(
        lambda p: p, lambda u, s, p=None: (jax.tree.map(jnp.subtract, s, p), s)
    )


def test_value_dependent_state_starts_in_the_step():
    """State that starts from the parameters' values is initialised in the step."""
    tx = sharded_optimizer(starts_from_values(), "batch", ranks=RANKS)
    with pytest.raises(
        ValueError,
        match=r"^the optimizer of `sharded_optimizer` initializes its state from the parameters'",
    ):
        tx.init(parameters())
    _, state = train(tx, parameters(), 1)
    flat = np.asarray(parameters()["w"]).reshape(RANKS, -1)
    np.testing.assert_array_equal(state.per_rank["w"], flat)


def test_messages_of_the_sharded_optimizer():
    with pytest.raises(
        ValueError,
        match=r"^`init` of `sharded_optimizer` was called outside of a step",
    ):
        sharded_optimizer(optax.sgd(0.1), "batch").init(parameters())
    tx = sharded_optimizer(optax.sgd(0.1), "batch", ranks=2)
    with pytest.raises(
        ValueError,
        match=r"^`ranks` of `sharded_optimizer` is 2, but the axis has 3: parameters and",
    ):
        train(tx, parameters(), 1, state=optax.EmptyState())
    with pytest.raises(ValueError, match=r"^`axes` of `sharded_optimizer`"):
        sharded_optimizer(optax.sgd(0.1), ("a", "b"))


def test_an_optimizer_that_exchanges_is_refused():
    """Every rank updates a different part, so a mean over them would mix unrelated elements."""

    def step_on(axes, averaged):
        own = optax.chain(optax.stateless(lambda u, _: jax.lax.pmean(u, averaged)), optax.sgd(1.0))
        tx = sharded_optimizer(own, "batch")
        return vmapped(lambda g: tx.update(g, tx.init(g), g)[0], axes)

    with pytest.raises(
        ValueError,
        match=r"^the optimizer of `sharded_optimizer` exchanges over `batch` itself, by `psum",
    ):
        step_on({"batch": 2}, "batch")(jnp.ones((2, 4)))
    out = step_on({"other": 2, "batch": 2}, "other")(jnp.arange(16.0).reshape(2, 2, 4))
    np.testing.assert_array_equal(out, -jnp.broadcast_to(jnp.arange(6.0, 10.0), (2, 2, 4)))
