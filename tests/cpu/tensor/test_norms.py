"""Clipping over parts of a tree equals Optax's clipping of the whole tree."""

from __future__ import annotations

from typing import Any, get_args

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxcross import tensor
from jaxcross.tensor import Mesh
from jaxcross.tensor.mesh import Role
from tests.support.tensor_case import MESHES, close, on_ranks, over

SHAPES = {
    "column": (12, 24),
    "row": (24, 12),
    "table": (24, 12),
    "positions": (5, 12),
    "inner": (24,),
    "hidden": (12,),
}


@pytest.mark.integration
@over(MESHES)
def test_clipping_is_that_of_optax(mesh: Mesh) -> None:
    """Uses a parameter of every role, one bound that clips, and one that doesn't."""
    assert set(SHAPES) == set(get_args(Role))
    rng = np.random.default_rng(0)
    gradients = {role: rng.normal(size=shape).astype(np.float32) for role, shape in SHAPES.items()}
    roles: Any = SHAPES
    specs = {role: PartitionSpec(*mesh.spec(role)) for role in roles}
    parts = [tensor.shard(gradients, specs, mesh, rank) for rank in range(mesh.ranks)]
    bounds = (0.5, 1e3)

    def clipped(part: Any) -> Any:
        made = [tensor.clip_by_global_norm(bound, specs, mesh) for bound in bounds]
        return [tx.update(part, tx.init(part))[0] for tx in made]

    results = on_ranks(clipped, mesh, lambda rank: (parts[rank],))
    for n, bound in enumerate(bounds):
        tx = optax.clip_by_global_norm(bound)
        want, _ = tx.update(gradients, tx.init(gradients))
        close(tensor.unshard([each[n] for each in results], specs, mesh), want, 1e-6, f"{bound}: ")
    jax.tree.map(np.testing.assert_array_equal, [each[1] for each in results], parts)


@pytest.mark.mostly_integration("1-D-nan")
@pytest.mark.parametrize("strange", [np.nan, np.inf])
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(side=2)], ids=["1-D", "2-D"])
def test_nonfinite_value_on_one_rank_is_seen_on_all(mesh: Mesh, strange: float) -> None:
    """Ranks must agree, or `apply_if_finite` would let some ranks update and others not."""
    specs = {"cut": PartitionSpec(*mesh.spec("inner")), "held": PartitionSpec()}
    tx = optax.chain(
        tensor.clip_by_global_norm(1.0, specs, mesh), optax.apply_if_finite(optax.sgd(1.0), 9)
    )

    def step(part: Any) -> Any:
        updates, state = tx.update(part, tx.init(part))
        return updates, state[1].total_notfinite

    for value in (0.5, strange):
        whole = {"cut": np.full(4, 0.5, np.float32), "held": np.full(2, 0.5, np.float32)}
        whole["cut"][-1] = value  # held by one rank, or by one column
        results = on_ranks(
            step, mesh, lambda rank, whole=whole: (tensor.shard(whole, specs, mesh, rank),)
        )
        skipped = int(not np.isfinite(value))
        assert [int(count) for _, count in results] == [skipped] * mesh.ranks
        for updates, _ in results:
            np.testing.assert_array_equal(updates["held"], results[0][0]["held"])
            assert bool(np.all(updates["held"] == 0)) == bool(skipped)


def test_what_a_mask_leaves_out_is_not_clipped() -> None:
    mesh = Mesh(tensor=2)
    gradients = {"cut": np.arange(1, 5, dtype=np.float32), "held": np.full(2, 3, np.float32)}
    specs = {"cut": PartitionSpec("tensor"), "held": PartitionSpec()}
    mask = {"cut": True, "held": False}

    def clipped(part: Any) -> Any:
        tx = optax.masked(tensor.clip_by_global_norm(1.0, specs, mesh), mask)
        return tx.update(part, tx.init(part))[0]

    results = on_ranks(clipped, mesh, lambda rank: (tensor.shard(gradients, specs, mesh, rank),))
    plain = optax.masked(optax.clip_by_global_norm(1.0), mask)
    want, _ = plain.update(gradients, plain.init(gradients))
    close(tensor.unshard(results, specs, mesh), want, 1e-6)
    norms = on_ranks(lambda x: tensor.global_norm({"cut": x, "held": None}, specs, mesh), mesh,
                     lambda rank: (tensor.shard(gradients, specs, mesh, rank)["cut"],))  # fmt: skip
    np.testing.assert_allclose(norms, np.sqrt(30), rtol=1e-6)
