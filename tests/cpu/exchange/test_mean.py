"""The mean exchange as an optax transformation, with several ranks in one process."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcross.exchange import mean

GRADS = {"w": jnp.arange(12.0).reshape(4, 3), "b": jnp.ones((4, 2), jnp.bfloat16), "n": None}


def over_ranks(tx, grads):
    params = jax.tree.map(lambda g: g[0], grads)
    state = tx.init(params)
    return jax.vmap(lambda g: tx.update(g, state, params)[0], axis_name="batch")(grads)


@pytest.mark.integration
def test_mean_equals_pmean():
    got = over_ranks(mean("batch"), GRADS)
    assert (got["w"] == GRADS["w"].mean(0)).all() and got["w"].shape == (4, 3)
    assert (got["b"] == 1).all() and got["b"].dtype == jnp.bfloat16
    assert got["n"] is None


def test_sixteen_bits_on_the_wire():
    jaxpr = jax.make_jaxpr(
        lambda g: mean("batch", jnp.bfloat16).update(g, optax.EmptyState())[0],
        axis_env=[("batch", 4)],
    )
    sums = [
        eqn.invars[0].aval
        for eqn in jaxpr({"w": jnp.ones(3), "i": jnp.ones(2, jnp.float16)}).eqns
        if "psum" in str(eqn)
    ]
    assert sorted(str(a.dtype) for a in sums) == ["bfloat16", "float16"]
    got = over_ranks(mean("batch", jnp.bfloat16), GRADS)
    assert got["w"].dtype == jnp.float32
    assert jnp.allclose(got["w"], GRADS["w"].mean(0), rtol=1e-2)
    assert (got["b"] == 1).all()


def test_in_a_chain_it_is_data_parallel_training():
    tx = optax.chain(mean("batch"), optax.sgd(0.5))
    params = jnp.zeros(3)
    state = tx.init(params)
    assert state[0] == optax.EmptyState()
    updates = jax.vmap(lambda g: tx.update(g, state, params)[0], axis_name="batch")(GRADS["w"])
    assert (updates == -0.5 * GRADS["w"].mean(0)).all()


def test_several_axes():
    grads = jnp.arange(6.0).reshape(2, 3, 1)
    step = jax.vmap(lambda g: mean(("a", "b")).update(g, optax.EmptyState())[0], axis_name="b")
    assert (jax.vmap(step, axis_name="a")(grads) == grads.mean()).all()


@pytest.mark.integration
@pytest.mark.parametrize("pattern", ["auto", "ring", "tree"])
def test_a_sum_beyond_float16_is_seen_on_every_rank(pattern):
    grads = jnp.full((8, 16), 1e4)
    assert jnp.isinf(over_ranks(mean("batch", jnp.float16, pattern=pattern), grads)).all()
    assert jnp.allclose(
        over_ranks(mean("batch", jnp.bfloat16, pattern=pattern), grads), 1e4, rtol=1e-2
    )
    # Overflow is the price of keeping small values: dividing by 8 before rounding would give 0
    # here.
    small = jnp.full((8, 16), 2.0**-24)
    assert (over_ranks(mean("batch", jnp.float16, pattern=pattern), small) == small).all()


@pytest.mark.integration
@pytest.mark.parametrize("pattern", ["auto", "hierarchical", "ring", "tree"])
def test_dtypes_travel_apart_and_integers_are_averaged(pattern):
    """Different types are exchanged separately, and integers are averaged too."""
    ranks = jnp.arange(4).reshape(2, 2)
    grads = {
        "i": jnp.stack([ranks, 300 + ranks], -1),
        "h": jnp.ones((2, 2, 24), jnp.bfloat16),
        "w": ranks[..., None] + jnp.full(3, 2.0**-20),
        "e": jnp.zeros((2, 2, 0), jnp.float16),
    }
    axes = ("node", "local")
    if pattern in ("ring", "tree"):
        axes, grads = ("local",), jax.tree.map(lambda x: x[0], grads)
    step = lambda g: mean(axes, pattern=pattern).update(g, optax.EmptyState())[0]  # noqa: E731
    got = step
    for axis in reversed(axes):
        got = jax.vmap(got, axis_name=axis)
    for name, x in got(grads).items():
        over = tuple(range(len(axes)))
        assert (x == grads[name].astype(jnp.float32).mean(over)).all(), name
    one = jax.tree.map(lambda x: x[(0,) * len(axes)], grads)
    jaxpr = str(jax.make_jaxpr(step, axis_env=[(axis, 2) for axis in axes])(one))
    sent = [
        line
        for line in jaxpr.splitlines()
        if re.search(r"= (psum|ppermute|all_to_all|all_gather)\w*\[", line)
    ]
    assert any("bf16[" in line for line in sent) and not any("f32[28]" in line for line in sent), (
        jaxpr
    )


def test_a_wire_type_must_be_a_float():
    with pytest.raises(
        ValueError, match=r"^`wire_dtype` of `mean` must be a floating-point type, .*, got int8"
    ):
        mean("batch", jnp.int8)
