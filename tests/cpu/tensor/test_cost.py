"""The cost model predicts a step's wire bytes exactly; its times follow the stated formula."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross import tensor
from jaxcross.program.ir import Exchange
from jaxcross.program.stages import cut
from jaxcross.program.trace import trace
from jaxcross.tensor import Machine, Mesh
from jaxcross.testing import LocalRanks
from jaxcross.wire.bytes import wire_bytes
from tests.support.tensor_case import BATCH, LENGTH, MESHES, QUICK, Training, batch, transformer


def held(training: Training) -> Any:
    """Returns the types of a rank's parameters."""
    return jax.eval_shape(
        lambda: tensor.init(training.model, jax.random.key(0), training.example, 0)
    )


def exchanges(training: Training) -> tuple[Exchange, ...]:
    """Returns what rank 0 exchanges for a loss and its gradients."""
    mesh = training.mesh
    args = held(training), mesh.local_batch(batch(0), 0)
    traced = trace(training.loss_and_gradients, args, axes=mesh.axes, wire=LocalRanks())
    return tuple(cut(traced, bucket_bytes=0).exchanges)


def rounds(exchange: Exchange, mesh: Mesh) -> int:
    ranks = math.prod(mesh.axes[a] for a in exchange.axes)
    return (2 if exchange.op in ("psum", "pmax") else 1) * (ranks - 1)


SOME = [(name, tied, remat) for name in MESHES for tied, remat in ((True, False), (False, True))]
USUAL = {("[2,2,2]", True, False), ("1-D on 4", False, True), ("data 2 x 1-D on 2", True, False)}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "tied", "remat"),
    [pytest.param(*case, marks=() if case in USUAL else pytest.mark.exhaustive) for case in SOME],
)
def test_cost_matches_the_traced_bytes_and_messages(name: str, tied: bool, remat: bool) -> None:
    training = Training(MESHES[name], tied=tied, remat=remat)
    found, predicted = exchanges(training), tensor.step_cost(training.model, BATCH, LENGTH)
    assert predicted.received_bytes == sum(wire_bytes(x, training.mesh.axes) for x in found)
    assert predicted.messages == sum(rounds(x, training.mesh) for x in found)


@pytest.mark.mostly_integration("1-D on 4")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_weights_are_those_that_a_rank_holds(name: str) -> None:
    training = Training(MESHES[name])
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held(training)))
    assert tensor.step_cost(training.model, BATCH, LENGTH).weights_bytes == nbytes


def products(jaxpr: Any) -> int:
    """Returns the number of operations in all matrix products of a jaxpr."""
    total = 0
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            total += products(inner) if hasattr(inner, "eqns") else 0
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _), (lhs, _) = eqn.params["dimension_numbers"], eqn.invars
            depth = math.prod(lhs.aval.shape[d] for d in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    return total


@pytest.mark.mostly_integration("data 2 x 1-D on 2")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_operations_are_those_of_the_products(name: str) -> None:
    training = Training(MESHES[name])
    args = held(training), training.mesh.local_batch(batch(0), 0)
    jaxpr = jax.make_jaxpr(training.loss_and_gradients, axis_env=list(training.mesh.axes.items()))(
        *args
    )
    assert tensor.step_cost(training.model, BATCH, LENGTH).operations == products(jaxpr.jaxpr)


def test_work_is_shared_equally() -> None:
    serial = tensor.step_cost(transformer(Mesh()), BATCH, LENGTH)
    assert serial.messages == serial.received_bytes == 0
    for mesh in MESHES.values():
        assert (
            tensor.step_cost(transformer(mesh), BATCH, LENGTH).operations * mesh.ranks
            == serial.operations
        )


def test_times_follow_the_formula() -> None:
    cost = tensor.step_cost(transformer(Mesh(side=2)), BATCH, LENGTH)
    machine = Machine(alpha_s=1e-4, bytes_per_s=5e7, operations_per_s=2e10)
    assert cost.exchange_s(machine) == 1e-4 * cost.messages + cost.received_bytes / 5e7
    assert cost.compute_s(machine) == cost.operations / 2e10
    assert cost.seconds(machine) == cost.exchange_s(machine) + cost.compute_s(machine)


def layer_bytes(mesh: Mesh, b: int, s: int, h: int, heads: int = 64) -> int:
    """Returns the bytes of one layer: the difference between models with two layers and one."""
    one, two = (tensor.Transformer(64 * h, h, n, heads, s, mesh) for n in (1, 2))
    return tensor.step_cost(two, b, s).received_bytes - tensor.step_cost(one, b, s).received_bytes


@pytest.mark.integration
def test_the_published_comparison() -> None:
    """Compares [4,4,4] with [8,8,1] on 64 ranks: fewer bytes per layer iff b s > 3 h."""
    deep, flat = Mesh(side=4, depth=4), Mesh(side=8)
    for b, s, h, less in ((96, 512, 4096, True), (384, 512, 2048, True), (16, 512, 3072, False)):
        assert (layer_bytes(deep, b, s, h) < layer_bytes(flat, b, s, h)) == less == (b * s > 3 * h)
    millions = [layer_bytes(mesh, 96, 512, 4096) / 4e6 for mesh in (deep, flat)]
    np.testing.assert_allclose(millions, [330, 528], rtol=0.01)


def test_other_types_and_batches_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match="^The model computes in .*bfloat16.* but `step_cost` only knows the cost of float32",
    ):
        tensor.step_cost(transformer(Mesh(), dtype=jnp.bfloat16), BATCH, LENGTH)
    with pytest.raises(ValueError, match="^A batch of shape \\(5,\\) cannot be sharded"):
        tensor.step_cost(transformer(Mesh(side=2)), 5, LENGTH)
    with pytest.raises(
        ValueError, match="^`batch` and `length` of `step_cost` must be at least 1, got 0 sequences"
    ):
        tensor.step_cost(transformer(Mesh()), 0, LENGTH)


def test_models_that_cannot_run_cost_nothing() -> None:
    with pytest.raises(
        ValueError, match="^The heads of an attention layer, .* no multiple of the 4 ranks"
    ):
        tensor.step_cost(transformer(Mesh(tensor=4)).clone(heads=2), BATCH, LENGTH)
    with pytest.raises(ValueError, match="^Sequences of 6 tokens are longer than the 5 positions"):
        tensor.step_cost(transformer(Mesh()), BATCH, LENGTH + 1)
