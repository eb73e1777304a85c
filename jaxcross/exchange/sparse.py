"""Sparse messages of a fixed size: (value, index) pairs. An empty slot has value 0, index D."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxcross._jax_compat import Tracer
from jaxcross._pytree import PyTree
from jaxcross.exchange import collectives
from jaxcross.exchange.validation import as_number

Skip = Callable[[str, Any], bool]

# Matches the end of a path in the format of `jax.tree_util.keystr`: a dict key or an attribute, in
# NNX followed by the variable's value.
_BIAS_OR_SCALE = re.compile(r"(?<!\w)(bias|scale)\b\W*((raw_)?value\W*)?$")


def bias_or_norm(path: str, leaf: jax.typing.ArrayLike) -> bool:
    """Whether a leaf is small and sensitive enough to be exchanged uncompressed.

    These are scalars, vectors, biases and the scales of norms. Biases and scales have more
    dimensions in attention (one for the heads) and under `nn.scan` (one for the layers), so they
    are recognised by the name `bias` or `scale` at the end of their path.
    """
    return jnp.ndim(leaf) <= 1 or _BIAS_OR_SCALE.search(path) is not None


def check_density(density: object, name: str = "density") -> float:
    """Returns a fraction of elements as a float.

    Raises:
        ValueError: `density` is not a number in (0, 1].
    """
    share = as_number(density)
    if not 0 < share <= 1:
        raise ValueError(
            f"`{name}` is {density!r}: it is the share of elements that are sent and must be a "
            "number in (0, 1], for example 0.01. How many are sent is part of the program: a share "
            "that changes is a `warm_up` of `top_k`. To send everything, use "
            "`jaxcross.exchange.mean`."
        )
    return share


def slots(density: float, size: int) -> int:
    """Returns how many of `size` elements are sent: the fraction, rounded, but at least one."""
    return min(size, max(1, round(density * size)))


def compressed_leaves(leaves: Sequence[tuple[Any, Any]], skip: Skip) -> list[bool]:
    """Returns for each (path, leaf) whether it is compressed.

    These are the nonempty floating-point leaves, except those for which `skip` is true.
    """
    return [
        jnp.size(leaf) > 0
        and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))
        and not skip(jax.tree_util.keystr(path), leaf)
        for path, leaf in leaves
    ]


def residuals(params: optax.Params, skip: Skip, length: Callable[[int], int]) -> PyTree:
    """Returns a tree of zeros: a float32 vector of `length(size)` for each compressed leaf."""
    found, treedef = jax.tree.flatten_with_path(params)
    vectors = [
        jnp.zeros(length(jnp.size(leaf)), jnp.float32) if chosen else optax.MaskedNode()
        for (_, leaf), chosen in zip(found, compressed_leaves(found, skip), strict=True)
    ]
    return jax.tree.unflatten(treedef, vectors)


def warn_if_none(params: optax.Params, skip: Skip, what: str) -> None:
    """Warns if `what` compresses nothing because all parameters are vectors, biases or scales.

    This happens after `optax.flatten`, for example. There's no warning while tracing, since that
    may be for shapes only, and none if `skip` is the user's own.
    """
    found = jax.tree.leaves_with_path(params)
    if (
        skip is not bias_or_norm
        or any(compressed_leaves(found, skip))
        or any(isinstance(x, Tracer) for _, x in found)
    ):
        return
    if any(compressed_leaves(found, lambda path, leaf: jnp.size(leaf) < 2)):
        warnings.warn(
            f"{what} compresses none of these parameters: vectors, biases and the scales of norms "
            "are averaged as they are unless `skip` says otherwise. To compress them, too, write "
            "`skip=lambda path, leaf: False`.",
            stacklevel=2,
        )


def rounded(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds values to their wire type, so that the rounding error stays in the residual."""
    return collectives.round_for_wire(collectives.saturate(values, dtype), dtype)


def residual_after(x: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns what is left of a vector after sending these pairs, including wire rounding."""
    return x.at[indices].add(-values.astype(x.dtype), mode="drop")


def sum_of_pairs(values: jax.Array, indices: jax.Array, size: int) -> jax.Array:
    """Returns the float32 sum of every rank's pairs, `[P, k]`.

    Adds rank after rank, so the result is bitwise identical everywhere.
    """

    def add(rank: jax.Array, sum_: jax.Array) -> jax.Array:
        # The indices of one rank are all different, so the order of these additions can't change a
        # bit, on any backend.
        return sum_.at[indices[rank]].add(values[rank].astype(jnp.float32), mode="drop")

    # Start the loop with a sum rather than with zeros, which `shard_map` with `check_vma` would
    # take for a value that is identical on every rank.
    first = add(jnp.int32(0), jnp.zeros(size, jnp.float32))
    return jax.lax.fori_loop(1, values.shape[0], add, first)
