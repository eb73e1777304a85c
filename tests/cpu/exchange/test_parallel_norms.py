"""LARS and LAMB with norms shared out among ranks: Optax's updates, and a fair split of layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcross.exchange import mean, parallel_norms
from tests.support.quadratic_training import (
    assert_close,
    assert_same,
    parameters,
    train,
)

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("compiled_quickly")]


def masked():
    return {"w": True, "b": False, "s": True, "e": False}


PARALLEL = {
    "lars": (
        parallel_norms.lars("batch", 0.1, weight_decay=0.01),
        optax.lars(0.1, weight_decay=0.01),
    ),
    "lars with masks": (
        parallel_norms.lars("batch", 0.1, 0.01, masked(), trust_ratio_mask=masked(), nesterov=True),
        optax.lars(0.1, 0.01, masked(), trust_ratio_mask=masked(), nesterov=True),
    ),
    "lamb": (
        parallel_norms.lamb("batch", 0.1, weight_decay=0.01),
        optax.lamb(0.1, weight_decay=0.01),
    ),
    "smallest norm": (
        parallel_norms.scale_by_trust_ratio("batch", min_norm=2.0, trust_coefficient=0.3, eps=0.1),
        optax.scale_by_trust_ratio(2.0, 0.3, 0.1),
    ),
}


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2, 4, 7))]
)
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
    got = jax.vmap(lambda _: tx.update(grads, optax.EmptyState(), params)[0], axis_name="batch")(
        jnp.arange(2)
    )
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
    with pytest.raises(
        ValueError, match=r"^`scale_by_trust_ratio` got no `params`, whose norms it needs"
    ):
        parallel_norms.scale_by_trust_ratio("batch").update(jnp.ones(2), optax.EmptyState())
    assert parallel_norms.scale_by_trust_ratio("batch").update({}, optax.EmptyState(), {})[0] == {}
