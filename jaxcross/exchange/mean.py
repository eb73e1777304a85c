"""The mean of the gradients over ranks: synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxcross.exchange import collectives
from jaxcross.exchange.arithmetic import as_weight, divided, is_float, weighed
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.layouts import ravel_floats

Pattern = Literal["auto", "hierarchical", "ring", "tree"]


def mean(
    axes: collectives.Axes,
    wire_dtype: DTypeLike | None = None,
    *,
    pattern: Pattern = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Replaces each update by its mean over the ranks of `axes`, identical on every rank.

    Stateless. Use it wherever the step would otherwise call `lax.pmean(grads, axes)`:

    ```python
    tx = optax.chain(jaxcross.exchange.mean("batch", wire_dtype=jnp.bfloat16), optax.sgd(0.1))
    ```

    If ranks differ in their number of tokens or examples, have each of them pass its own number as
    the `weight` argument of `update`. If g_r is the gradient of rank r, itself a mean over w_r
    tokens, the result is sum(w_r g_r) / sum(w_r), i.e. the mean over all tokens:

    ```python
    updates, state = tx.update(grads, state, params, weight=mask.sum())
    ```

    The weight is a single non-negative real number. A rank with weight 0 contributes nothing, even
    if its gradient is NaN. If all weights are 0, so is the mean. Ranks send the products w_r g_r,
    in the type of the update or in `wire_dtype`, plus 4 bytes for the weight. These products can
    overflow in float16, where a gradient of 16 times 4096 tokens is already infinite. In that case,
    use fractions like `mask.mean()` over batches of equal length.

    There are several patterns for computing the sum. For n bytes of updates, each of P ranks
    receives:

    - `"auto"`: one all-reduce per update, using MPI's own algorithm: 2(P-1)/P n.
    - `"hierarchical"`: a reduce-scatter over the inner axis of L ranks, an all-reduce of one block
      over the outer axis of N ranks, and an all-gather over the inner axis: 2(L-1)/L n within a
      node, and 2(N-1)/N n/L between nodes. This needs two axes, the outer one first, for example
      `("node", "local")`.
    - `"ring"`: 2(P-1) hops, 2(P-1)/P n.
    - `"tree"`: recursive doubling in log2(P) hops of n bytes each, plus two more hops if P isn't a
      power of two. Use this for small messages.

    By default, each update gets its own all-reduce. The other patterns first pack the updates into
    one vector per element type, padded to a multiple of the number of ranks, and copy the result
    back afterwards. Integer updates are always averaged with the default pattern, and their mean is
    a float.

    Args:
        axes: One axis name, or a tuple of names that act as a single axis.
        wire_dtype: Element type on the wire for wider floats; `jnp.bfloat16` halves float32's
            bytes. Each rank rounds once before sending, the sum is computed in float32 and rounded
            once, and the division is done in the update's own type. `"hierarchical"` rounds twice
            along the way (before sending, and the node's sum); ring and tree round once per hop.
            Note that we send the sum and not the mean. With `jnp.float16`, the mean is therefore
            infinite on every rank as soon as the sum exceeds 65504, even if the mean itself would
            fit. Dividing first would instead silently round small gradients to zero. `jnp.bfloat16`
            has the same range as float32.
        pattern: How the sum is computed; see above.

    Raises:
        ValueError: `wire_dtype` is not a floating-point type; `pattern` is unknown or doesn't match
            the axes; or the `weight` passed to `update` is not one real number.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Langer et al., arXiv 2007.03970, for synchronous data parallelism; Thakur et al.,
    Optimization of collective communication operations in MPICH, 2005, for the ring and for
    recursive doubling.
    """
    if wire_dtype is not None and not jnp.issubdtype(wire_dtype, jnp.floating):
        raise ValueError(
            "`wire_dtype` of `mean` must be a floating-point type, for example `jnp.bfloat16`, got "
            f"{jnp.dtype(wire_dtype).name}."
        )
    if pattern not in get_args(Pattern):
        raise ValueError(
            f"`pattern` of `mean` must be one of {', '.join(map(repr, get_args(Pattern)))}, got "
            f"{pattern!r}."
        )
    names = collectives.axis_names(axes)
    if pattern == "hierarchical" and len(names) != 2:
        raise ValueError(
            '`pattern="hierarchical"` of `mean` needs two axes, the outer one first, got '
            f'`axes={axes!r}`. Write for example `axes=("node", "local")`, and give the step both '
            "axes."
        )
    if pattern in ("ring", "tree"):
        collectives.one_axis(axes, f'`mean(pattern="{pattern}")`')

    def average(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        weight: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra
        if weight is None:
            ranks = jax.lax.psum(1, names)
            return _mean(updates, lambda total: total / ranks), state
        mine = as_weight(weight, "`mean`")
        all_weights = jax.lax.psum(mine, names)
        products = weighed(updates, mine, "`mean`")
        terms = jax.tree.map(
            lambda p, u: p.astype(jnp.result_type(u)) if is_float(u) else p, products, updates
        )
        return _mean(terms, lambda total: divided(total, all_weights)), state

    def _mean(updates: optax.Updates, divide: Callable[[jax.Array], jax.Array]) -> optax.Updates:
        if pattern == "auto":
            return jax.tree.map(lambda x: divide(_sum(x)), updates)
        vectors, back = ravel_floats(updates, multiple=jax.lax.psum(1, names))
        out = back([divide(_sum_of_vector(x)) for x in vectors])
        return jax.tree.map(lambda x: x if is_float(x) else divide(_sum(x)), out)

    def _sum(x: jax.Array) -> jax.Array:
        if wire_dtype is None or not _narrows(jnp.asarray(x).dtype, wire_dtype):
            return jax.lax.psum(x, names)
        return jax.lax.psum(x.astype(wire_dtype), names).astype(x.dtype)

    def _sum_of_vector(x: jax.Array) -> jax.Array:
        wire = x.dtype if wire_dtype is None or not _narrows(x.dtype, wire_dtype) else wire_dtype
        # Sum in float32 or wider: 16-bit types are only meant for the wire.
        return _SUMS[pattern](
            x.astype(jnp.promote_types(x.dtype, jnp.float32)), names, wire
        ).astype(x.dtype)

    stateless = optax.GradientTransformationExtraArgs(optax.init_empty_state, average)  # pyright: ignore[reportArgumentType]
    return exchange_once("mean", names, stateless, weighs=True)


def _hierarchical(x: jax.Array, names: tuple[Hashable, ...], wire: DTypeLike) -> jax.Array:
    outer, inner = names
    block = collectives.sum_scatter(x, inner, wire_dtype=wire)
    return (
        collectives.gather(jax.lax.psum(collectives.round_for_wire(block, wire), outer), inner)
        .reshape(-1)
        .astype(x.dtype)
    )


def _ring(x: jax.Array, names: tuple[Hashable, ...], wire: DTypeLike) -> jax.Array:
    return collectives.ring_sum(x, collectives.one_axis(names, "a ring"), wire_dtype=wire)


def _tree(x: jax.Array, names: tuple[Hashable, ...], wire: DTypeLike) -> jax.Array:
    # In each hop, two ranks add up their values and must arrive at the same sum. The partner's
    # value arrives rounded to the wire type, so a rank has to round its own value in the same way
    # before adding.
    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        return collectives.round_for_wire(a.astype(x.dtype) + b.astype(x.dtype), wire)

    return collectives.doubling(
        collectives.round_for_wire(x, wire), collectives.one_axis(names, "a tree"), add
    ).astype(x.dtype)


_SUMS = {"hierarchical": _hierarchical, "ring": _ring, "tree": _tree}


def _narrows(dtype: DTypeLike, wire_dtype: DTypeLike) -> bool:
    return (
        bool(jnp.issubdtype(dtype, jnp.floating))
        and jnp.finfo(dtype).bits > jnp.finfo(wire_dtype).bits
    )
