"""Guarantees of top-k and global top-k beyond those of all exchanges, in one process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.top_k import top_k
from jaxcross.testing import vmapped
from tests.support.exchange_ranks import RANKS, normal, on_ranks, states

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("compiled_quickly")]


# Top-k


@pytest.mark.parametrize(
    "options", [{}, {"wire_dtype": jnp.bfloat16}, {"bucket": True}, {"selection": "threshold"}]
)
def test_what_top_k_does_not_send_it_keeps(options: Any) -> None:
    tx = top_k(0.1, "batch", **options)
    grads = {"a": normal(RANKS, 12, 10), "b": normal(RANKS, 6, 5, seed=1)}
    step, state = on_ranks(tx), states(tx, grads)
    sent = jax.tree.map(lambda g: jnp.zeros(g[0].size), grads)
    for n in range(4):
        before = state.residual
        updates, state = step(jax.tree.map(lambda g, n=n: g * (n + 1), grads), state)
        sent = jax.tree.map(lambda s, u: s + RANKS * u[0].ravel(), sent, updates)
        for name, g in grads.items():
            rests = state.residual[name].sum(0) - before[name].sum(0)
            total = RANKS * updates[name][0].ravel() + rests
            np.testing.assert_allclose(total, (n + 1) * g.sum(0).ravel(), rtol=1e-5, atol=1e-5)
        assert np.count_nonzero(updates["a"][0]) <= RANKS * 12 + (
            3 * RANKS if options.get("bucket") else 0
        )
    for name, g in grads.items():  # all steps together: 1, 2, 3 and 4 times the gradients
        total = sent[name] + state.residual[name].sum(0)
        np.testing.assert_allclose(total, 10 * g.sum(0).ravel(), rtol=1e-5, atol=1e-4)


def test_top_k_residual_of_16_bits_is_float32() -> None:
    tx = top_k(0.1, "batch", wire_dtype=jnp.bfloat16)
    grads = normal(RANKS, 12, 10).astype(jnp.bfloat16)
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(4):
        before = state.residual
        updates, state = step(grads, state)
        assert updates.dtype == jnp.bfloat16 and state.residual.dtype == jnp.float32
        sent = RANKS * np.asarray(updates[0], np.float32).ravel()
        error = (
            sent + (state.residual - before).sum(0) - np.asarray(grads, np.float32).sum(0).ravel()
        )
        # Only the update itself is rounded, to 8 bits.
        assert (np.abs(error) <= 2**-8 * np.abs(sent) + 1e-5).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_values_too_large_for_the_wire_go_in_parts(dtype: Any) -> None:
    tx = top_k(0.1, "batch", wire_dtype=dtype)
    most = float(jnp.finfo(dtype).max)
    step, zero = on_ranks(tx), jnp.zeros((RANKS, 12, 10))
    large = zero.at[1, 3, 4].set(min(1.4 * most, float(jnp.finfo(jnp.float32).max)))
    first, state = step(large, states(tx, zero))
    assert first[0, 3, 4] == most / RANKS and np.isfinite(state.residual).all()
    second, state = step(zero, state)
    assert second[0, 3, 4] > 0
    np.testing.assert_allclose((first + second)[0], large[1] / RANKS, rtol=2**-9)
    # non-finite values aren't hidden
    first, _ = step(zero.at[1, 3, 4].set(jnp.inf), states(tx, zero))
    assert first[0, 3, 4] == jnp.inf


@pytest.mark.parametrize(
    "make",
    [
        lambda: top_k(0.01, "batch"),
        lambda: top_k(0.01, "batch", bucket=True),
        lambda: gtop_k(0.01, "batch"),
        lambda: top_k(0.01, "batch", selection="threshold"),
        lambda: top_k(0.01, "batch", wire_dtype=jnp.bfloat16),
    ],
    ids=["top_k", "bucket", "gtop_k", "threshold", "bfloat16"],
)
def test_residual_too_large_for_update_goes_in_parts(make: Any) -> None:
    tx, zero = make(), jnp.zeros((RANKS, 10, 10), jnp.float16)
    step, state = on_ranks(tx), states(make(), zero)
    grads = zero.at[:, 3, 4].set(40000).at[:, 5, 6].set(39000)  # one of the two is sent per step
    total = np.zeros((10, 10))
    for n in range(8):
        updates, state = step(grads if n < 3 else zero, state)
        assert np.isfinite(updates).all() and np.isfinite(state.residual).all(), f"step {n}"
        total += np.asarray(updates[0], np.float64)
    np.testing.assert_allclose(total, 3 * np.asarray(grads[0], np.float64), rtol=2e-3)
    updates, _ = step(zero.at[1, 3, 4].set(jnp.inf), state)
    assert updates[0, 3, 4] == jnp.inf, "what is not finite is not hidden"


def test_a_sum_of_a_node_may_be_larger_than_the_update() -> None:
    axes = {"node": 2, "local": 3}
    tx = top_k(1.0, ("node", "local"), pattern="hierarchical", inner_ranks=3)
    grads = jnp.full((2, 3, 7, 4), 60000, jnp.float16)
    updates, state = on_ranks(tx, axes)(grads, states(tx, grads, axes=2))
    assert (updates == grads).all() and not state.residual.any()


def test_skipped_step_preserves_the_residual() -> None:
    """As in loss scaling, all ranks agree on an overflow and continue with the old state."""
    tx = top_k(0.1, "batch")

    def careful(grads: Any, state: Any) -> Any:
        bad = jax.lax.pmax(1 - jnp.isfinite(grads).all().astype(jnp.int32), "batch")
        updates, new = tx.update(grads, state)
        return jax.tree.map(
            lambda a, b: jnp.where(bad, a, b), (jnp.zeros_like(grads), state), (updates, new)
        )

    step, grads = jax.jit(vmapped(careful, {"batch": RANKS})), normal(RANKS, 12, 10)
    _, kept = step(grads, states(tx, grads))
    updates, after = step(grads.at[2, 3, 4].set(jnp.inf), kept)
    assert not updates.any()
    assert all(
        (a == b).all() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(kept), strict=True)
    )
    _, spoiled = on_ranks(tx)(grads.at[2, 3, 4].set(jnp.inf), kept)
    assert not np.isfinite(spoiled.residual).all(), "the check above can fail"


def test_hierarchical_top_k_residual_is_per_shard() -> None:
    """Hierarchical `top_k` keeps what the node doesn't send on the shard."""
    axes = {"node": 2, "local": 3}
    tx = top_k(0.2, ("node", "local"), pattern="hierarchical", inner_ranks=3)
    grads = normal(2, 3, 7, 4)  # 28 elements, in shards of 10
    step, state = on_ranks(tx, axes), states(tx, grads, axes=2)
    assert state.residual.shape == (2, 3, 10)
    for _ in range(3):
        before = state.residual
        updates, state = step(grads, state)
        assert np.count_nonzero(updates[0, 0]) <= 2 * 3 * 2
        rests = (
            (state.residual - before).sum(0).ravel()
        )  # over nodes; local ranks hold one shard each
        total = 6 * jnp.pad(updates[0, 0].ravel(), (0, 2)) + rests
        np.testing.assert_allclose(
            total, jnp.pad(grads.sum((0, 1)).ravel(), (0, 2)), rtol=1e-5, atol=1e-5
        )


def test_each_leaf_of_a_bucket_keeps_its_own_range() -> None:
    """float16 ends at 65504, but a float32 leaf in the same bucket doesn't.

    What float16 can't hold waits for later steps.
    """
    grads = {"wide": jnp.full((2, 4, 4), 1e6), "narrow": jnp.full((2, 4, 4), 6e4, jnp.float16)}
    for bucket in (False, True):
        tx = top_k(1.0, "batch", bucket=bucket)
        state = tx.init(jax.tree.map(lambda x: x[0], grads))
        state = state._replace(residual=jax.tree.map(lambda x: x + 3e4, state.residual))
        updates, state = jax.vmap(lambda g, s=state, tx=tx: tx.update(g, s), axis_name="batch")(
            grads
        )
        assert (updates["wide"] == 1e6 + 3e4).all() and (updates["narrow"] == 65504).all()
        assert not state.residual["wide"].any() and (state.residual["narrow"] == 9e4 - 65504).all()


def test_hierarchical_16_bit_bucket_top_k_is_lossless() -> None:
    """A bucket in 16 bits loses nothing under hierarchical `top_k` either."""
    axes = {"node": 2, "local": 2}
    options = {"bucket": True, "wire_dtype": jnp.bfloat16}
    tx = top_k(0.2, ("node", "local"), pattern="hierarchical", inner_ranks=2, **options)
    grads = {
        "a": normal(2, 2, 7, 5),
        "b": normal(2, 2, 4, 4, seed=1),
    }  # 35 elements in shards of 18, 16 in shards of 8
    step, state = on_ranks(tx, axes), states(tx, grads, axes=2)
    for _ in range(3):
        before = state.residual
        updates, state = step(grads, state)
        for name, g in grads.items():
            rests = (state.residual[name] - before[name]).sum(0).ravel()
            pad = (0, rests.size - g[0, 0].size)
            total = 4 * jnp.pad(updates[name][0, 0].ravel(), pad) + rests
            np.testing.assert_allclose(
                total, jnp.pad(g.sum((0, 1)).ravel(), pad), rtol=1e-5, atol=1e-5
            )
    assert all(jnp.any(rest != 0) for rest in state.residual.values())


@pytest.mark.parametrize("make", [top_k, gtop_k])
def test_nothing_is_left_where_everything_is_sent(make: Any) -> None:
    tx, grads = make(1.0, "batch"), normal(RANKS, 12, 10)
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(2):
        updates, state = step(grads, state)
        np.testing.assert_allclose(updates[0], grads.mean(0), rtol=1e-5, atol=1e-6)
        assert not state.residual.any()


@pytest.mark.parametrize(
    ("density", "size", "k"),
    [(0.01, 1000, 10), (0.01, 49, 1), (0.05, 50, 2), (0.5, 3, 2), (0.9, 4, 4), (1, 7, 7)],
)
@pytest.mark.parametrize(
    "selection", ["exact", pytest.param("threshold", marks=pytest.mark.exhaustive)]
)
def test_so_many_elements_are_sent(density: float, size: int, k: int, selection: Any) -> None:
    x = normal(1, 1, size)
    tx = top_k(density, "batch", selection=selection)
    updates, _ = on_ranks(tx, {"batch": 1})(x, states(tx, x))
    assert np.count_nonzero(updates) == k


def test_biases_are_averaged_uncompressed_by_default() -> None:
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
def test_2d_biases_and_scales_are_not_compressed(make: Any) -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return nn.LayerNorm()(nn.MultiHeadDotProductAttention(num_heads=2)(x)), None

    stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    shapes = jax.eval_shape(stack.init, jax.random.key(0), jnp.ones((1, 3, 8)), None)
    linear = nnx.eval_shape(
        lambda: nnx.LinearGeneral((2, 4), (2, 4), axis=(0, 1), rngs=nnx.Rngs(0))
    )
    for tree in (shapes, nnx.state(linear)):
        values = jax.tree.map(lambda x: jnp.ones(x.shape), tree)
        residual = make(0.1, "batch").init(values).residual
        kept = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(residual)}
        expected = {
            p
            for path, _ in jax.tree.leaves_with_path(tree)
            if "kernel" in (p := jax.tree_util.keystr(path))
        }
        assert kept == expected and len(kept) < len(jax.tree.leaves(tree))
    named = {
        "bias_of_two": jnp.ones((2, 2)),
        "a bias": [jnp.ones((2, 2))],
        "rescale": jnp.ones((2, 2)),
    }
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
        ({"density": 0.0}, r"`density` is the share of elements that are sent .*, got 0.0"),
        ({"density": 1.5}, r"`density` is .*, got 1.5"),
        ({"density": float("nan")}, r"`density` is .*, got nan"),
        ({"warm_up": [(5, 2.0)]}, r"each density in `warm_up` is .*, got 2.0"),
        (
            {"warm_up": [(5, 0.5), (5, 0.2)]},
            r"`warm_up` of `top_k` must have positive, ascending steps, .*, got steps \[5, 5\]",
        ),
        ({"wire_dtype": jnp.int8}, r"`wire_dtype` must be a floating-point type, .*, got int8"),
        (
            {"pattern": "star"},
            r"`pattern` of `top_k` must be \"flat\" or \"hierarchical\", got 'star'",
        ),
        (
            {"pattern": "hierarchical"},
            r"`pattern=\"hierarchical\"` of .* got `axes='batch'` and `inner_ranks=None`",
        ),
        (
            {"axes": ("a", "b"), "pattern": "hierarchical", "inner_ranks": 0},
            r"`inner_ranks` of `top_k` must be a whole number, 1 or more, got `0`",
        ),
    ],
)
def test_top_k_refuses(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        top_k(**{"density": 0.1, "axes": "batch", **options})


@pytest.mark.parametrize("density", [0, 1.5, float("nan")])
def test_gtop_k_refuses(density: float) -> None:
    with pytest.raises(ValueError, match=r"^`density` is "):
        gtop_k(density, "batch")


@pytest.mark.parametrize(
    ("bucket", "shape"), [(True, (1 << 15, 1 << 15)), (False, (1 << 16, 1 << 15))]
)
def test_more_elements_than_int32_are_rejected_early(bucket: bool, shape: Any) -> None:
    """Only traces, since no test could allocate that much."""
    tx = top_k(0.1, "batch", bucket=bucket)
    one = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    step = vmapped(lambda grads: tx.update(grads, tx.init(grads)), {"batch": 1})
    with pytest.raises(
        ValueError,
        match=f"of {1 << 31} elements cannot be selected, because there are too many",
    ):
        jax.eval_shape(step, [one, one])


def test_residuals_do_not_follow_another_node_size() -> None:
    tx = top_k(0.2, ("node", "local"), pattern="hierarchical", inner_ranks=4)
    grads = normal(2, 3, 7, 4)
    with pytest.raises(
        ValueError, match="^`inner_ranks` of `top_k` is 4, but axis `local` has 3 ranks"
    ):
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
            assert np.count_nonzero(updates[0]) == 10
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
    with pytest.raises(
        ValueError, match="^`gtop_k` .* needs a power of two of ranks, but axis `batch` has 3"
    ):
        on_ranks(tx, {"batch": 3})(grads, states(tx, grads))
