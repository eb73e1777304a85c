"""Random train steps for the cutter's fuzzer.

A recipe is plain data, so Hypothesis can shrink it. `build` turns it into a function.
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
from hypothesis import strategies as st
from jax import lax

# Few shapes, because XLA compiles each primitive once per shape.
SHAPES = ((), (5,), (4, 6))
DTYPES = ("float32", "float32", "int32", "bfloat16", "bool")
AXES = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2})
CAPTURED = {s: np.arange(1, math.prod(s) + 1, dtype=np.float32).reshape(s) / 7 for s in SHAPES}

UNARY = (
    "tanh",
    "neg",
    "abs",
    "scale",
    "capture",
    "sum",
    "sort",
    "cast",
    "literal",
    "reshape",
    "matmul",
    "index",
)
BINARY = ("add", "mul", "sub", "where", "maximum", "concatenate")
EXCHANGES = (
    "psum",
    "psum",
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_tiled",
    "psum_scatter",
    "scatter_tiled",
    "all_to_all",
    "all_to_all_tiled",
    "ppermute",
    "psum_tree",
    "psum_tree",
    "psum_tree",
    "vmapped_psum",
)
NESTED = (
    "cond_counter",
    "cond_data",
    "cond_literal",
    "scan",
    "jit",
    "remat",
    "custom_jvp",
    "custom_vjp",
    "grad",
    "while",
)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: its kind, operands (numbers of earlier values, modulo their count), axes and
    nested bodies.
    """

    kind: str
    x: int = 0
    y: int = 0
    axes: int = 0
    flag: int = 0
    bodies: tuple[tuple[Op, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """A step: its input types, its operations, and the values it returns."""

    axes: int
    inputs: tuple[tuple[int, int], ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    counter: int

    @property
    def sizes(self) -> dict[str, int]:
        return dict(AXES[self.axes])


def _ops(depth: int) -> st.SearchStrategy[tuple[Op, ...]]:
    small = st.integers(0, 11)
    plain = st.builds(
        Op,
        st.one_of(*map(st.sampled_from, (EXCHANGES, UNARY, BINARY, EXCHANGES))),
        small,
        small,
        st.integers(0, 3),
        st.integers(0, 3),
    )
    if depth == 0:
        return st.lists(plain, min_size=1, max_size=4).map(tuple)
    body = _ops(depth - 1)
    nested = st.builds(
        Op,
        st.sampled_from(NESTED),
        small,
        small,
        st.integers(0, 3),
        st.integers(0, 3),
        st.tuples(body, body),
    )
    top = depth == 2
    item = st.one_of(plain, plain, plain, nested)
    return st.lists(item, min_size=4 if top else 1, max_size=8 if top else 4).map(tuple)


RECIPES = st.builds(
    Recipe,
    st.integers(0, len(AXES) - 1),
    st.lists(
        st.tuples(st.integers(0, len(SHAPES) - 1), st.integers(0, len(DTYPES) - 1)),
        min_size=1,
        max_size=4,
    ).map(tuple),
    _ops(2),
    st.lists(st.integers(0, 15), min_size=2, max_size=6).map(tuple),
    st.integers(0, 3),
)


def arguments(recipe: Recipe, rank: int) -> list[Any]:
    """A rank's arguments: a counter that is identical across ranks, then arrays that differ."""
    rng = np.random.default_rng((recipe.counter, rank))
    arrays = [
        jnp.asarray(
            rng.integers(-4, 5, SHAPES[s]) / (1 if DTYPES[d] in ("int32", "bool") else 8)
        ).astype(DTYPES[d])
        for s, d in recipe.inputs
    ]
    return [jnp.int32(recipe.counter), *arrays]


def build(recipe: Recipe) -> Callable[..., Any]:
    """Turns the recipe into a function of a counter and arrays."""
    sizes = recipe.sizes

    def random_step(counter: Any, *arrays: Any) -> Any:
        values = _run(recipe.ops, [*arrays], counter, sizes)
        special = (
            counter,
            2.5,
            jnp.float32(1),
        )  # passed through, or results that no equation computes
        return [
            special[o - 13] if o >= 13 else values[-1 - o % len(values)] for o in recipe.outputs
        ]

    return random_step


def _run(ops: tuple[Op, ...], values: list[Any], counter: Any, sizes: dict[str, int]) -> list[Any]:
    for op in ops:
        x, y = values[op.x % len(values)], values[op.y % len(values)]
        if op.kind in NESTED:
            values.append(_nested(op, x, counter, sizes))
        elif op.kind in EXCHANGES:
            values.append(_exchange(op, x, y, sizes))
        else:
            values.append(_compute(op, x, y, sizes))
    return values


def _compute(op: Op, x: Any, y: Any, sizes: dict[str, int]) -> Any:
    f = x.astype(jnp.float32)
    match op.kind:
        case "tanh":
            return jnp.tanh(f)
        case "neg":
            return -f
        case "abs":
            return jnp.abs(f)
        case "scale":
            return f * (0.5, 3.0, 1.25, -0.75)[op.flag]
        case "capture":
            return f + CAPTURED[x.shape]
        case "sum":
            return jnp.sum(f)
        case "sort":
            return jnp.sort(f, axis=-1) if f.ndim else f
        case "cast":
            return x.astype(DTYPES[op.flag + 1])
        case "literal":
            return jnp.full((5,), 1.5) if op.flag else jnp.float32(3)
        case "reshape":
            return _fit(x, SHAPES[op.flag % 3])
        case "matmul":
            return jnp.tanh(f @ f.T @ f) if f.ndim == 2 else f * f
        case "index":
            return f + lax.axis_index(list(sizes)[op.axes % len(sizes)])
    g = _fit(y, x.shape).astype(jnp.float32)
    match op.kind:
        case "add":
            return f + g
        case "mul":
            return jnp.tanh(f * g)
        case "sub":
            return f - g
        case "where":
            return jnp.where(g > 0, f, g)
        case "maximum":
            return jnp.maximum(f, g)
        case "concatenate":
            return jnp.concatenate([f.reshape(-1), g.reshape(-1)])[: f.size].reshape(f.shape)
    raise AssertionError(op.kind)


def _exchange(op: Op, x: Any, y: Any, sizes: dict[str, int]) -> Any:
    names = list(sizes)
    axes: Any = (*names,) if op.axes == 3 else names[op.axes % len(names)]
    n = math.prod(sizes.values()) if op.axes == 3 else sizes[axes]
    blocks = jnp.stack([x.astype(x.dtype if x.dtype != bool else jnp.int32)] * n)
    match op.kind:
        case "psum":
            return lax.psum(x, axes)
        case "pmean":
            return lax.pmean(x.astype(jnp.float32), axes)
        case "pmax":
            return lax.pmax(lax.stop_gradient(x), axes)  # JAX can't differentiate pmax
        case "pmin":
            return lax.pmin(lax.stop_gradient(x), axes)
        case "all_gather":
            return lax.all_gather(x, axes)[n - 1]
        case "all_gather_tiled":
            return _fit(lax.all_gather(blocks, axes, axis=0, tiled=True), x.shape)
        case "psum_scatter":
            return lax.psum_scatter(blocks, axes)
        case "scatter_tiled":
            return lax.psum_scatter(blocks, axes, tiled=True)[0]
        case "all_to_all":
            return lax.all_to_all(blocks, axes, 0, 0)[op.flag % n]
        case "all_to_all_tiled":
            return lax.all_to_all(blocks, axes, 0, 0, tiled=True)[0]
        case "ppermute":
            name = names[op.axes % len(names)]
            m = sizes[name]
            ring = [(i, (i + 1) % m) for i in range(m)]
            return lax.ppermute(x, name, ring if op.flag else ring[:-1])
        case "psum_tree":  # one primitive call per array, but one bucket
            a, b, c = lax.psum(
                (x.astype(jnp.float32), y.astype(jnp.float32), 2 * x.astype(jnp.float32)), axes
            )
            return a + _fit(b, a.shape) * c
        case "vmapped_psum":  # a `psum` that also sums over an array dimension
            over = (*names, "local") if op.axes == 3 else (axes, "local")
            return jax.vmap(lambda v: lax.psum(v, over), axis_name="local")(
                jnp.stack([x.astype(jnp.float32)] * 2)
            )[0]
    raise AssertionError(op.kind)


def _nested(op: Op, x: Any, counter: Any, sizes: dict[str, int]) -> Any:
    f = x.astype(jnp.float32)

    def body(which: int, v: Any, n: Any = counter) -> Any:
        return jnp.tanh(
            _fit(_run(op.bodies[which], [v, x], n, sizes)[-1], v.shape).astype(jnp.float32)
        )

    match op.kind:
        case "cond_counter":
            return lax.cond(counter % 2 == op.flag % 2, partial(body, 0), partial(body, 1), f)
        case "cond_data":  # identical across ranks, but unknown to the host
            agreed = lax.pmax(lax.stop_gradient(jnp.max(f, initial=-1.0)), (*sizes,)) > 0.25
            return lax.cond(
                agreed, partial(body, 0), (lambda v: v) if op.flag else partial(body, 1), f
            )
        case "cond_literal":
            return lax.cond(bool(op.flag % 2), partial(body, 0), partial(body, 1), f)
        case "scan":
            last, ys = lax.scan(lambda c, i: (body(0, c), c * i), f, jnp.arange(2.0))
            return last + jnp.sum(ys)
        case "while":
            return lax.fori_loop(0, 2, lambda _, c: body(0, c), f)
        case "jit":
            return jax.jit(partial(body, 0))(f)
        case "remat":
            return jax.checkpoint(partial(body, 0))(f)
        case "grad":
            return jax.grad(
                lambda v: jnp.sum(jax.checkpoint(partial(body, 0))(v) if op.flag else body(0, v))
            )(f)
        case "custom_jvp":
            function = jax.custom_jvp(partial(body, 0))
            function.defjvp(lambda p, t: (body(0, p[0]), t[0]))
            return function(f)
        case "custom_vjp":
            function = jax.custom_vjp(partial(body, 0))
            function.defvjp(lambda v: (body(0, v), v), lambda r, g: (g * r,))
            return function(f)
    raise AssertionError(op.kind)


def _fit(x: Any, shape: tuple[int, ...]) -> Any:
    """Repeats or cuts `x` to fill another shape."""
    size = math.prod(shape)
    flat = jnp.ravel(x)
    return jnp.tile(flat, -(-size // flat.size))[:size].reshape(shape)
