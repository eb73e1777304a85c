"""A mesh of this rank's own devices alongside the axes over ranks: names must differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcross.errors import CutError
from jaxcross.program import stages
from jaxcross.program.trace import Traced, trace
from jaxcross.testing import LocalRanks

P = PartitionSpec
CURE = 'Exchange over ranks by name, e.g. `grads = jax.lax.pmean(grads, "b")`'


def mesh(name: str, kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((1,), (name,), axis_types=(kind,))


def traced(step: Any, *args: Any) -> Traced:
    return trace(step, args, axes={"b": 2}, wire=LocalRanks())


def gradient(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def on_axes(on: jax.sharding.Mesh, *spec: str) -> NamedSharding:
    return NamedSharding(on, P(*spec))


def given(on: jax.sharding.Mesh, *spec: str) -> tuple[jax.Array, jax.Array]:
    return jax.device_put(jnp.ones(3), on_axes(on)), jax.device_put(
        jnp.ones((4, 3)), on_axes(on, *spec)
    )


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_an_argument_split_along_an_axis_of_ranks_is_refused(kind: AxisType) -> None:
    on = mesh("b", kind)

    def train_step(w: Any, x: Any) -> Any:
        loss, grads = gradient(w, x)
        return w - grads, lax.pmean(loss, "b")

    with pytest.raises(
        CutError,
        match=r"^argument `args\[1\]` is sharded along `b`, "
        "which is an axis over ranks in `train_step`",
    ) as error:
        traced(train_step, *given(on, "b"))
    assert CURE in str(error.value) and "give its axis another name" in str(error.value)


def reshards(on: jax.sharding.Mesh, grads: Any) -> Any:
    return jax.reshard(grads, on_axes(on))


def constrains(on: jax.sharding.Mesh, grads: Any) -> Any:
    return lax.with_sharding_constraint(grads, on_axes(on))


def jits(on: jax.sharding.Mesh, grads: Any) -> Any:
    return jax.jit(lambda g: g, in_shardings=on_axes(on), out_shardings=on_axes(on))(grads)


WAYS = [
    (reshards, AxisType.Explicit, "reshard"),
    (constrains, AxisType.Auto, "sharding_constraint"),
    (jits, AxisType.Auto, "p?jit"),
]


@pytest.mark.parametrize(("sums", "kind", "primitive"), WAYS)
def test_a_layout_in_place_of_an_exchange_is_refused(
    sums: Any, kind: AxisType, primitive: str
) -> None:
    """Rejected even with arguments on one device, where `reshard(grads, P())` does nothing."""
    on = mesh("b", kind)

    @jax.jit
    def train_step(w: Any, x: Any) -> Any:
        loss, grads = gradient(w, x)
        return w - sums(on, grads), lax.pmean(loss, "b")

    with jax.set_mesh(on):
        args = jnp.ones(3), jnp.ones((4, 3))
        with pytest.raises(
            CutError,
            match=f"^`{primitive}` at .*test_mesh_axes.* lays out an array along `b`, which",
        ) as error:
            traced(train_step, *args)
    assert CURE in str(error.value)


@pytest.mark.parametrize(("sums", "kind"), [way[:2] for way in WAYS])
def test_a_local_mesh_of_other_names_is_allowed(sums: Any, kind: AxisType) -> None:
    on = mesh("device", kind)

    def train_step(w: Any, x: Any) -> Any:
        loss, grads = gradient(w, x)
        return w - lax.pmean(sums(on, grads), "b"), lax.pmean(loss, "b")

    (exchange,) = stages.cut(traced(train_step, *given(on, "device"))).exchanges
    assert exchange.shape == (4,), "three gradients and the loss, in one bucket"


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_replicas_on_a_mesh_of_the_same_name_are_allowed(kind: AxisType) -> None:
    """Nothing is split along the mesh, so it doesn't replace an exchange."""

    def train_step(w: Any, x: Any) -> Any:
        loss, grads = gradient(w, x)
        return w - lax.pmean(grads, "b"), lax.pmean(loss, "b")

    assert stages.cut(traced(train_step, *given(mesh("b", kind)))).exchanges
