"""What each compressing exchange promises beyond what all exchanges do, all ranks in one process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxcross.exchange import select as selection
from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.mean import mean
from jaxcross.exchange.one_bit_adam import one_bit_adam
from jaxcross.exchange.power_sgd import power_sgd
from jaxcross.exchange.qsgd import qsgd
from jaxcross.exchange.select import select
from jaxcross.exchange.sign_sgd import sign_sgd
from jaxcross.exchange.top_k import top_k
from jaxcross.testing_wire import vmapped

pytestmark = pytest.mark.exhaustive

RANKS = 4


def on_ranks(tx: optax.GradientTransformation, axes: dict[str, int] | None = None) -> Callable[..., Any]:
    """`tx.update(grads, state)` on all ranks, whose arrays have one first axis for each of `axes`."""
    return jax.jit(vmapped(lambda grads, state: tx.update(grads, state), axes or {"batch": RANKS}))


def states(tx: optax.GradientTransformation, grads: Any, axes: int = 1) -> Any:
    """The first state of every rank."""
    shape = jax.tree.leaves(grads)[0].shape[:axes]
    state = tx.init(jax.tree.map(lambda g: g[(0,) * axes], grads))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), state)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Selection


def vectors(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    x = rng.normal(size=size).astype(np.float32)
    return {
        "normal": x,
        "equal": 2 * np.sign(x),
        "mostly zero": np.where(rng.random(size) < 0.999, 0, x).astype(np.float32),
        "zero": np.zeros_like(x),
        "heavy tails": (rng.standard_cauchy(size) ** 3).astype(np.float32),
        "ascending": np.arange(size, dtype=np.float32),
        "NaN and infinity": np.where(np.arange(size) == size // 2, np.nan, np.where(x > 2.5, np.inf, x)),
        "what the sample does not see": np.where(np.arange(size) % 2, x, x / 1e6),
    }


@pytest.mark.parametrize(("size", "k"), [(1, 1), (31, 3), (33, 33), (5000, 50), (5000, 2500), (70001, 70)])
def test_a_threshold_selects_what_sorting_does(size: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_SAMPLE", 512)  # so that the sample is a part, and misleads where it can
    chosen = jax.jit(functools.partial(select, k=k, selection="threshold"))
    for name, x in vectors(size).items():
        values, indices = map(np.asarray, chosen(x))
        taken = indices < size
        assert taken.sum() == min(k, (x != 0).sum()) == len({*indices[taken]}), name
        np.testing.assert_array_equal(values, np.where(taken, x[np.where(taken, indices, 0)], 0), err_msg=name)
        order = lambda v: np.sort(np.where(np.isnan(v), np.inf, np.abs(v)))  # noqa: E731
        np.testing.assert_array_equal(order(values), order(x)[size - k :], err_msg=name)
        assert np.isnan(values).sum() == np.isnan(x).sum(), name


def test_the_way_that_was_measured_to_be_faster_is_taken() -> None:
    assert selection.chosen(1 << 20, 1 << 10) == "exact"
    assert selection.chosen(1 << 20, (1 << 10) + 1) == selection.chosen((1 << 20) + 1, 1 << 10) == "threshold"
    kept = Path(__file__).parents[2] / "benchmarks" / "results" / "selection.json"
    if not kept.exists():
        pytest.skip("no result is kept")
    for row in json.loads(kept.read_text())["rows"]:
        seconds = {way: found["s"]["median"] for way, found in row["ways"].items()}
        # Where both take about as long, noise decides.
        assert seconds[selection.chosen(row["size"], row["k"])] <= 1.5 * min(seconds.values()), row


def test_selection_by_size_takes_the_largest_both_ways() -> None:
    for k in (10, 2000):
        x = normal(3000)
        values, _ = select(x, k)
        np.testing.assert_array_equal(jnp.sort(jnp.abs(values)), jnp.sort(jnp.abs(x))[-k:])
    with pytest.raises(ValueError, match="^`selection` is 'sorted': choose one of 'auto', 'exact', 'threshold'"):
        top_k(0.1, "batch", selection="sorted")  # type: ignore[arg-type]


# Top-k


@pytest.mark.parametrize("options", [{}, {"values_dtype": jnp.bfloat16}, {"bucket": True}, {"selection": "threshold"}])
def test_what_top_k_does_not_send_it_keeps(options: Any) -> None:
    tx = top_k(0.1, "batch", **options)
    grads = {"a": normal(RANKS, 12, 10), "b": normal(RANKS, 6, 5, seed=1)}
    step, state = on_ranks(tx), states(tx, grads)
    for n in range(4):
        before = state.residual
        updates, state = step(jax.tree.map(lambda g, n=n: g * (n + 1), grads), state)
        for name, g in grads.items():
            rests = state.residual[name].sum(0) - before[name].sum(0)
            total = RANKS * updates[name][0].ravel() + rests
            np.testing.assert_allclose(total, (n + 1) * g.sum(0).ravel(), rtol=1e-5, atol=1e-5)
        assert np.count_nonzero(updates["a"][0]) <= RANKS * 12 + (3 * RANKS if options.get("bucket") else 0)


def test_hierarchical_top_k_keeps_on_the_shard_what_the_node_does_not_send() -> None:
    axes = {"node": 2, "local": 3}
    tx = top_k(0.2, ("node", "local"), pattern="hierarchical", local_size=3)
    grads = normal(2, 3, 7, 4)  # 28 elements in shards of 10
    step, state = on_ranks(tx, axes), states(tx, grads, axes=2)
    assert state.residual.shape == (2, 3, 10)
    for _ in range(3):
        before = state.residual
        updates, state = step(grads, state)
        assert np.count_nonzero(updates[0, 0]) <= 2 * 3 * 2
        rests = (state.residual - before).sum(0).ravel()  # over nodes; local ranks hold one shard each
        total = 6 * jnp.pad(updates[0, 0].ravel(), (0, 2)) + rests
        np.testing.assert_allclose(total, jnp.pad(grads.sum((0, 1)).ravel(), (0, 2)), rtol=1e-5, atol=1e-5)


def test_top_k_is_a_contraction() -> None:
    x = normal(1, 30, 20)
    tx = top_k(0.05, "batch", error_feedback=False)
    updates, _ = on_ranks(tx, {"batch": 1})(x, states(tx, x))
    assert float(jnp.sum((x - updates) ** 2)) <= (1 - 0.05) * float(jnp.sum(x**2))


def opposing(tx: optax.GradientTransformation, axes: dict[str, int] | None = None, steps: int = 400) -> float:
    """Distance to the optimum after `steps` of the mean of squares whose centres all ranks have, plus an offset of two
    signs in one row that cancels in the mean and outshines everything else."""
    centre = np.full((8, 8), 0.1, np.float32)
    offset = np.zeros((RANKS, 8, 8), np.float32)
    offset[:, 0] = np.array([0.5, 0.5, -0.5, -0.5])[:, None]  # so that it cancels between nodes, too
    tx, sizes = optax.chain(tx, optax.sgd(0.02)), tuple((axes or {"batch": RANKS}).values())
    params = jnp.zeros((*sizes, 8, 8))
    step, state = on_ranks(tx, axes), states(tx, params, axes=len(sizes))
    for _ in range(steps):
        updates, state = step(params - centre - offset.reshape(params.shape), state)
        params = optax.apply_updates(params, updates)
    return float(jnp.linalg.norm(params.reshape(RANKS, 8, 8)[0] - centre))


def test_top_k_converges_with_error_feedback_and_stalls_without() -> None:
    assert opposing(mean("batch")) < 1e-3
    assert opposing(top_k(0.125, "batch")) < 0.2
    assert opposing(top_k(0.125, "batch", error_feedback=False)) > 0.7


def test_so_do_hierarchical_and_global_top_k() -> None:
    axes = {"node": 2, "local": 2}
    hierarchical = functools.partial(top_k, 0.125, tuple(axes), pattern="hierarchical", local_size=2)
    assert opposing(hierarchical(), axes) < 0.2
    assert opposing(hierarchical(error_feedback=False), axes) > 0.45
    tx = gtop_k(0.125, "batch")
    forgetful = optax.GradientTransformation(tx.init, lambda g, s, p=None: (tx.update(g, tx.init(g), p)[0], s))
    assert opposing(tx) < 0.2
    assert opposing(forgetful) > 0.7


def test_biases_are_averaged_as_they_are_unless_told_otherwise() -> None:
    grads = {"bias": normal(RANKS, 10), "kernel": normal(RANKS, 10, 10)}
    tx = top_k(0.1, "batch")
    updates, state = on_ranks(tx)(grads, states(tx, grads))
    np.testing.assert_allclose(updates["bias"][0], grads["bias"].mean(0), rtol=1e-6)
    assert isinstance(state.residual["bias"], optax.MaskedNode)
    tx = top_k(0.1, "batch", skip=lambda path, leaf: "kernel" in path)
    updates, _ = on_ranks(tx)(grads, states(tx, grads))
    assert np.count_nonzero(updates["bias"][0]) <= RANKS
    np.testing.assert_allclose(updates["kernel"][0], grads["kernel"].mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [top_k, gtop_k])
def test_biases_and_scales_of_two_dimensions_are_averaged_as_they_are(make: Any) -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return nn.LayerNorm()(nn.MultiHeadDotProductAttention(num_heads=2)(x)), None

    stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    shapes = jax.eval_shape(stack.init, jax.random.key(0), jnp.ones((1, 3, 8)), None)
    linear = nnx.eval_shape(lambda: nnx.LinearGeneral((2, 4), (2, 4), axis=(0, 1), rngs=nnx.Rngs(0)))
    for tree in (shapes, nnx.state(linear)):
        values = jax.tree.map(lambda x: jnp.ones(x.shape), tree)
        residual = make(0.1, "batch").init(values).residual
        kept = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(residual)}
        expected = {p for path, _ in jax.tree.leaves_with_path(tree) if "kernel" in (p := jax.tree_util.keystr(path))}
        assert kept == expected and len(kept) < len(jax.tree.leaves(tree))
    named = {"bias_of_two": jnp.ones((2, 2)), "a bias": [jnp.ones((2, 2))], "rescale": jnp.ones((2, 2))}
    assert len(jax.tree.leaves(make(0.1, "batch").init(named).residual)) == 3


def test_a_bucket_starves_small_gradients() -> None:
    grads = {"large": normal(RANKS, 10, 10), "small": 1e-3 * normal(RANKS, 10, 10)}
    for bucket in (True, False):
        tx = top_k(0.1, "batch", bucket=bucket)
        updates, _ = on_ranks(tx)(grads, states(tx, grads))
        assert bool(jnp.any(updates["small"] != 0)) != bucket


def test_density_warms_up_by_steps() -> None:
    grads = normal(1, 10, 10)
    tx = top_k(0.01, "batch", warm_up=[(2, 0.5), (3, 0.1)], error_feedback=False)
    step, state = on_ranks(tx, {"batch": 1}), states(tx, grads)
    sent = []
    for _ in range(5):
        updates, state = step(grads, state)
        sent.append(np.count_nonzero(updates))
    assert sent == [50, 50, 10, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, r"`density` is 0.0: it is the share of elements that are sent"),
        ({"density": 1.5}, r"`density` is 1.5"),
        ({"density": float("nan")}, r"`density` is nan"),
        ({"warm_up": [(5, 2.0)]}, r"`warm_up` is 2.0"),
        ({"warm_up": [(5, 0.5), (5, 0.2)]}, r"`warm_up` ends its stages at steps \[5, 5\]: they must be positive"),
        ({"values_dtype": jnp.int8}, r"`values_dtype` is int8: values need a floating-point type"),
        ({"pattern": "star"}, r"`pattern` is 'star': choose \"flat\" or \"hierarchical\""),
        ({"pattern": "hierarchical"}, r"`pattern=\"hierarchical\"` with `axis_name='batch'` and `local_size=None`"),
    ],
)
def test_top_k_refuses(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        top_k(**{"density": 0.1, "axis_name": "batch", **options})


@pytest.mark.parametrize(("bucket", "shape"), [(True, (1 << 15, 1 << 15)), (False, (1 << 16, 1 << 15))])
def test_more_elements_than_int32_can_name_are_refused_before_the_first_step(bucket: bool, shape: Any) -> None:
    """Traced only: nothing is as large as that."""
    tx = top_k(0.1, "batch", bucket=bucket)
    one = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    step = vmapped(lambda grads: tx.update(grads, tx.init(grads)), {"batch": 1})
    with pytest.raises(ValueError, match=f"of {1 << 31} elements were to be selected, which int32 indices cannot name"):
        jax.eval_shape(step, [one, one])


def test_residuals_do_not_follow_another_node_size() -> None:
    tx = top_k(0.2, ("node", "local"), pattern="hierarchical", local_size=4)
    grads = normal(2, 3, 7, 4)
    with pytest.raises(ValueError, match="^`local_size` of `top_k` is 4, but axis `local` has 3 ranks"):
        on_ranks(tx, {"node": 2, "local": 3})(grads, states(tx, grads, axes=2))


# Global top-k


def test_gtop_k_keeps_k_and_gives_back_the_rest() -> None:
    for ranks in (2, 8):
        tx = gtop_k(0.1, "batch")
        grads = normal(ranks, 20, 5)
        step, state = on_ranks(tx, {"batch": ranks}), states(tx, grads)
        for _ in range(4):
            before = state.residual
            updates, state = step(grads, state)
            assert np.count_nonzero(updates[0]) <= 10
            total = ranks * updates[0].ravel() + (state.residual - before).sum(0)
            np.testing.assert_allclose(total, grads.sum(0).ravel(), rtol=1e-5, atol=1e-5)


def test_gtop_k_merges_a_binary_tree_in_rank_order() -> None:
    grads = np.asarray(normal(RANKS, 8, 8, seed=3))
    k = 6

    def largest(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) >= np.sort(np.abs(x).ravel())[-k], x, 0)

    a, b, c, d = map(largest, grads)
    expected = largest(largest(a + b) + largest(c + d)) / RANKS
    tx = gtop_k(k / 64, "batch")
    updates, _ = on_ranks(tx)(jnp.asarray(grads), states(tx, grads))
    np.testing.assert_allclose(updates[2], expected, rtol=1e-6)


def test_gtop_k_needs_a_power_of_two() -> None:
    tx, grads = gtop_k(0.1, "batch"), normal(3, 4, 4)
    with pytest.raises(ValueError, match="^`gtop_k` over axis `batch` of 3 ranks: its tree needs a power of two"):
        on_ranks(tx, {"batch": 3})(grads, states(tx, grads))


# PowerSGD


def test_power_sgd_gives_a_mean_of_low_rank_as_it_is() -> None:
    noise = normal(RANKS, 30, 20)
    low = normal(30, 2, seed=1) @ normal(2, 20, seed=2)
    grads = low + noise - noise.mean(0)  # each rank's has full rank, their mean has rank 2
    for rank, exact in ((1, False), (2, True), (3, True)):
        tx = power_sgd(rank, "batch")
        updates, _ = on_ranks(tx)(grads, states(tx, grads))
        error = float(jnp.linalg.norm(updates[0] - low) / jnp.linalg.norm(low))
        assert error < 1e-4 if exact else 0.1 < error < 1


def test_power_sgd_keeps_what_it_leaves_out_and_finds_it_later() -> None:
    tx = power_sgd(2, "batch")
    grads = normal(RANKS, 30, 20)
    step, state = on_ranks(tx), states(tx, grads)
    total = jnp.zeros((30, 20))
    for n in range(60):
        updates, state = step(grads, state)
        total += updates[0]
        rest = state.residual.mean(0)
        np.testing.assert_allclose(total + rest, (n + 1) * grads.mean(0), rtol=1e-3, atol=1e-3 * (n + 1))
    assert float(jnp.linalg.norm(total / 60 - grads.mean(0)) / jnp.linalg.norm(grads.mean(0))) < 0.3


def test_power_sgd_compresses_the_mean_and_takes_a_projection_away() -> None:
    tx, grads = power_sgd(2, "batch"), normal(RANKS, 30, 20)
    updates, state = on_ranks(tx)(grads, states(tx, grads))
    mean_of = grads.mean(0, keepdims=True)
    alone, after = on_ranks(tx, {"batch": 1})(mean_of, states(tx, mean_of))
    np.testing.assert_allclose(updates[0], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.residual.mean(0), after.residual[0], rtol=1e-4, atol=1e-5)
    # With the same right factors, what comes out scales with what goes in.
    scaled, _ = on_ranks(tx)(-3 * grads, states(tx, grads))
    np.testing.assert_allclose(scaled, -3 * updates, rtol=1e-4, atol=1e-5)
    square = lambda x: float(jnp.sum(x**2))  # noqa: E731
    assert 0 < square(mean_of - alone) < square(mean_of)
    assert square(mean_of - alone) == pytest.approx(square(mean_of) - square(alone), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_power_sgd_survives_zeros_dependent_columns_and_any_magnitude(scale: float) -> None:
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


def test_power_sgd_refuses() -> None:
    with pytest.raises(ValueError, match="^`rank` is 0: a matrix of rank 1 is the least"):
        power_sgd(0, "batch")


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


def test_qsgd_rounds_otherwise_on_each_rank_leaf_step_and_seed() -> None:
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


def test_qsgd_refuses() -> None:
    for levels in (0, 128):
        with pytest.raises(ValueError, match=f"^`levels` is {levels}: a level and its sign travel as one byte"):
            qsgd(levels, "batch")


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


def test_fewer_than_half_that_lie_change_nothing_where_the_others_agree() -> None:
    truth = np.sign(np.asarray(normal(20)))
    np.testing.assert_array_equal(voted([truth] * 3 + [-1000 * truth] * 2), truth)
    np.testing.assert_array_equal(voted([truth] * 2 + [-1000 * truth] * 3), -truth)


def test_ties_and_zeros_are_positive_and_no_vote_overflows() -> None:
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


def test_one_bit_adam_does_not_move_what_had_no_gradient() -> None:
    tx = one_bit_adam(2, "batch", ranks=RANKS, block=8)
    grads = normal(RANKS, 10, 10).at[:, 3].set(0)
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(6):
        updates, state = step(grads, state)
        assert not bool(jnp.any(updates[:, 3])) and float(jnp.max(jnp.abs(updates))) < 100


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bit_adam_shows_what_is_not_finite_where_no_gradient_was(bad: float) -> None:
    tx = one_bit_adam(1, "batch", ranks=RANKS, block=8)
    grads = normal(RANKS, 10, 10).at[:, 3].set(0).at[:, 7].set(0)
    step, state = on_ranks(tx), states(tx, grads)
    _, state = step(grads, state)
    updates, _ = step(grads.at[RANKS - 1, 3, 2].set(bad), state)
    assert not bool(jnp.any(jnp.isfinite(updates[:, 3, 2])))
    assert bool(jnp.all(updates[:, 7] == 0)), "a block of its own, in which nothing is wrong"


def test_one_bit_adam_refuses() -> None:
    with pytest.raises(ValueError, match="^`freeze_step` is 0: signs need a second moment"):
        one_bit_adam(0, "batch", ranks=4)
    with pytest.raises(ValueError, match="^`block` is 12: signs travel eight to a byte"):
        one_bit_adam(5, "batch", ranks=4, block=12)
    with pytest.raises(ValueError, match="^`ranks` is 0: say how many ranks axis `batch` has"):
        one_bit_adam(5, "batch", ranks=0)
    tx, grads = one_bit_adam(5, "batch", ranks=8), normal(RANKS, 4)
    with pytest.raises(ValueError, match="^`ranks` of `one_bit_adam` is 8, but axis `batch` has 4"):
        on_ranks(tx)(grads, states(tx, grads))


# Patterns of the mean


def test_patterns_refuse_axes_that_they_cannot_serve() -> None:
    with pytest.raises(ValueError, match="^`pattern` is 'star': choose one of 'auto', 'hierarchical', 'ring', 'tree'"):
        mean("batch", pattern="star")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='^`pattern="hierarchical"` goes over two axes, the outer first, not over'):
        mean("batch", pattern="hierarchical")
    for pattern in ("ring", "tree"):
        with pytest.raises(ValueError, match=f'^`axis_name` of `mean\\(pattern="{pattern}"\\)` is'):
            mean(("node", "local"), pattern=pattern)  # type: ignore[arg-type]
    for make in (sign_sgd, functools.partial(gtop_k, 0.1), functools.partial(one_bit_adam, 5, ranks=4)):
        with pytest.raises(ValueError, match="needs? one axis with an order of ranks"):
            make(("node", "local"))
