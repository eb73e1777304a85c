"""Signs of momenta for partially filled blocks: padding doesn't contribute to their scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.exchange import bits
from jaxcross.exchange.one_bit_adam import _counts, _encode, one_bit_adam
from tests.support.exchange_ranks import RANKS, normal, on_ranks, states

pytestmark = pytest.mark.usefixtures("compiled_quickly")

STEPS = 15  # steps with signs, after one Adam step


def trained(one: jax.Array) -> tuple[Any, Any]:
    """Returns rank 0's update and state after all steps, in blocks of the default size.

    Every rank has this same gradient at every step.
    """
    tx = one_bit_adam(1, "batch", ranks=RANKS)
    grads = jnp.stack([one] * RANKS)
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(1 + STEPS):
        updates, state = step(grads, state)
    return jax.tree.map(lambda x: np.asarray(x[0]), (updates, state))


@pytest.mark.integration
def test_small_leaf_equals_adam_if_signs_are_lossless() -> None:
    """A leaf much smaller than a block equals Adam if the signs lose nothing."""
    one = jnp.where(normal(10, 10) > 0, 0.5, -0.5)
    updates, state = trained(one)
    np.testing.assert_allclose(state.mu, (1 - 0.9 ** (1 + STEPS)) * one, rtol=1e-5)
    np.testing.assert_allclose(updates, jnp.sign(one), rtol=1e-4)


def test_its_momentum_is_as_large_as_the_exact_one() -> None:
    one = normal(10, 10)
    _, state = trained(one)
    exact = float(np.abs((1 - 0.9 ** (1 + STEPS)) * one).mean())
    assert exact < np.abs(state.mu).mean() < 1.25 * exact, (
        "a little more, for what the first signs left out"
    )


@pytest.mark.mostly_integration("100-2048-4", "64-16-4")
@pytest.mark.parametrize(
    ("size", "block", "ranks"),
    [(45, 16, 4), (100, 2048, 4), (64, 16, 4), (5, 8, 3), (301, 24, 2), (16, 16, 1)],
)
def test_scale_is_the_mean_of_existing_elements(size: int, block: int, ranks: int) -> None:
    x = np.asarray(normal(size))
    blocks = -(-size // (ranks * block))
    parts = jnp.asarray(np.pad(x, (0, ranks * blocks * block - size)).reshape(ranks, -1))
    counts = _counts(size, jnp.arange(ranks), blocks, block)
    packed, scales = _encode(parts, counts, block)
    expected = [
        np.abs(x[i : i + block]).mean() if i < size else 0 for i in range(0, parts.size, block)
    ]
    np.testing.assert_allclose(np.ravel(scales), expected, rtol=1e-6)
    np.testing.assert_array_equal(np.ravel(bits.unpack(packed))[:size], x >= 0)
    for rank in range(ranks):
        np.testing.assert_array_equal(_counts(size, jnp.int32(rank), blocks, block), counts[rank])


@pytest.mark.integration
def test_nothing_is_left_in_the_padding() -> None:
    tx = one_bit_adam(1, "batch", ranks=RANKS, block=16)
    grads = normal(
        RANKS, 9, 5
    )  # 45 elements in four parts of 16: the third is partial, the last empty
    step, state = on_ranks(tx), states(tx, grads)
    for _ in range(4):
        _, state = step(grads, state)
        waiting = np.ravel(state.server_residual)
        assert waiting.size == 64 and not waiting[45:].any()
    assert waiting[:45].all()
