"""Composed meshes: replicas, depth layers, own averages over depth; all match serial gradients."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross import tensor
from jaxcross.tensor import Mesh
from jaxcross.testing import over_ranks
from tests.support.tensor_case import Training, close

VOCABULARY, FEATURES, LENGTH, BATCH = 12, 8, 3, 24


class Small(nn.Module):
    """Every kind of layer but attention, which has no own exchange: compiles quickly."""

    mesh: Mesh = Mesh()

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embedding = tensor.Embedding(VOCABULARY, FEATURES, LENGTH, self.mesh)
        x = tensor.LayerNorm(self.mesh)(embedding(tokens))
        return embedding.attend(x + tensor.MLP(2 * FEATURES, self.mesh)(x))


TOKENS, LABELS = (
    np.random.default_rng(0).integers(0, VOCABULARY, (2, BATCH, LENGTH)).astype(np.int32)
)
ROWS = {"tokens": TOKENS, "labels": LABELS}


def loss_and_gradients(mesh: Mesh) -> Any:
    def call(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return tensor.cross_entropy(
                Small(mesh).apply({"params": params}, batch["tokens"]), batch["labels"], mesh
            )

        return jax.value_and_grad(loss_fn)(params)

    return call


@pytest.fixture(scope="module")
def serial() -> tuple[Any, Any, Any]:
    """Returns parameters, loss and gradients."""
    params = jax.tree.map(np.asarray, tensor.init(Small(), jax.random.key(0), TOKENS[:1]))
    params = jax.tree.map(
        lambda p: p + np.float32(0.1) * np.random.default_rng(p.size).normal(size=p.shape), params
    )
    params = jax.tree.map(np.float32, params)
    return params, *jax.jit(loss_and_gradients(Mesh()))(params, ROWS)


def on_parts(call: Any, params: Any, held: Mesh, over: Mesh) -> list[Any]:
    """Calls `call(params, batch)` on every rank of `over`, with parameters sharded as on `held`.

    The axes of `held` are the last axes of `over`.
    """
    specs = tensor.partition(Small(held), jnp.asarray(TOKENS[:1]))
    parts = [tensor.shard(params, specs, held, rank) for rank in range(held.ranks)]
    args = [(parts[rank % held.ranks], over.local_batch(ROWS, rank)) for rank in range(over.ranks)]
    return over_ranks(call, over.axes)(args)


@pytest.mark.integration
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(Mesh(data=2, depth=2), id="data 2 x depth 2"),
        pytest.param(
            Mesh(data=3, depth=2, side=2), id="data 3 x [2,2,2]", marks=pytest.mark.exhaustive
        ),
        pytest.param(Mesh(data=2, tensor=2), id="data 2 x 1-D on 2", marks=pytest.mark.exhaustive),
    ],
)
def test_data_beside_depth(mesh: Mesh, serial: tuple[Any, Any, Any]) -> None:
    params, want_loss, want = serial
    specs = tensor.partition(Small(mesh), jnp.asarray(TOKENS[:1]))
    results = on_parts(loss_and_gradients(mesh), params, mesh, mesh)
    for rank, (loss, gradients) in enumerate(results):
        np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
        close(gradients, tensor.shard(want, specs, mesh, rank), 2e-5, f"rank {rank}: ")
    tensor.unshard([gradients for _, gradients in results], specs, mesh)  # copies are bitwise equal


@pytest.mark.integration
def test_depth_is_a_mean_of_grids(serial: tuple[Any, Any, Any]) -> None:
    """`exchange.mean` of two grids' gradients, each of half the batch, equals depth 2."""
    grid, deep, mean = Mesh(side=2), Mesh(side=2, depth=2), jaxcross.exchange.mean("depth")

    def averaged(params: Any, batch: Any) -> Any:
        loss, gradients = loss_and_gradients(grid)(params, batch)
        return jax.lax.pmean(loss, "depth"), mean.update(gradients, mean.init(params))[0]

    results = on_parts(averaged, serial[0], grid, deep)
    for one, other in zip(
        results, on_parts(loss_and_gradients(deep), serial[0], deep, deep), strict=True
    ):
        close(one, other, 1e-5)


@pytest.mark.integration
def test_depth_is_data_parallelism_of_the_grid() -> None:
    """[2,2,2] equals two [2,2] grids with half of the batch each, bit for bit."""
    deep, beside = (
        Training(Mesh(side=2, depth=2), layers=1),
        Training(Mesh(side=2, data=2), layers=1),
    )
    for (a, _), (b, _) in zip(deep.run(2)[0], beside.run(2)[0], strict=True):
        assert all(
            x.tobytes() == y.tobytes()
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
