"""Exchanges of element types that MPI lacks: random keys, and 2- and 4-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcross import CutError
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, run_program, vmap_oracle

RING = [(0, 1), (1, 0)]


def gathered(k: Any, x: Any) -> Any:
    return (
        lax.all_gather(k, "x"),
        lax.all_gather(jax.random.split(k, 3), "x", tiled=True),
        lax.psum(x, "x"),
    )


def moved(k: Any, x: Any) -> Any:
    keys = jax.random.split(k, (2, 3))
    return lax.ppermute(k, "x", RING), lax.all_to_all(keys, "x", 0, 1), lax.psum(x, "x")


def drawn(k: Any, x: Any) -> Any:
    """All ranks draw with rank 0's key."""
    return lax.psum(x * jax.random.normal(lax.all_gather(k, "x")[0], x.shape), "x")


def in_loops(k: Any, x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        c = jax.random.fold_in(lax.ppermute(c, "x", RING), 7)
        return c, lax.psum(x + jax.random.uniform(c), "x")

    return lax.scan(body, k, None, length=3), lax.fori_loop(0, 70, lambda i, c: body(c, None)[0], k)


def in_cond(k: Any, x: Any) -> Any:
    return lax.cond(lax.psum(x, "x").sum() > 0, lambda: lax.ppermute(k, "x", RING), lambda: k)


def small(k: Any, x: Any) -> Any:
    del k
    four, unsigned, two = x.astype(jnp.int4), x.astype(jnp.uint4), x.astype(jnp.int2)
    sums = [lax.psum(v, "x") for v in (four, unsigned, two)]  # overflows as 4- and 2-bit sums do
    most = [lax.pmax(four, "x"), lax.pmin(unsigned, "x"), lax.psum_scatter(four.reshape(2, 2), "x")]
    return sums, most, lax.all_gather(two, "x"), lax.ppermute(four, "x", RING)


def plain(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


@pytest.mark.mostly_integration("in_cond")
@pytest.mark.parametrize("step", [gathered, moved, drawn, in_loops, in_cond, small])
def test_equals_vmap(step: Callable[..., Any]) -> None:
    axes = {"x": 2}
    args = [[jax.random.key(r), jnp.arange(4, dtype=jnp.float32) + 3 * r] for r in range(2)]
    wanted = [jax.tree.leaves(r) for r in vmap_oracle(step, axes, args)]
    got = run_program(stages.cut(trace(step, args[0], axes=axes, wire=LocalRanks())), args)
    for mine, theirs in zip(got, wanted, strict=True):
        for g, w in zip(mine, theirs, strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_array_equal(plain(g), plain(w))


def test_exchange_says_what_travels() -> None:
    program = stages.cut(
        trace(gathered, [jax.random.key(0), jnp.ones(4)], axes={"x": 2}, wire=LocalRanks())
    )
    assert [(e.op, e.dtype, e.shape) for e in program.exchanges][:2] == [
        ("all_gather", "uint32", (2,)), ("all_gather", "uint32", (3, 2)),
    ]  # fmt: skip


def test_keys_in_a_shard_map() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    body = jax.shard_map(
        lambda k, x: (lax.all_gather(k, "x", tiled=True), lax.psum(x, "x")),
        mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P()),
    )  # fmt: skip
    args = [[jax.random.split(jax.random.key(r), 1), jnp.ones(4)] for r in range(2)]
    got = run_program(stages.cut(trace(body, args[0], axes={"x": 2}, wire=LocalRanks())), args)
    for keys, _ in got:
        np.testing.assert_array_equal(plain(keys), np.concatenate([plain(k) for k, _ in args]))


def test_keys_are_not_added() -> None:
    with pytest.raises(CutError, match=r"`psum` of random keys at .*test_carried.py.*all_gather"):
        trace(lambda k: lax.psum(k, "x"), [jax.random.key(0)], axes={"x": 2}, wire=LocalRanks())
