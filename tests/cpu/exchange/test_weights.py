"""Averages over unequal token counts per rank and batch: `weight` of `mean` and `accumulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxcross import exchange
from jaxcross.testing import vmapped

pytestmark = pytest.mark.usefixtures("compiled_quickly")

LONGEST = 12
W = np.linspace(-1, 1, 5, dtype=np.float32)


def tokens(counts: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns padded tokens and their mask, with the counts given per rank (and micro-batch)."""
    counts = np.asarray(counts)
    x = np.random.default_rng(seed).normal(size=(*counts.shape, LONGEST, W.size)).astype(np.float32)
    return x, np.arange(LONGEST) < counts[..., None]


def loss(w: jax.Array, x: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the mean over the tokens in the mask, or NaN if there are none."""
    return jnp.sum(jnp.where(valid, jnp.tanh(x @ w) ** 2, 0)) / valid.sum()


def over_all(x: np.ndarray, valid: np.ndarray) -> jax.Array:
    """Returns the gradient of a single rank that has all tokens in one batch."""
    return jax.grad(loss)(jnp.asarray(W), x.reshape(-1, W.size), valid.reshape(-1))


def over_ranks(tx: Any, x: Any, valid: Any, axes: dict[str, int], weighs: bool = True) -> Any:
    """Returns each rank's last update. First axes of `x`: ranks, then any micro-batches."""

    def one(x: jax.Array, valid: jax.Array) -> jax.Array:
        state, w = tx.init(jnp.asarray(W)), jnp.asarray(W)
        updates = w
        for micro, mask in zip(x, valid, strict=True) if x.ndim == 3 else [(x, valid)]:
            extra = {"weight": mask.sum()} if weighs else {}
            updates, state = tx.update(jax.grad(loss)(w, micro, mask), state, w, **extra)
        return updates

    return jax.jit(vmapped(one, axes))(x, valid)


PATTERNS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "auto": (lambda: exchange.mean("batch"), {"batch": 4}),
    "ring": (lambda: exchange.mean("batch", pattern="ring"), {"batch": 4}),
    "tree": (lambda: exchange.mean("batch", pattern="tree"), {"batch": 4}),
    "hierarchical": (
        lambda: exchange.mean(("node", "local"), pattern="hierarchical"),
        {"node": 2, "local": 2},
    ),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_mean_weighs_ranks_by_their_tokens(pattern):
    make, axes = PATTERNS[pattern]
    x, valid = tokens(np.reshape([1, 12, 3, 7], tuple(axes.values())))
    got = over_ranks(make(), x, valid, axes).reshape(4, -1)
    want = over_all(x, valid)
    np.testing.assert_allclose(got, np.tile(want, (4, 1)), rtol=1e-6, atol=1e-7)
    unweighed = over_ranks(make(), x, valid, axes, weighs=False).reshape(4, -1)
    assert np.linalg.norm(unweighed[0] - want) > 0.1 * np.linalg.norm(want)


def test_rank_without_tokens_adds_nothing_although_its_gradient_is_nan():
    x, valid = tokens([4, 0])
    np.testing.assert_allclose(
        over_ranks(exchange.mean("batch"), x, valid, {"batch": 2})[1], over_all(x, valid), 1e-5
    )
    nobody = over_ranks(exchange.mean("batch"), *tokens([0, 0]), {"batch": 2})
    np.testing.assert_array_equal(nobody, np.zeros((2, W.size)))


def test_accumulate_weighs_batches_and_ranks():
    """Compares with a single rank with all tokens. Each rank has one batch without tokens."""
    x, valid = tokens([[1, 12, 0, 2], [12, 12, 0, 11]])
    tx = exchange.accumulate(exchange.mean("batch"), every=4)
    got = over_ranks(tx, x, valid, {"batch": 2})
    np.testing.assert_allclose(got, np.tile(over_all(x, valid), (2, 1)), rtol=1e-6, atol=1e-7)


def test_second_round_begins_with_no_weight():
    (first, first_valid), (second, second_valid) = (
        tokens([[12, 1], [3, 3]]),
        tokens([[1, 1], [2, 9]], 1),
    )
    tx = exchange.accumulate(exchange.mean("batch"), every=2)
    x, valid = np.concatenate([first, second], 1), np.concatenate([first_valid, second_valid], 1)
    np.testing.assert_allclose(
        over_ranks(tx, x, valid, {"batch": 2})[0], over_all(second, second_valid), 1e-5
    )


def test_16_bit_gradients_travel_in_16_bits_and_are_rounded_once():
    grads, weights = jnp.asarray([[1.0], [0.5]], jnp.bfloat16), jnp.asarray([3, 300])
    tx = exchange.mean("batch")
    step = vmapped(lambda g, n: tx.update(g, tx.init(g), weight=n)[0], {"batch": 2})
    text = str(jax.make_jaxpr(step)(grads, weights))
    got = step(grads, weights)
    assert got.dtype == jnp.bfloat16 and abs(float(got[0, 0]) - 153 / 303) < 2**-8
    assert "bf16" in text and "f32[2,1]" in text
    single = jax.make_jaxpr(
        lambda g: tx.update(g, tx.init(g), weight=3)[0], axis_env=[("batch", 2)]
    )(grads[0])
    assert sorted(str(e.invars[0].aval) for e in single.eqns if "psum" in str(e.primitive)) == [
        "bfloat16[1]",
        "float32[]",
    ]


def test_whole_numbers_have_a_weighted_mean_too():
    tx = exchange.mean("batch")
    step = vmapped(lambda g, n: tx.update(g, tx.init(g), weight=n)[0], {"batch": 2})
    np.testing.assert_allclose(step(jnp.asarray([4, 8]), jnp.asarray([3, 1])), [5, 5])


TAKE_NONE: dict[str, Callable[[], Any]] = {
    "top_k": lambda: exchange.top_k(0.5, "batch"),
    "local_sgd": lambda: exchange.local_sgd(optax.sgd(0.1), "batch", every=2),
    "delayed_mean": lambda: exchange.delayed_mean(optax.sgd(0.1), "batch"),
    "streaming_diloco": lambda: exchange.streaming_diloco(
        optax.sgd(0.1), optax.sgd(0.7), "batch", every=2, fragments=1, delay=1
    ),
}


@pytest.mark.parametrize("name", TAKE_NONE)
@pytest.mark.parametrize("accumulated", [False, True])
def test_exchanges_that_do_not_weigh_refuse_a_weight(name, accumulated):
    tx = exchange.accumulate(TAKE_NONE[name](), every=2) if accumulated else TAKE_NONE[name]()
    with pytest.raises(
        ValueError,
        match=rf"^`{name}` was given a `weight`, but its exchange gives all ranks the same",
    ):
        over_ranks(tx, *tokens([[4, 2], [1, 1]]) if accumulated else tokens([4, 2]), {"batch": 2})


@pytest.mark.parametrize("weight", [np.ones(2), 1j, True], ids=["array", "complex", "bool"])
@pytest.mark.parametrize(
    "make", [lambda: exchange.mean("b"), lambda: exchange.accumulate(optax.sgd(1), every=2)]
)
def test_weight_is_one_real_number(weight, make):
    tx = make()
    with pytest.raises(
        ValueError,
        match=r"^`weight` of `(mean|accumulate)` must be one .* shape \[2?\] and type \w+\.$",
    ):
        tx.update(W, tx.init(W), W, weight=weight)


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_that_jax_has_summed_are_not_weighed(accumulated):
    """`shard_map(check_vma=True)` already sums the gradients of parameters that ranks share."""
    tx = (
        exchange.accumulate(exchange.mean("batch"), every=1)
        if accumulated
        else exchange.mean("batch")
    )

    @jax.shard_map(
        mesh=AbstractMesh((2,), ("batch",)), in_specs=(P(), P("batch"), P("batch")), out_specs=P()
    )
    def step(w: jax.Array, x: jax.Array, valid: jax.Array) -> Any:
        return tx.update(jax.grad(loss)(w, x[0], valid[0]), tx.init(w), w, weight=valid.sum())[0]

    with pytest.raises(
        ValueError,
        match=r"weights this rank's own gradients, "
        r"but the update `` is the same on all ranks of `batch`",
    ):
        jax.eval_shape(step, jnp.asarray(W), *tokens([4, 2]))
