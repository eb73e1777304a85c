"""The layers' wire bytes equal the formulas of docs/reference/tensor-layouts.md, to the byte."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross import tensor
from jaxcross.program.digest import segment_key
from jaxcross.program.ir import Exchange
from jaxcross.program.stages import cut
from jaxcross.program.trace import trace
from jaxcross.tensor import Mesh
from jaxcross.testing import LocalRanks
from jaxcross.wire.bytes import wire_bytes
from tests.support.tensor_case import BATCH, GRIDS, LENGTH, LINES, Training, batch

B, S, H = BATCH, 6, 24


def exchanges(function: Any, mesh: Mesh, *args: Any) -> tuple[Exchange, ...]:
    """Returns what rank 0 exchanges in a call."""
    traced = trace(function, args, axes=mesh.axes, wire=LocalRanks())
    return tuple(cut(traced, bucket_bytes=0).exchanges)


def received(found: Any, mesh: Mesh) -> float:
    """Returns the number of 4-byte elements that a rank receives."""
    return sum(wire_bytes(x, mesh.axes) for x in found) / 4


def products(found: Any) -> list[Exchange]:
    """Returns SUMMA's exchanges alone."""
    return [x for x in found if x.op in ("all_gather", "reduce_scatter")]


def over(found: Any, *axes: str) -> list[Exchange]:
    return [x for x in found if x.op == "psum" and x.axes == axes]


def share(ranks: int) -> Fraction:
    return Fraction(ranks - 1, ranks)


def hidden_block(mesh: Mesh, features: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of a rank's activations."""
    return jax.ShapeDtypeStruct(
        (B // mesh.size(mesh.batch), S, features // mesh.size(mesh.hidden)), jnp.float32
    )


def ready(model: Any, mesh: Mesh, features: int) -> Any:
    """Returns the types of a rank's parameters."""
    example = jax.ShapeDtypeStruct((B, S, features), jnp.float32)
    return jax.eval_shape(
        lambda: tensor.init(model, jax.random.key(0), jnp.zeros(example.shape), 0)
    )


def both_ways(model: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(model.apply({"params": params}, x) ** 2)

    return lambda params, x: jax.grad(loss, argnums=(0, 1))(params, x)


@pytest.mark.parametrize("mesh", GRIDS.values(), ids=GRIDS)
def test_one_linear_layer_on_a_grid(mesh: Mesh) -> None:
    q, d, k, n = mesh.side, mesh.depth, 12, 36
    model = tensor.Dense(n, mesh, use_bias=False)
    params, x = ready(model, mesh, k), hidden_block(mesh, k)
    mk, kn = B * S * k, k * n
    once = share(q) * (Fraction(mk, d * q) + Fraction(kn, q))
    forward = exchanges(lambda p, x: model.apply({"params": p}, x), mesh, params, x)
    assert received(forward, mesh) == once
    found = exchanges(both_ways(model), mesh, params, x)
    assert received(products(found), mesh) == 3 * once, "backward is twice forward"
    assert received(over(found, "depth"), mesh) == 2 * share(d) * Fraction(kn, q * q)
    assert received(found, mesh) == received(products(found), mesh) + received(
        over(found, "depth"), mesh
    )


@pytest.mark.mostly_integration("[2,2,1]")
@pytest.mark.parametrize("mesh", GRIDS.values(), ids=GRIDS)
def test_a_block_on_a_grid(mesh: Mesh) -> None:
    q, d = mesh.side, mesh.depth
    model = tensor.Block(12, mesh)
    params, x = ready(model, mesh, H), hidden_block(mesh, H)
    once = share(q) * (Fraction(7 * B * S * H, d * q) + Fraction(12 * H * H, q))
    assert (
        received(
            products(exchanges(lambda p, x: model.apply({"params": p}, x), mesh, params, x)), mesh
        )
        == once
    )
    found = exchanges(both_ways(model), mesh, params, x)
    assert received(products(found), mesh) == 3 * once
    # If q is 1, vectors are also summed over `depth` alone: 4h from the normalisations and 9h from
    # biases.
    vectors = 13 * H if q == 1 else 0
    assert received(over(found, "depth"), mesh) == 2 * share(d) * (
        Fraction(12 * H * H, q * q) + vectors
    )
    # Two numbers per token, direction and normalisation.
    tokens = Fraction(B * S, d * q)
    assert received(over(found, "col"), mesh) == 2 * share(q) * 2 * 4 * tokens
    if d == 1:
        assert not [x for x in found if "depth" in x.axes]


@pytest.mark.mostly_integration("1-D on 1", "1-D on 4")
@pytest.mark.parametrize("mesh", LINES.values(), ids=LINES)
def test_a_block_on_a_line(mesh: Mesh) -> None:
    model = tensor.Block(12, mesh)
    params, x = ready(model, mesh, H), hidden_block(mesh, H)
    once = 4 * share(mesh.tensor) * B * S * H
    assert (
        received(exchanges(lambda p, x: model.apply({"params": p}, x), mesh, params, x), mesh)
        == once
    )
    assert received(exchanges(both_ways(model), mesh, params, x), mesh) == 2 * once


@pytest.mark.integration
@pytest.mark.parametrize("mesh", [Mesh(tensor=4), Mesh(side=2)], ids=["1-D on 4", "[2,2,1]"])
def test_a_deeper_model_needs_no_more_executables(mesh: Mesh) -> None:
    """A deeper model has more identical layers, with identical segments between exchanges."""
    distinct, segments = {}, {}
    for layers in (2, 6):
        training = Training(mesh, layers=layers)
        params = jax.eval_shape(
            lambda t=training: tensor.init(t.model, jax.random.key(0), t.example, 0)
        )
        args = params, mesh.local_batch(batch(0), 0)
        program = cut(trace(training.loss_and_gradients, args, axes=mesh.axes, wire=LocalRanks()))
        distinct[layers] = len({segment_key(segment) for segment in program.segments})
        segments[layers] = len(program.segments)
    assert distinct[2] == distinct[6] < segments[2] < segments[6]


@pytest.mark.integration
def test_recomputation_repeats_the_forward_pass() -> None:
    """Recomputation repeats all but each block's last product, which backward doesn't need."""
    mesh, tokens, blocks = Mesh(side=2), B * LENGTH, 2
    counts = {}
    for remat in (False, True):
        training = Training(mesh, tied=False, remat=remat)
        args = training.params(), mesh.local_batch(batch(0), 0)
        counts[remat] = received(
            products(exchanges(training.loss_and_gradients, mesh, *args)), mesh
        )
    once = share(2) * (Fraction(3 * tokens * H, 2) + Fraction(8 * H * H, 2))
    assert counts[True] - counts[False] == blocks * once


def test_deeper_mesh_moves_less_iff_the_batch_is_large() -> None:
    """Compares [4,4,4] with [8,8,1] on 64 ranks: fewer elements per layer iff b s > 3 h."""

    def elements(q: int, d: int, tokens: int, h: int) -> Fraction:
        once = share(q) * (Fraction(7 * tokens * h, d * q) + Fraction(12 * h * h, q))
        return 3 * once + 2 * share(d) * Fraction(12 * h * h, q * q)

    for tokens, h in (
        (96 * 512, 4096),
        (384 * 512, 2048),
        (16 * 512, 3072),
        (3 * 512 + 1, 512),
        (3 * 512 - 1, 512),
    ):
        assert (elements(4, 4, tokens, h) < elements(8, 1, tokens, h)) == (tokens > 3 * h)
    assert np.isclose(float(elements(4, 4, 96 * 512, 4096)) / 1e6, 330, atol=1)
    assert np.isclose(float(elements(8, 1, 96 * 512, 4096)) / 1e6, 528, atol=1)
