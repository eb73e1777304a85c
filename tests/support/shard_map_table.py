"""The table of steps that are a `jax.shard_map` of global arguments.

Every test compares a row's results with those of JAX on real devices. All rows are written for a
mesh of four devices, two along the axis `data` and two along the axis `tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

AXES = {"data": 2, "tensor": 2}
W1, W2, X = P(None, "tensor"), P("tensor", None), P("data")
CLOSED_OVER = np.linspace(-1, 1, 4, dtype=np.float32)


@dataclass(frozen=True)
class Row:
    """A function of one rank's shards, and how the global arrays are sharded."""

    body: Callable[..., Any]
    in_specs: tuple[Any, ...]
    out_specs: Any
    args: tuple[Any, ...]
    checks: tuple[bool, ...] = (True, False)  # values of check_vma


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def mlp(params: Any, x: jax.Array) -> jax.Array:
    w1, w2, b = params
    return lax.psum(jnp.tanh(x @ w1) @ w2, "tensor") + b + jnp.asarray(CLOSED_OVER)


def loss(params: Any, x: jax.Array) -> jax.Array:
    return lax.pmean(jnp.mean(mlp(params, x) ** 2), "data")


PARAMS, PARAM_SPECS = (array(4, 6), array(6, 4), array(4)), (W1, W2, P())


def inserted(params: Any, x: jax.Array) -> Any:
    """JAX inserts the gradients' exchanges: over `data` for all, over both axes for the bias."""
    value, grads = jax.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def written(params: Any, x: jax.Array) -> Any:
    """The user writes the exchanges."""
    w1, w2, _ = params
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p[0]) @ p[1]))((w1, w2))
    return lax.pmean(grads, "data")


def remat(params: Any, x: jax.Array) -> Any:
    return jax.grad(lambda p: jax.checkpoint(loss)(p, x))(params)


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(carry: jax.Array, _: None) -> Any:
        whole = jnp.tanh(lax.psum(carry @ w, "tensor"))
        return lax.pcast(whole @ jnp.ones((4, 2)), "tensor", to="varying"), None

    return lax.psum(lax.scan(body, x, None, length=3)[0], "tensor")


def local_loop(w: jax.Array, x: jax.Array) -> jax.Array:
    """A loop, a branch and a `jit` without exchanges, over values whose types refer to the mesh."""
    y, _ = lax.scan(lambda c, row: (c + jnp.sum(row), None), jnp.sum(x) * 0, x)
    y = lax.cond(jnp.sum(x) > 0, lambda v: v + 1, lambda v: v - 1, y)
    y = jax.jit(lambda v: jnp.where(v > 0, v, jnp.exp(v)))(y)
    return lax.psum(y * jnp.sum(w), ("data", "tensor"))


def fully_sharded(w: jax.Array, x: jax.Array) -> Any:
    """Parameters are sharded over `data`: gathered in the forward pass, and the transpose scatters
    their gradient.
    """

    def objective(w: jax.Array) -> jax.Array:
        whole = lax.all_gather(w, "data", tiled=True)
        return lax.pmean(jnp.mean((x @ whole) ** 2), "data")

    return jax.grad(objective)(w)


def moved(x: jax.Array) -> Any:
    ring = lax.ppermute(x, "data", [(0, 1), (1, 0)])
    return (
        ring,
        lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True),
        lax.all_to_all(x, "tensor", 1, 0, tiled=True),
    )


def placed(x: jax.Array) -> jax.Array:
    return x + 10 * lax.axis_index("data") + lax.axis_index("tensor")


def random(key: jax.Array, x: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key), lax.axis_index("data"))
    return lax.pmean(jnp.sum(x * jax.random.bernoulli(key, 0.5, x.shape)), "data")


def extremes(x: jax.Array) -> Any:
    return lax.pmax(jnp.max(x), ("data", "tensor")), lax.pmin(jnp.min(x), ("data", "tensor"))


ROWS: dict[str, Row] = {
    "inserted": Row(inserted, (PARAM_SPECS, X), (P(), PARAM_SPECS), (PARAMS, array(8, 4)), (True,)),
    "written": Row(written, (PARAM_SPECS, X), (W1, W2), (PARAMS, array(8, 4))),
    "remat": Row(remat, (PARAM_SPECS, X), PARAM_SPECS, (PARAMS, array(8, 4)), (True,)),
    "looped": Row(
        looped, (P("tensor"), P("data", "tensor")), P("data"), (array(4, 4), array(6, 4)), (True,)
    ),
    "local loop": Row(local_loop, (W1, P("data", "tensor")), P(), (array(4, 4), array(6, 4))),
    "fully sharded": Row(fully_sharded, (P("data"), X), P("data"), (array(4, 3), array(8, 4))),
    "moved": Row(
        moved, (P("data"),), (P("data"), P("data", "tensor"), P(("data", "tensor"))), (array(4, 4),)
    ),
    "placed": Row(placed, (P("data", "tensor"),), P("data", "tensor"), (array(4, 4),)),
    "both axes": Row(placed, (P(("data", "tensor")),), P(("data", "tensor")), (array(4, 2),)),
    "random": Row(random, (P(), X), P(), (np.array([0, 7], np.uint32), array(8, 4))),
    "extremes": Row(extremes, (P("data", "tensor"),), P(), (array(4, 4),)),
}


def part(x: Any, spec: Any, rank: int, axes: Mapping[str, int] = AXES) -> Any:
    """The shard of a global array that `rank` holds."""
    where = dict(zip(axes, np.unravel_index(rank, tuple(axes.values())), strict=True))
    for dim, named in enumerate(spec):
        for axis in () if named is None else named if isinstance(named, tuple) else (named,):
            x = np.split(x, axes[axis], axis=dim)[where[axis]]
    return x


def parts(tree: Any, specs: Any, rank: int) -> Any:
    """`part` of every leaf. A spec applies to all leaves below it."""
    return jax.tree.map(
        lambda s, t: jax.tree.map(lambda x: part(x, s, rank), t),
        specs,
        tree,
        is_leaf=lambda s: isinstance(s, P),
    )


def cases(names: Iterable[str] = ROWS) -> list[tuple[str, Row, bool]]:
    return [
        (f"{name}, check_vma={check}", ROWS[name], check)
        for name in names
        for check in ROWS[name].checks
    ]


def mapped(row: Row, check: bool, mesh: Any) -> Callable[..., Any]:
    return jax.shard_map(
        row.body, mesh=mesh, in_specs=row.in_specs, out_specs=row.out_specs, check_vma=check
    )


def wanted(row: Row, check: bool) -> Any:
    """The global results of four XLA devices in this process."""
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    devices = jax.make_mesh(
        tuple(AXES.values()), tuple(AXES), axis_types=kinds, devices=jax.devices()[:4]
    )
    return jax.tree.map(np.asarray, jax.jit(mapped(row, check, devices))(*row.args))


def assert_part(got: Any, want: Any, row: Row, rank: int, what: str) -> None:
    """Checks that a rank's results are its shards of the global results."""
    mine = parts(want, row.out_specs, rank)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(mine), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{what}, rank {rank}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        )
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6, err_msg=f"{what}, rank {rank}")
