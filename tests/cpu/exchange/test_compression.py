"""Guarantees of low-rank, quantised and sign exchanges beyond the general ones, in one process."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross import _jax_compat as compat
from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.local_sgd import local_sgd
from jaxcross.exchange.mean import mean
from jaxcross.exchange.one_bit_adam import one_bit_adam
from jaxcross.exchange.power_sgd import power_sgd
from jaxcross.exchange.qsgd import qsgd
from jaxcross.exchange.sign_sgd import sign_sgd
from jaxcross.testing import vmapped
from tests.support.exchange_ranks import RANKS, normal, on_ranks, states

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("compiled_quickly")]


# PowerSGD


def test_power_sgd_gives_a_mean_of_low_rank_as_it_is() -> None:
    noise = normal(RANKS, 30, 20)
    low = normal(30, 2, seed=1) @ normal(2, 20, seed=2)
    grads = low + noise - noise.mean(0)  # each rank's gradient has full rank, their mean has rank 2
    for rank, exact in ((1, False), (2, True), (3, True)):
        tx = power_sgd(rank, "batch")
        updates, _ = on_ranks(tx)(grads, states(tx, grads))
        error = float(jnp.linalg.norm(updates[0] - low) / jnp.linalg.norm(low))
        assert error < 1e-4 if exact else 0.1 < error < 1


def test_power_sgd_residual_is_sent_later() -> None:
    tx = power_sgd(2, "batch")
    grads = normal(RANKS, 30, 20)
    step, state = on_ranks(tx), states(tx, grads)
    total = jnp.zeros((30, 20))
    for n in range(60):
        updates, state = step(grads, state)
        total += updates[0]
        rest = state.residual.mean(0)
        np.testing.assert_allclose(
            total + rest, (n + 1) * grads.mean(0), rtol=1e-3, atol=1e-3 * (n + 1)
        )
    assert float(jnp.linalg.norm(total / 60 - grads.mean(0)) / jnp.linalg.norm(grads.mean(0))) < 0.3


def test_power_sgd_residual_of_16_bits_is_float32() -> None:
    tx = power_sgd(2, "batch")
    grads = normal(RANKS, 30, 20).astype(jnp.bfloat16)
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(4):
        before = state.residual
        updates, state = step(grads, state)
        assert updates.dtype == jnp.bfloat16 and state.residual.dtype == jnp.float32
        sent = np.asarray(updates[0], np.float32)
        error = sent + (state.residual - before).mean(0) - np.asarray(grads, np.float32).mean(0)
        # Only the update itself is rounded, to 8 bits.
        assert (np.abs(error) <= 2**-8 * np.abs(sent) + 1e-4).all()


def test_power_sgd_checks_overflow_only_in_float16() -> None:
    """PowerSGD checks for overflow only in types with a short exponent."""

    def differences(dtype: Any) -> int:
        grads = jnp.ones((30, 20), dtype)
        made = jax.make_jaxpr(
            lambda g, s: power_sgd(1, "batch").update(g, s), axis_env=[("batch", 2)]
        )
        jaxpr = made(grads, power_sgd(1, "batch").init(grads))
        return str(jaxpr).count(":f32[30,20] = sub ")

    assert [differences(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)] == [1, 1, 2]


def test_power_sgd_sends_overlarge_values_in_parts() -> None:
    """PowerSGD sends a value too large for the update in several parts."""
    tx = power_sgd(1, "batch")
    # A rank-two gradient: the larger part is sent first, and the rest has grown by then.
    grads = jnp.zeros((RANKS, 20, 10), jnp.float16).at[:, 0, 0].set(40000).at[:, 1, 1].set(39000)
    step, state = on_ranks(tx), states(tx, grads)
    total = np.zeros((20, 10))
    for n in range(12):
        updates, state = step(grads if n < 6 else jnp.zeros_like(grads), state)
        assert np.isfinite(updates).all() and np.isfinite(state.residual).all(), f"step {n}"
        total += np.asarray(updates[0], np.float64)
    waiting = np.asarray(state.residual, np.float64).mean(0)
    np.testing.assert_allclose(total + waiting, 6 * np.asarray(grads[0], np.float64), atol=300)
    updates, _ = step(grads.at[1, 0, 0].set(jnp.inf), state)
    assert not np.isfinite(updates[0]).all()


def test_power_sgd_compresses_mean_and_subtracts_it() -> None:
    tx, grads = power_sgd(2, "batch"), normal(RANKS, 30, 20)
    updates, state = on_ranks(tx)(grads, states(tx, grads))
    mean_of = grads.mean(0, keepdims=True)
    alone, after = on_ranks(tx, {"batch": 1})(mean_of, states(tx, mean_of))
    np.testing.assert_allclose(updates[0], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.residual.mean(0), after.residual[0], rtol=1e-4, atol=1e-5)
    # For fixed right factors, the output scales with the input.
    scaled, _ = on_ranks(tx)(-3 * grads, states(tx, grads))
    np.testing.assert_allclose(scaled, -3 * updates, rtol=1e-4, atol=1e-5)
    square = lambda x: float(jnp.sum(x**2))  # noqa: E731
    assert 0 < square(mean_of - alone) < square(mean_of)
    assert square(mean_of - alone) == pytest.approx(square(mean_of) - square(alone), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_power_sgd_handles_degenerate_gradients(scale: float) -> None:
    """PowerSGD handles zeros, dependent columns and any magnitude."""
    tx = power_sgd(3, "batch")
    one = scale * jnp.outer(jnp.arange(1.0, 31), jnp.arange(1.0, 21))
    grads = jnp.stack([one] * RANKS)
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(3):
        updates, state = step(grads, state)
        np.testing.assert_allclose(updates[0] / scale, one / scale, rtol=1e-3)
    updates, state = step(jnp.zeros_like(grads), states(tx, grads))
    assert not jnp.any(updates) and not jnp.any(state.residual)
    updates, _ = step(grads, state)
    np.testing.assert_allclose(updates[0] / scale, one / scale, rtol=1e-3)


def test_power_sgd_finds_an_orthogonal_row_space() -> None:
    """PowerSGD finds a row space that is orthogonal to the previous one."""
    tx = power_sgd(1, "batch")
    grads = jnp.zeros((RANKS, 64, 8))
    step, state = on_ranks(tx), states(tx, grads)
    total = np.zeros((64, 8))
    for n in range(6):
        updates, state = step(grads.at[:, :, 5 if n else 0].set(1), state)
        total += np.asarray(updates[0])
    np.testing.assert_allclose(total[:, 5], 5, rtol=1e-5)


def precisions(jaxpr: Any) -> list[Any]:
    """Returns the precision of every product, including those in nested jaxprs."""
    found = []
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        found += [eqn.params["precision"]] if eqn.primitive.name == "dot_general" else []
        for sub in compat.sub_jaxprs(eqn):
            found += precisions(sub)
    return found


def test_power_sgd_makes_all_products_in_full_float32() -> None:
    """GPUs use less unless the precision is set explicitly."""
    tx = power_sgd(3, "batch")
    made = jax.make_jaxpr(lambda g: tx.update(g, tx.init(g)), axis_env=[("batch", RANKS)])(
        jnp.ones((30, 20))
    )
    # A step has four products, plus two for each pair of columns.
    assert precisions(made) == [(jax.lax.Precision.HIGHEST,) * 2] * (4 + 2 * 3)


def test_power_sgd_refuses() -> None:
    for rank in (0, 2.0, True):
        with pytest.raises(
            ValueError,
            match=f"^`rank` of `power_sgd` must be a whole number, 1 or more, got `{rank}`",
        ):
            power_sgd(rank, "batch")  # type: ignore[arg-type]


# QSGD


def test_qsgd_is_unbiased_and_its_variance_is_bounded() -> None:
    draws, size, levels = 3000, 40, 3
    x = normal(size)
    tx = qsgd(levels, "batch")

    def draw(step: jax.Array) -> jax.Array:
        one = jax.vmap(lambda g: tx.update(g, tx.init(x)._replace(step=step))[0], axis_name="batch")
        return one(x[None])[0]

    found = jax.jit(jax.vmap(draw))(jnp.arange(draws))
    deviation = jnp.std(found, axis=0) / draws**0.5
    assert bool(jnp.all(jnp.abs(found.mean(0) - x) <= 5 * deviation + 1e-6))
    variance = float(jnp.sum(jnp.var(found, axis=0)))
    assert 0 < variance <= min(size / levels**2, size**0.5 / levels) * float(jnp.sum(x**2))
    assert len(np.unique(np.abs(np.asarray(found)).round(5))) <= levels + 1


def test_qsgd_rounding_depends_on_rank_leaf_step_seed() -> None:
    one = normal(50)
    grads = [jnp.stack([one] * RANKS)] * 2
    tx, other = qsgd(2, "batch"), qsgd(2, "batch", seed=1)
    step, state = on_ranks(tx), states(tx, grads)
    (a, b), after = step(grads, state)
    assert bool(jnp.any(a != b))
    assert bool(jnp.any(a != step(grads, after)[0][0]))
    assert bool(jnp.any(a != on_ranks(other)(grads, state)[0][0]))
    assert bool(jnp.all(a == step(grads, state)[0][0]))
    alone = jax.jit(vmapped(lambda g, s: tx.update(g, s), {"batch": 1}))
    (first, _), _ = alone([g[:1] for g in grads], jax.tree.map(lambda s: s[:1], state))
    assert bool(jnp.any(first[0] != a[0])), "ranks that round alike do not average their rounding"


@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e25, 1e37])
def test_qsgd_survives_any_magnitude(scale: float) -> None:
    grads = scale * jnp.asarray([[3.0, -4.0]])
    tx = qsgd(127, "batch")
    updates, _ = on_ranks(tx, {"batch": 1})(grads, states(tx, grads))
    np.testing.assert_allclose(updates / scale, [[3, -4]], atol=5 / 127)


@pytest.mark.parametrize("levels", [1, 2, 7, 127])
def test_qsgd_of_finite_gradients_is_finite(levels: int) -> None:
    """Updates are finite even if the norm, or an element's next level, would overflow."""
    largest = float(jnp.finfo(jnp.float32).max)
    tx = qsgd(levels, "batch")
    step = on_ranks(tx, {"batch": 1})
    for x in ([largest], [-largest, 1.0], [3e38, 3e38], [largest] * 1000):
        grads = jnp.asarray([x], jnp.float32)
        state = states(tx, grads)
        for _ in range(5):
            updates, state = step(grads, state)
            assert bool(jnp.all(jnp.isfinite(updates)))
        if len(x) < 3 and levels == 127:
            np.testing.assert_allclose(updates / largest, grads / largest, atol=0.02)


def test_qsgd_refuses() -> None:
    with pytest.raises(ValueError, match="^`levels` of `qsgd` must be from 1 to 127, .*, got 128"):
        qsgd(128, "batch")
    for levels in (0, 3.5, 2.0):
        with pytest.raises(
            ValueError,
            match=f"^`levels` of `qsgd` must be a whole number, 1 or more, got `{levels}`",
        ):
            qsgd(levels, "batch")  # type: ignore[arg-type]


# Signs


def voted(grads: Any) -> np.ndarray:
    grads = jnp.asarray(grads, jnp.float32)
    updates, _ = on_ranks(sign_sgd("batch"), {"batch": len(grads)})(grads, optax.EmptyState())
    assert bool(jnp.all(updates == updates[0]))
    return np.asarray(updates[0])


def test_the_majority_decides() -> None:
    grads = np.asarray(normal(5, 33))
    expected = np.where((grads >= 0).sum(0) >= 3, 1, -1)
    np.testing.assert_array_equal(voted(grads), expected)
    np.testing.assert_array_equal(voted(grads * np.array([1e-6, 1, 10, 1e5, 3])[:, None]), expected)


def test_lying_minority_does_not_change_a_vote() -> None:
    """A lying minority changes nothing wherever the other ranks agree."""
    truth = np.sign(np.asarray(normal(20)))
    np.testing.assert_array_equal(voted([truth] * 3 + [-1000 * truth] * 2), truth)
    np.testing.assert_array_equal(voted([truth] * 2 + [-1000 * truth] * 3), -truth)


def test_ties_and_zeros_are_positive_without_overflow() -> None:
    np.testing.assert_array_equal(voted([[1, 0, -1, -1], [-1, 0, 1, -1]]), [1, 1, 1, -1])
    np.testing.assert_array_equal(voted([[1, -1]] * 300), [1, -1])
    np.testing.assert_array_equal(voted([[0, 0]] * 2), [0, 0])


# 1-bit Adam


def test_one_bit_adam_loses_nothing_on_its_two_ways() -> None:
    tx = one_bit_adam(1, "batch", ranks=RANKS, block=8)
    grads = normal(RANKS, 9, 5)
    step, state = on_ranks(tx), states(tx, grads)
    _, state = step(grads, state)
    for n in range(4):
        before = state
        g = grads * (n - 1)
        _, state = step(g, state)

        def waiting(s: Any) -> jax.Array:
            return s.worker_residual.mean(0).ravel() + s.server_residual.ravel()[:45]

        brought = (0.9 * before.mu + 0.1 * g).mean(0).ravel()
        np.testing.assert_allclose(
            state.mu[0].ravel() + waiting(state), brought + waiting(before), rtol=1e-4, atol=1e-5
        )
        assert bool(jnp.all(state.nu == before.nu)) and int(state.step[0]) == n + 2


def test_one_bit_adam_leaves_zero_gradients_alone() -> None:
    """One-bit Adam doesn't move elements whose gradient was always zero."""
    tx = one_bit_adam(2, "batch", ranks=RANKS, block=8)
    grads = normal(RANKS, 10, 10).at[:, 3].set(0)
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(6):
        updates, state = step(grads, state)
        assert not bool(jnp.any(updates[:, 3])) and float(jnp.max(jnp.abs(updates))) < 100


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bit_adam_shows_nonfinite_new_gradients(bad: float) -> None:
    """One-bit Adam passes on a non-finite value even if the gradient was zero before."""
    tx = one_bit_adam(1, "batch", ranks=RANKS, block=8)
    grads = normal(RANKS, 10, 10).at[:, 3].set(0).at[:, 7].set(0)
    step, state = on_ranks(tx), states(tx, grads)
    _, state = step(grads, state)
    updates, _ = step(grads.at[RANKS - 1, 3, 2].set(bad), state)
    assert not bool(jnp.any(jnp.isfinite(updates[:, 3, 2])))
    assert bool(jnp.all(updates[:, 7] == 0)), "a block of its own, in which nothing is wrong"


def test_one_bit_adam_refuses() -> None:
    for name, value in (
        ("freeze_step", 0),
        ("freeze_step", 2.5),
        ("ranks", 0),
        ("ranks", 4.0),
        ("block", 8.0),
    ):
        with pytest.raises(
            ValueError,
            match=f"^`{name}` of `one_bit_adam` must be a whole number, .*, got `{value}`",
        ):
            one_bit_adam(**{"freeze_step": 5, "axes": "batch", "ranks": 4, name: value})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="^`block` of `one_bit_adam` must be a multiple of 8, .*, got 12"
    ):
        one_bit_adam(5, "batch", ranks=4, block=12)
    tx, grads = one_bit_adam(5, "batch", ranks=8), normal(RANKS, 4)
    with pytest.raises(ValueError, match="^`ranks` of `one_bit_adam` is 8, but axis `batch` has 4"):
        on_ranks(tx)(grads, states(tx, grads))


# Patterns of `mean`


def test_patterns_refuse_axes_that_they_cannot_serve() -> None:
    with pytest.raises(
        ValueError,
        match="^`pattern` of `mean` must be one of 'auto', .*, 'tree', got 'star'",
    ):
        mean("batch", pattern="star")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match='^`pattern="hierarchical"` of `mean` needs two axes, the outer one first, got',
    ):
        mean("batch", pattern="hierarchical")
    for pattern in ("ring", "tree"):
        with pytest.raises(ValueError, match=f'^`axes` of `mean\\(pattern="{pattern}"\\)` must be'):
            mean(("node", "local"), pattern=pattern)  # type: ignore[arg-type]
    for make in (
        sign_sgd,
        functools.partial(gtop_k, 0.1),
        functools.partial(one_bit_adam, 5, ranks=4),
    ):
        with pytest.raises(ValueError, match="^`axes` of .* must be a single axis"):
            make(("node", "local"))


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    grads = normal(RANKS, 12, 10)
    for make in (
        lambda n: qsgd(n(7), "batch"),
        lambda n: power_sgd(n(2), "batch"),
        lambda n: one_bit_adam(n(1), "batch", ranks=n(RANKS), block=n(8)),
        lambda n: local_sgd(optax.sgd(0.1), "batch", every=n(2)),
    ):
        tx, numpy = make(int), make(np.int64)
        states_ = jax.tree.map(
            lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), tx.init(grads), numpy.init(grads)
        )
        assert all(jax.tree.leaves(states_))
