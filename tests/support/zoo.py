"""The table of small train steps. A new row is tested in lock step, over MPI, and with every cut.

Each row is a step `(state, batch) -> (state, metrics)`, written as a JAX user would write it, over
the axis `batch` (or more). The state is identical across ranks, and the batch is rank-local. The
arithmetic of `exact` rows has sums that don't round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcross.program.flatten import UNROLLED
from tests.support.zoo_models import (
    batch_norm,
    dropout,
    dynamic_scale,
    exchange_in,
    images,
    nnx_functional,
    only_good_gradients,
    pmap_style,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step of the zoo.

    Attributes:
        name: What the row shows.
        build: Ranks -> (step, initial state). The state is identical on every rank.
        batch: (rank, step number) -> this rank's batch.
        axes: Ranks -> axis name -> size.
        rtol: Tolerance against `vmap`, which sums in a different order; 0 if all arithmetic is
            exact.
        steps: Number of steps to run, enough for counters to wrap around.
        vmap: Whether `vmap` can run the step. It can't run `axis_index_groups`.
        bits: Whether a whole cut gives the same bits as one fused executable. If there are
            exchanges in the middle of a computation, XLA contracts different multiplications and
            additions once the computation is cut.
    """

    name: str
    build: Callable[[int], tuple[Callable[..., Any], Any]]
    batch: Callable[[int, int], Any]
    axes: Callable[[int], dict[str, int]] = lambda n: {"batch": n}
    rtol: float = 2e-5
    steps: int = 2
    vmap: bool = True
    bits: bool = True


def integers(rank: int, step: int) -> Any:
    """One array of small integers. Floats made from them add without rounding."""
    return jnp.asarray(np.random.default_rng((step, rank)).integers(-8, 9, (12, 12)), jnp.int32)


def plain(
    function: Callable[..., Any], state: Callable[[], Any] = lambda: jnp.zeros((12, 12))
) -> Any:
    """A row whose step is a plain function of state, batch and number of ranks."""
    return lambda ranks: (partial(_call, function, ranks), state())


def _call(function: Callable[..., Any], ranks: int, state: Any, batch: Any) -> Any:
    return function(state, batch, ranks)


def dependent(state: Any, batch: Any, ranks: int) -> Any:
    """Dependent exchanges, as in Adasum and PowerSGD: each sum depends on the previous one."""
    g = lax.psum(batch.astype(jnp.float32), "batch")
    p = g @ jnp.ones((12, 2)) / 128
    p = lax.psum(jnp.round(p), "batch")
    q = lax.psum(batch.astype(jnp.float32).T @ p, "batch")
    return state + jnp.round(p @ q.T / 4096), {"norm": jnp.max(jnp.abs(q)), "p": p}


def two_sums_by_two_rules(state: Any, batch: Any, ranks: int) -> Any:
    """Clips after the exchange, by a maximum over ranks."""
    g = lax.psum(batch, "batch")
    limit = lax.pmax(jnp.max(jnp.abs(batch)), "batch")
    return state + jnp.clip(g, -limit, limit), (limit, lax.pmin(jnp.min(batch), "batch"))


def cond_counter(state: Any, batch: Any, ranks: int) -> Any:
    """Periodic averaging: the host can tell from a counter whether this step exchanges."""
    count, params = state
    params = params + batch
    params = lax.cond(count % 2 == 1, lambda p: lax.psum(p * 2, "batch"), lambda p: p, params)
    # Between two averages, the ranks' parameters differ. All rows must return a state that's
    # identical across ranks, so we take the maximum over the ranks at the end of each step.
    return (count + 1, lax.pmax(params, "batch")), params.sum()


def cond_data(state: Any, batch: Any, ranks: int) -> Any:
    """The predicate comes from exchanged data: equal on all ranks, but unknown to the host."""
    big = lax.pmax(batch.max(), "batch") > 7

    def yes(x: Any) -> Any:
        y = lax.psum(x * 3, "batch")
        return lax.cond(y.sum() % 2 == 0, lambda v: lax.pmax(v - 1, "batch"), lambda v: v + 5, y)

    return state + lax.pmin(lax.cond(big, yes, lambda x: lax.pmin(x, "batch"), batch), "batch"), big


def scan_exchange(state: Any, batch: Any, ranks: int, length: int = 0) -> Any:
    """A ring with one exchange per iteration, and `length` iterations, or one per rank."""
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]

    def body(carry: Any, _: Any) -> Any:
        total, x = carry
        x = lax.ppermute(x, "batch", ring)
        return (total + x, x), x[0, 0]

    (total, _), heads = lax.scan(body, (jnp.zeros_like(batch), batch), None, length=length or ranks)
    return state + total, heads.sum()


def while_exchange(state: Any, batch: Any, ranks: int) -> Any:
    """A loop that all ranks leave in the same iteration."""
    total = lax.while_loop(
        lambda c: jnp.abs(c).max() < 500, lambda c: lax.psum(jnp.abs(c) + 1, "batch"), batch
    )
    return state + lax.pmax(total, "batch"), total.sum()


def all_collectives(axis: str, n: int, state: Any, batch: Any, *, scatter: bool = True) -> Any:
    """Every collective, and several element types, over one axis of `n` ranks."""
    x = batch
    parts = {
        "psum": lax.psum(x, axis),
        "pmax": lax.pmax(x, axis),
        "pmin": lax.pmin(x, axis),
        "pmean": lax.pmean(x.astype(jnp.float32) * 12, axis),
        "all_gather": lax.all_gather(x, axis).sum(0),
        "all_gather_tiled": lax.all_gather(x, axis, axis=1, tiled=True)[:, :12],
        "all_to_all": lax.all_to_all(x[:n], axis, 0, 0)[0],
        "all_to_all_tiled": lax.all_to_all(jnp.tile(x, (n, 1)), axis, 0, 1, tiled=True)[:, :12],
        "ppermute": lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
        "index": lax.axis_index(axis) * x,
        "bool": lax.psum(x > 0, axis),
        "bfloat16": lax.psum((x % 4).astype(jnp.bfloat16), axis),
        "float16": lax.pmax(x.astype(jnp.float16), axis),
        "int8": lax.pmin(x.astype(jnp.int8), axis),
        "one": jnp.int32(lax.psum(1, axis)),
    }
    if scatter:  # JAX's own is wrong under two `vmap`s, where it scatters another dimension
        parts["psum_scatter"] = jnp.broadcast_to(lax.psum_scatter(x[:n], axis), (12, 12))
        parts["psum_scatter_tiled"] = lax.psum_scatter(
            jnp.tile(x, (1, n)), axis, scatter_dimension=1, tiled=True
        )
    total = sum(v.astype(jnp.float32).sum() for v in parts.values())
    return state + lax.psum(total, axis) + lax.psum(x, axis), parts


def two_axes(ranks: int) -> dict[str, int]:
    return {"row": 2, "col": ranks // 2} if ranks % 2 == 0 else {"row": 1, "col": ranks}


def over_two_axes(state: Any, batch: Any, ranks: int) -> Any:
    """One axis after the other, and both at once in either order."""
    g = lax.psum(lax.pmax(batch, "col"), "row")
    both = lax.pmin(batch + lax.axis_index("row") * 3, ("row", "col")), lax.psum(g, ("col", "row"))
    state, parts = all_collectives(
        "col", two_axes(ranks)["col"], state + sum(both), batch, scatter=False
    )
    return lax.pmax(state, "row"), parts


def literal_and_passed_through(state: Any, batch: Any, ranks: int) -> Any:
    """Results that no equation computes, and the same result twice."""
    total = lax.psum(batch, "batch")
    return state, (total, total, 3.0, state, jnp.int32(4))


def unused_exchange(state: Any, batch: Any, ranks: int) -> Any:
    lax.psum(batch * 2, "batch")
    return state + lax.psum(batch, "batch"), ()


def local_axis_too(state: Any, batch: Any, ranks: int) -> Any:
    """The step's own `vmap` axis is summed together with ours."""
    rows = jax.vmap(lambda x: lax.psum(x, ("batch", "local")), axis_name="local")(batch)
    cols = jax.vmap(lambda x: lax.psum(x, ("batch", "local")), axis_name="local")(batch.T)
    return state + rows + cols, ()


def tensor_parallel(state: Any, batch: Any, ranks: int) -> Any:
    """A gradient through `psum` and `all_gather`, whose transposes exchange as well."""
    x = batch.astype(jnp.float32)

    def loss(w: Any) -> Any:
        h = lax.psum(x @ w, "batch")
        return jnp.sum(lax.all_gather(h, "batch").sum(0) * x)

    return state + lax.psum(jax.grad(loss)(state), "batch"), ()


def custom_derivatives(state: Any, batch: Any, ranks: int) -> Any:
    """Exchanges only in a backward pass (`custom_vjp`), in a `custom_jvp`, and under remat."""

    @jax.custom_vjp
    def copied(x: Any) -> Any:
        return x

    copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "batch"),))

    @jax.custom_jvp
    def summed(x: Any) -> Any:
        return lax.psum(x, "batch")

    summed.defjvp(lambda p, t: (summed(p[0]), lax.psum(t[0], "batch") * 2))
    x = batch.astype(jnp.float32)
    inner = jax.jit(jax.checkpoint(lambda w: jnp.sum(summed(copied(w) * x))))
    return state + lax.pmax(jax.grad(inner)(state), "batch"), inner(state + 1)


def solver(state: Any, batch: Any, ranks: int) -> Any:
    """A rank's index is used inside an equation that is solved."""
    solved = lax.custom_linear_solve(
        lambda x: x * 2.0 ** lax.axis_index("batch"),
        batch * 1.0,
        lambda _, b: b / 2.0 ** lax.axis_index("batch"),
    )
    return state + lax.psum(solved, "batch"), ()


def grouped(state: Any, batch: Any, ranks: int) -> Any:
    """`axis_index_groups`, and a permutation that omits a rank. `vmap` can run neither."""
    half = max(ranks // 2, 1)
    groups = [[*range(half)], [*range(half, ranks)]] if ranks % 2 == 0 else [[*range(ranks)]]
    open_ring = lax.ppermute(batch, "batch", [(i, i + 1) for i in range(ranks - 1)])
    return state + lax.pmax(lax.psum(batch, "batch", axis_index_groups=groups), "batch"), open_ring


def _counted() -> Any:
    return jnp.int32(0), jnp.zeros((12, 12), jnp.int32)


def _int_state() -> Any:
    return jnp.zeros((12, 12), jnp.int32)


def _exact(
    name: str, function: Callable[..., Any], state: Callable[[], Any] = _int_state, **options: Any
) -> Row:
    return Row(name=name, build=plain(function, state), batch=integers, rtol=0, **options)


ZOO: tuple[Row, ...] = (
    Row(name="linen pmap-style", build=pmap_style(), batch=images),
    Row(name="already jitted", build=pmap_style(jit=True), batch=images),
    Row(name="nn.remat", build=pmap_style(remat=True), batch=images),
    Row(
        name="adamw, clipped after the exchange",
        batch=images,
        build=pmap_style(lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
    ),
    Row(name="batch norm, local", build=batch_norm(), batch=images),
    Row(name="batch norm, averaged", build=batch_norm(averaged=True), batch=images),
    Row(
        name="batch norm, synchronised",
        build=batch_norm(axis_name="batch"),
        batch=images,
        bits=False,
    ),
    Row(name="dropout", build=dropout, batch=images),
    Row(name="dynamic scale fp16", build=dynamic_scale, batch=images, rtol=2e-3, steps=3),
    Row(
        name="MultiSteps",
        build=exchange_in(partial(optax.MultiSteps, every_k_schedule=2)),
        batch=images,
        steps=4,
    ),
    Row(name="apply_if_finite", build=exchange_in(only_good_gradients), batch=images),
    Row(
        name="schedule, injected",
        batch=images,
        build=pmap_style(
            lambda: optax.inject_hyperparams(optax.sgd)(
                learning_rate=optax.cosine_decay_schedule(0.1, 10)
            )
        ),
    ),
    Row(name="nnx functional", build=nnx_functional, batch=images),
    _exact("dependent exchanges", dependent, lambda: jnp.zeros((12, 12))),
    _exact("clip by a norm over ranks", two_sums_by_two_rules),
    _exact("cond by a counter", cond_counter, _counted, steps=4),
    _exact("cond by data", cond_data, steps=3),
    _exact("scan", scan_exchange),
    _exact("scan, kept whole", partial(scan_exchange, length=UNROLLED + 1)),
    _exact("while", while_exchange),
    _exact(
        "all collectives",
        lambda state, batch, n: all_collectives("batch", n, state, batch),
        lambda: jnp.zeros((12, 12)),
    ),
    _exact("two axes", over_two_axes, lambda: jnp.zeros((12, 12)), axes=two_axes),
    _exact("literal and passed-through results", literal_and_passed_through),
    _exact("unused exchange", unused_exchange),
    _exact("vmap inside", local_axis_too),
    _exact("gradient through collectives", tensor_parallel, lambda: jnp.zeros((12, 12)), steps=1),
    _exact("custom derivatives", custom_derivatives, lambda: jnp.ones((12, 12))),
    _exact("an index inside a solver", solver, lambda: jnp.zeros((12, 12))),
    _exact("groups, and a partial permutation", grouped, vmap=False),
)


def ranks_of(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


def assert_close(got: Any, expected: Any, rtol: float, what: str) -> None:
    """Checks structure, types and values.

    Values match within `rtol` of the leaf's largest element, or within 1e-6 if that's more. With
    `rtol` 0, they're equal.
    """
    tree = jax.tree.structure(got)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert tree == expected_tree, what
    for (path, a), b in zip(jax.tree.leaves_with_path(got), expected_leaves, strict=True):
        where = f"{what}: {jax.tree_util.keystr(path)}"
        if jnp.issubdtype(jnp.asarray(a).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, (
            f"{where}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        )
        if rtol == 0 or a.dtype.kind not in "f":
            np.testing.assert_array_equal(a, b, err_msg=where)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            scale = float(np.max(np.abs(b), initial=0.0))
            np.testing.assert_allclose(a, b, rtol=rtol, atol=max(rtol * scale, 1e-6), err_msg=where)
