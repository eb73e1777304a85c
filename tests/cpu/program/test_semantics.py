"""A bare function, and the same function as a `jax.shard_map` body, give JAX's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh

from jaxcross.errors import CutError
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, run_jaxpr, vmap_oracle
from tests.support.semantics import (
    AXES,
    RANKS,
    W,
    X,
    body,
    gradient,
    mapped,
    on_ranks,
    true_gradient,
)


def test_bare_function_has_pmap_and_vmap_semantics() -> None:
    """`psum` transposes to `psum`: each rank gets its own part, times the number of ranks."""
    for rank, (got, want) in enumerate(
        zip(on_ranks(gradient, X), vmap_oracle(gradient, AXES, [(W, x) for x in X]), strict=True)
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        np.testing.assert_allclose(got, RANKS * X[rank] * np.cos(W * X[rank]), rtol=1e-5)


def test_permutation_over_axes_in_another_order_counts_ranks_in_mesh_order() -> None:
    """XLA and the MPI wire do the same.

    All other exchanges number ranks in the order in which the axes are named.
    """
    axes = {"a": 2, "b": 2}

    def step(x: Any) -> Any:
        return lax.ppermute(x, ("b", "a"), [(0, 1), (1, 2), (2, 3)]), lax.all_gather(x, ("b", "a"))

    jaxpr = trace(step, (jnp.float32(0),), axes=axes, wire=LocalRanks()).jaxpr
    results = run_jaxpr(jaxpr, axes, [[jnp.float32(10 * rank)] for rank in range(4)])
    assert [float(moved) for moved, _ in results] == [0, 0, 10, 20]
    assert all(gathered.tolist() == [0, 20, 10, 30] for _, gathered in results)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_body_has_its_check_vma_semantics(check_vma: bool, cast: bool) -> None:
    """Unchecked, `pcast` does nothing: JAX adds missing ones, and has no varying types."""
    step = mapped(body(cast), check_vma, mesh=AbstractMesh((RANKS,), ("batch",)))
    got = on_ranks(step, X[:, None])
    want = [true_gradient()] * RANKS if check_vma else on_ranks(gradient, X)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine.reshape(3), theirs, rtol=1e-5)


ON_DEVICES = """
import jax, numpy as np
from tests.support.semantics import RANKS, W, X, body, gradient, mapped, on_ranks, true_gradient

devices = jax.make_mesh((RANKS,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
bare = np.stack(on_ranks(gradient, X))
for cast in (False, True):
    for check_vma in (False, True):
        got = jax.jit(mapped(body(cast), check_vma, mesh=devices))(W, X)
        want = true_gradient()[None] if check_vma else bare
        np.testing.assert_allclose(got.reshape(-1, 3), want, rtol=1e-5)
    got = jax.pmap(body(cast), "batch", in_axes=(None, 0))(W, X)
    np.testing.assert_allclose(got, bare, rtol=1e-5)
print("as on devices")
"""


@pytest.mark.integration
def test_so_they_are_on_devices(on_four_devices: Callable[..., str]) -> None:
    assert "as on devices" in on_four_devices(ON_DEVICES)


@pytest.mark.parametrize(
    ("wrap", "to"),
    [
        (lambda f: f, "varying"),
        (lambda f: f, "reduced"),
        (jax.jit, "varying"),
        (jax.checkpoint, "varying"),
        (jax.vmap, "varying"),
    ],
    ids=["bare", "reduced", "jit", "remat", "vmap"],
)
def test_pcast_in_a_bare_function_error_names_the_line(wrap: Callable[..., Any], to: Any) -> None:
    """JAX's `vmap` over ranks rejects it too. `pmap` ignores it, as if it weren't there."""

    def train_step(w: Any, x: Any) -> Any:
        cast = wrap(lambda w: lax.pcast(w, "batch", to=to))
        return jax.grad(lambda w: lax.psum(jnp.sum(cast(w) * x), "batch"))(w)

    with pytest.raises(
        CutError, match=r"`train_step` calls `jax.lax.pcast` at .*test_semantics.py:\d+"
    ) as raised:
        trace(train_step, (W, X[0]), axes=AXES, wire=LocalRanks())
    assert "`jax.shard_map(step, in_specs=..., out_specs=...)`" in str(raised.value)
