"""Clipping over parts of a tree is Optax's clipping of the whole one."""

from __future__ import annotations

from typing import Any, get_args

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec
from tensor_case import MESHES, close, on_ranks, over

from jaxcross import tensor
from jaxcross.tensor import Mesh
from jaxcross.tensor.mesh import Role

SHAPES = {"column": (12, 24), "row": (24, 12), "table": (24, 12), "positions": (5, 12), "inner": (24,), "hidden": (12,)}


@over(MESHES)
def test_clipping_is_that_of_optax(mesh: Mesh) -> None:
    """A parameter of every role; a bound that bites, and one that does not."""
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

    told = on_ranks(clipped, mesh, lambda rank: (parts[rank],))
    for n, bound in enumerate(bounds):
        tx = optax.clip_by_global_norm(bound)
        want, _ = tx.update(gradients, tx.init(gradients))
        close(tensor.unshard([each[n] for each in told], specs, mesh), want, 1e-6, f"{bound}: ")
    jax.tree.map(np.testing.assert_array_equal, [each[1] for each in told], parts)
