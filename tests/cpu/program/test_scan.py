"""A `scan` with exchanges is unrolled: JAX's own results, and one cut exchange per iteration."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross import tensor
from jaxcross.program import stages
from jaxcross.program.digest import segment_key
from jaxcross.program.flatten import UNROLLED
from jaxcross.program.ir import Program
from jaxcross.program.trace import trace
from jaxcross.tensor import Mesh
from jaxcross.testing import LocalRanks, over_ranks, run_program
from jaxcross.wire.bytes import wire_bytes
from tests.support.zoo import assert_close

pytestmark = pytest.mark.usefixtures("compiled_quickly")

MESH, AXES = Mesh(tensor=2), {"batch": 2}
X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
RING = [(0, 1), (1, 0)]


class Body(nn.Module):
    """A Transformer block with the signature `nn.scan` needs."""

    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return tensor.Block(2, self.mesh, name="block")(x), None


class Stack(nn.Module):
    """Blocks over parameters with a leading axis."""

    length: int
    remat: bool = False
    mesh: Mesh = MESH

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        body = nn.remat(Body, prevent_cse=False) if self.remat else Body
        scan = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.length,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return scan(self.mesh, name="blocks")(x, None)[0]


def gradients(length: int, *, remat: bool = False) -> tuple[Any, Any, list[Any]]:
    """Returns the gradient of scanned blocks, that of a Python loop, and all ranks' arguments."""
    model, block = Stack(length, remat), tensor.Block(2, MESH)
    params = [
        tensor.init(model, jax.random.key(0), jax.ShapeDtypeStruct(X.shape, X.dtype), r)
        for r in range(2)
    ]

    def looped(params: Any, x: jax.Array) -> jax.Array:
        for i in range(length):
            x = block.apply(
                {"params": jax.tree.map(lambda p, i=i: p[i], params["blocks"]["block"])}, x
            )
        return jnp.sum(x**2)

    def scanned(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply({"params": params}, x) ** 2)

    both = [jax.value_and_grad(loss, argnums=(0, 1)) for loss in (scanned, looped)]
    return *both, [(p, X) for p in params]


def cut(step: Any, args: Any, axes: Any) -> Program:
    return stages.cut(trace(step, args, axes=axes, wire=LocalRanks()))


def received(program: Program) -> int:
    return sum(wire_bytes(x, dict(program.axes)) for x in program.exchanges)


@pytest.mark.integration
@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_scanned_blocks_are_the_python_loop(remat: bool) -> None:
    scanned, looped, args = gradients(3, remat=remat)
    program = cut(jax.jit(scanned), args[0], MESH.axes)
    out = run_program(program, [jax.tree.leaves(a) for a in args])
    got = [jax.tree.unflatten(program.traced.out_tree, leaves) for leaves in out]
    assert_close(got, over_ranks(looped, MESH.axes)(args), 2e-5, "scanned")
    if not remat:
        python = cut(looped, args[0], MESH.axes)
        assert received(program) == received(python)
        assert len(program.collectives) == len(python.collectives)


@pytest.mark.integration
def test_more_iterations_reuse_the_same_executables() -> None:
    programs = []
    for length in (3, 4):
        scanned, _, args = gradients(length)
        programs.append(cut(scanned, args[0], MESH.axes))
    short, long = programs
    assert len(long.collectives) - len(short.collectives) == 4, (
        "two all-reduces forward, two backward"
    )
    assert received(long) * 3 == received(short) * 4
    assert not any("loop" in dict(x.params) for x in long.exchanges)
    kinds = [{segment_key(s) for s in program.segments} for program in programs]
    assert len(kinds[0]) == len(kinds[1])


def reverse(x: jax.Array) -> Any:
    """Uses constants, a literal as initial carry, reversed rows, two stacked outputs, a key."""
    rows, keys = jnp.outer(jnp.arange(1.0, 4), x), jax.random.split(jax.random.key(1), 3)

    def body(c: Any, row: Any) -> Any:
        total, n = c
        total = lax.psum(total * x + row[0], "batch")
        return (total, n + 1), (n, total + jax.random.normal(row[1], x.shape))

    return lax.scan(body, (jnp.zeros_like(x), 0), (rows, keys), reverse=True)


def nested(x: jax.Array) -> Any:
    """Scans in checkpoint, custom derivatives and a scan; a later scan reads the result."""

    @jax.custom_jvp
    def inner(c: jax.Array) -> Any:
        return lax.scan(lambda c, _: (lax.ppermute(c, "batch", RING) + 1, c), c, None, length=2)

    inner.defjvps(lambda t, out, c: (t, jnp.stack([t, t])))
    y, stacked = lax.scan(lambda c, _: jax.checkpoint(inner)(c), x, None, length=3)
    z, _ = lax.scan(lambda c, row: (lax.psum(c * row.sum(0), "batch"), None), y, stacked)
    return z, stacked


def gradient(x: jax.Array) -> Any:
    def loss(w: jax.Array) -> Any:
        y, heads = lax.scan(lambda c, row: (jnp.tanh(lax.pmean(c * row, "batch") + c), c[0]), x, w)
        return jnp.sum(y**2) + heads.sum()

    return jax.jit(jax.value_and_grad(loss))(jnp.outer(jnp.arange(1.0, 6), x))


def one_row(x: jax.Array) -> Any:
    return lax.scan(lambda c, row: (c, lax.pmax(c + row, "batch")), x, x[None])


@pytest.mark.integration
@pytest.mark.parametrize("step", [reverse, nested, gradient, one_row], ids=lambda f: f.__name__)
def test_unrolled_scans_equal_jax(step: Any) -> None:
    args = [(jnp.asarray([1.0, -2.0, 0.5]) * (rank + 1),) for rank in range(2)]
    program = cut(step, args[0], AXES)
    assert program.exchanges
    assert not any("loop" in dict(x.params) for x in program.exchanges)
    assert "scan" not in str(program.traced)
    out = run_program(program, [jax.tree.leaves(a) for a in args])
    got = [jax.tree.unflatten(program.traced.out_tree, leaves) for leaves in out]
    assert_close(got, over_ranks(step, AXES)(args), 1e-6, step.__name__)
    inner, whole = program.traced.jaxpr.jaxpr, program.traced.unflattened.jaxpr
    assert [str(v.aval) for v in inner.outvars] == [str(v.aval) for v in whole.outvars]


def ring(x: jax.Array, length: int) -> jax.Array:
    return lax.scan(lambda c, _: (lax.psum(c, "batch") * 0.5, None), x, None, length=length)[0]


def chosen(x: jax.Array) -> jax.Array:
    """What is sent depends on the data; if unrolled, every iteration would send it."""

    def body(c: jax.Array, _: None) -> Any:
        total = lax.psum(c, "batch")
        return lax.cond(
            total.sum() > 3, lambda v: lax.pmax(v, "batch"), lambda v: v + 1, total
        ), None

    return lax.scan(body, x, None, length=3)[0]


def many(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (ring(c, UNROLLED // 2), None), x, None, length=3)[0]


@pytest.mark.mostly_integration("too long", "never", "too many together", "conditional")
@pytest.mark.parametrize(
    ("step", "exchanges", "times"),
    [
        pytest.param(lambda x: ring(x, UNROLLED), UNROLLED, UNROLLED, id="the longest"),
        pytest.param(lambda x: ring(x, UNROLLED + 1), 1, UNROLLED + 1, id="too long"),
        pytest.param(lambda x: ring(x, 0), 1, 0, id="never"),
        pytest.param(many, 3, 3 * (UNROLLED // 2), id="too many together"),
        pytest.param(chosen, 2, 6, id="conditional"),
    ],
)
def test_what_is_unrolled_and_what_its_exchanges_bring(
    step: Any, exchanges: int, times: int
) -> None:
    x = jnp.ones(4)
    program = cut(step, (x,), AXES)
    assert len(program.exchanges) == exchanges
    assert received(program) == times * x.nbytes, (
        "an all-reduce on two ranks brings each what it has"
    )
    assert sum(s.nbytes for s in program.segments) == times * x.nbytes
    (want, *_) = over_ranks(step, AXES)([(x,), (x,)])
    np.testing.assert_allclose(run_program(program, [[x], [x]])[0][0], want, rtol=1e-6)


def test_a_scan_without_exchanges_stays_whole() -> None:
    def step(x: jax.Array) -> jax.Array:
        return lax.psum(lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0], "batch")

    program = cut(step, (jnp.ones(4),), AXES)
    assert [e.primitive.name for e in program.segments[0].jaxpr.jaxpr.eqns] == ["scan"]
