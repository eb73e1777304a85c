"""Every exchange in the table works the same under `jax.shard_map` on devices as under `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxcross.exchange import sharded_optimizer
from tests.support.exchange_row import Row
from tests.support.exchange_table import TABLE, gradients, start, step_of

ON_DEVICES = """
import jax, numpy as np
from jax.sharding import PartitionSpec
from tests.support.exchange_table import TABLE, gradients, start, step_of
from tests.support.exchange_runs import assert_close, compiled, ranks_of_gradients, run

for row in TABLE:
    if not row.worlds(4):
        continue
    axes, step = row.axes(4), step_of(row.made(4))

    def alone(carry, grads):
        return jax.tree.map(lambda x: x[None], step(*jax.tree.map(lambda x: x[0], (carry, grads))))

    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    spec = PartitionSpec(tuple(axes))
    mapped = jax.jit(
        jax.shard_map(alone, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    _, carry = compiled(row, 4, "make")
    received = []
    for n in range(row.steps):
        carry, updates = mapped(carry, ranks_of_gradients(4, n))
        received.append(updates)
    wanted = run(row, 4)
    # An update that moves parameters to their mean has the rounding errors of the parameters, so we
    # only compare the updates of exchanges of gradients.
    pairs = [(carry, wanted[0])] + ([(received, wanted[1])] if row.kind == "gradient" else [])
    for got, want in pairs:
        assert_close(got, want, row.rtol)
    print("holds", row.name, flush=True)
"""


@pytest.mark.exhaustive
def test_every_row_equals_vmap(on_four_devices: Callable[..., str]) -> None:
    """Runs in its own process, since it needs four XLA devices."""
    assert on_four_devices(ON_DEVICES, timeout=500).count("holds") == sum(
        row.worlds(4) for row in TABLE
    )


@pytest.mark.mostly_integration(
    "mean, bfloat16",
    "mean, hierarchical, bfloat16",
    "mean, tree",
    "mean, tree, bfloat16",
    "gossip, torus",
)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if row.worlds(4)])
def test_replication_is_checked(row: Row) -> None:
    """Only traces. Inputs and outputs are rank-local."""
    axes, tx = row.axes(4), row.made(4)
    mesh = jax.sharding.AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    spec = PartitionSpec(tuple(axes))
    carry, grads = jax.eval_shape(lambda: (start(tx), gradients(0, 0)))
    mapped = jax.shard_map(
        lambda *args: jax.tree.map(
            lambda x: x[None], step_of(tx)(*jax.tree.map(lambda x: x[0], args))
        ),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=True,
    )
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), (carry, grads))
    assert jax.eval_shape(mapped, *many)[0] == many[0]


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("batch")])
def test_a_servers_optimizer_may_take_more_arguments(spec: PartitionSpec) -> None:
    """The argument may be identical across ranks or rank-local."""

    def update(
        updates: Any, state: Any, params: Any = None, *, loss: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: -u / (1 + jnp.mean(loss)), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = sharded_optimizer(optax.chain(optax.trace(0.9), inner), "batch")
    mesh = jax.sharding.AbstractMesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        lambda g, loss: tx.update(g, tx.init(g), g, loss=loss)[0],
        mesh=mesh,
        in_specs=(PartitionSpec("batch"), spec),
        out_specs=PartitionSpec("batch"),
        check_vma=True,
    )
    assert jax.eval_shape(mapped, jnp.ones((8, 3)), jnp.ones(4)).shape == (8, 3)
