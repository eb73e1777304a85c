"""The three products on every grid equal the serial ones, forward and backward.

Every depth layer has different data.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross import tensor
from jaxcross.tensor import Mesh, summa
from jaxcross.tensor.summa import ab
from tests.support.tensor_case import GRIDS, on_ranks

M, K, N = 24, 12, 18
GRID = pytest.mark.parametrize("mesh", GRIDS.values(), ids=GRIDS)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def activations(mesh: Mesh) -> Any:
    """Returns how activations are sharded: rows over the batch axes, columns over `col`."""
    return (mesh.batch or None, "col" if mesh.col else None)


# Name -> (serial product, shapes of both operands, which operands are weights).
PRODUCTS: dict[str, Any] = {
    "ab": (lambda a, b: a @ b, (M, K), (K, N), (False, True)),
    "abt": (lambda a, b: a @ b.T, (M, N), (K, N), (False, True)),
    "atb": (lambda a, b: a.T @ b, (M, K), (M, N), (False, False)),
}


@pytest.mark.mostly_integration(
    "ab-[1,1,1]", "abt-[1,1,1]", "abt-[1,1,4]", "atb-[1,1,1]", "atb-[1,1,4]"
)
@GRID
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_and_both_gradients_equal_serial_ones(name: str, mesh: Mesh) -> None:
    serial, *shapes, weights = PRODUCTS[name]
    a, b = normal(*shapes[0]), normal(*shapes[1], seed=1)
    g = normal(*serial(a, b).shape, seed=2)
    specs = [mesh.spec("column") if weight else activations(mesh) for weight in weights]
    out = activations(mesh) if any(weights) else mesh.spec("column")
    depth = tuple(x for x in ("depth",) if mesh.size((x,)) > 1)

    def call(a: Any, b: Any, g: Any) -> Any:
        def product(a: Any, b: Any) -> Any:
            b = tensor.copy_to(b, depth) if weights[1] else b
            c = getattr(summa, name)(a, b, mesh.row, mesh.col)
            return (
                c if any(weights) else tensor.reduce_from(c, depth)
            )  # A^T B is itself a sum over depth

        c, pull = jax.vjp(product, a, b)
        return c, *pull(g)

    want = serial(a.astype(np.float64), b), *_gradients(name, a.astype(np.float64), b, g)
    results = on_ranks(
        call,
        mesh,
        lambda r: [mesh.part(x, s, r) for x, s in zip((a, b, g), (*specs, out), strict=True)],
    )
    for rank, got in enumerate(results):
        for x, y, spec in zip(got, want, (out, *specs), strict=True):
            np.testing.assert_allclose(
                x, mesh.part(y, spec, rank), rtol=1e-5, atol=1e-5, err_msg=f"rank {rank}"
            )


def _gradients(name: str, a: Any, b: Any, g: Any) -> tuple[Any, Any]:
    if name == "atb":
        return b @ g.T, a @ g
    return (g @ b.T, a.T @ g) if name == "ab" else (g @ b, g.T @ a)


@GRID
def test_weight_gradient_without_depth_sum_is_wrong(mesh: Mesh) -> None:
    """ColossalAI's 2.5-D omits it, which its tests at depth 1 couldn't detect."""
    a, b, g = normal(M, K), normal(K, N, seed=1), normal(M, N, seed=2)

    def call(a: Any, b: Any, g: Any) -> Any:
        return jax.vjp(lambda b: ab(a, b, mesh.row, mesh.col), b)[1](g)[0]

    rows = activations(mesh)
    results = on_ranks(
        call,
        mesh,
        lambda r: (
            mesh.part(a, rows, r),
            mesh.part(b, mesh.spec("column"), r),
            mesh.part(g, rows, r),
        ),
    )
    want = [mesh.part(a.T @ g, mesh.spec("column"), r) for r in range(mesh.ranks)]
    right = [np.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in zip(results, want, strict=True)]
    assert all(right) if mesh.depth == 1 else not any(right)
    layers = np.asarray(results).reshape(mesh.depth, mesh.side**2, *results[0].shape)
    np.testing.assert_allclose(
        layers.sum(0), np.asarray(want[: mesh.side**2]), rtol=1e-4, atol=1e-4
    )


def products(jaxpr: Any) -> list[Any]:
    """Returns every matrix product in a jaxpr, including nested ones."""
    found = []
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += products(inner) if hasattr(inner, "eqns") else []
        found += [eqn] if eqn.primitive.name == "dot_general" else []
    return found


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_are_accumulated_in_float32(name: str, dtype: Any) -> None:
    """Checks which type is requested, because XLA may use float32 unasked on a CPU."""
    _, *shapes, _ = PRODUCTS[name]
    a, b = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    def loss(a: Any, b: Any) -> Any:
        return jnp.sum(getattr(summa, name)(a, b, (), ()))

    found = products(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(a, b).jaxpr)
    assert len(found) == 3
    for eqn in found:
        assert eqn.params["preferred_element_type"] == jnp.float32 == eqn.outvars[0].aval.dtype
        assert all(operand.aval.dtype == dtype for operand in eqn.invars)


def test_bfloat16_is_rounded_once() -> None:
    mesh, length = Mesh(side=2), 1024

    def call(rank: Any) -> Any:
        del rank
        half = jnp.ones((2, length // 2), jnp.bfloat16), jnp.ones((length // 2, 2), jnp.bfloat16)
        return ab(*half, mesh.row, mesh.col)

    for got in on_ranks(call, mesh, lambda r: (np.float32(r),)):
        assert got.dtype == jnp.bfloat16
        assert (got.astype(np.float32) == length).all(), (
            "a sum of ones in bfloat16 would stop at 256"
        )


@pytest.mark.integration
def test_derivatives_of_derivatives() -> None:
    """Products are closed under differentiation: gradients of squared gradients match JAX's."""
    mesh, a, b = Mesh(side=2), normal(M, K), normal(K, N, seed=1)

    def penalty(product: Any, total: Any, a: Any, b: Any) -> Any:
        inner = jax.grad(lambda b: total(jnp.sum(jnp.tanh(product(a, b)))))(b)
        return total(jnp.sum(inner**2))

    def call(a: Any, b: Any) -> Any:
        def total(x: Any) -> Any:
            return tensor.reduce_from(x, ("row", "col"))

        return jax.grad(lambda b: penalty(lambda a, b: ab(a, b, mesh.row, mesh.col), total, a, b))(
            b
        )

    want = jax.grad(lambda b: penalty(jnp.matmul, lambda x: x, a, b))(b)
    results = on_ranks(
        call, mesh, lambda r: (mesh.part(a, activations(mesh), r), mesh.part(b, ("row", "col"), r))
    )
    for rank, got in enumerate(results):
        np.testing.assert_allclose(
            got, mesh.part(np.asarray(want), ("row", "col"), rank), rtol=1e-3, atol=1e-3
        )
