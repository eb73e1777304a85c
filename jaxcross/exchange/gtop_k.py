"""Global top-k: a tree over ranks merges sparse gradients, keeping k elements at every hop.

In a plain top-k exchange (`top_k`), every rank receives the selected elements of all P ranks, so
the bytes it receives grow with P - 1. Here, ranks merge their lists of elements in pairs, and keep
only the k largest sums after every merge, so the bytes only grow with log2(P).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives, sparse
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.select import Selection, check_selection, select
from jaxcross.exchange.validation import check_float32, check_state


class GTopKState(NamedTuple):
    """Number of steps, and each rank's residual: one float32 vector per leaf, as long as the leaf.

    Nothing reads the step count, but the state needs a second field. NNX turns states into dicts,
    and a dict whose only key is `residual` couldn't be told apart from parameters that happen to be
    called `residual`. With a step count, the fields are the same as those of the state of `top_k`
    on a flat axis.
    """

    step: jax.Array
    residual: PyTree

    rank_local = RankLocal(unsent=("residual",), maybe_empty=("residual",))


def gtop_k(
    density: float,
    axes: collectives.Axes,
    *,
    selection: Selection = "auto",
    skip: sparse.Skip = sparse.bias_or_norm,
) -> optax.GradientTransformation:
    """Averages approximately the k largest elements of all ranks; at most k of D are nonzero.

    Each rank selects its k largest elements, as a list of k (value, index) pairs. Then there are
    log2(P) levels of merging: at each level, two ranks exchange their lists, add them, and keep the
    k largest sums. In the end, the result holds approximately the k largest elements of the mean of
    all selections.

    Updates are the same on every rank. What a rank hasn't contributed to the result is kept in its
    own residual and added to its next gradient. Deterministic.

    When two lists are merged, elements that aren't among the k largest are dropped. Each rank that
    has contributed to a dropped element keeps its own contribution in its residual, so nothing is
    lost. This holds even if a different branch of the tree has kept an element with the same index.

    Bytes received per rank: `8 k log2(P)` (whereas `top_k` takes `8 k (P-1)`), plus `2(P-1)/P n`
    for leaves of n bytes that aren't compressed because of `skip`.

    ```python
    tx = optax.chain(jaxcross.exchange.gtop_k(0.001, "batch"), optax.sgd(0.1))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # grads are this rank's own
    ```

    Args:
        density: Fraction of the elements to keep.
        axes: One axis name. Several raise an error. The number of ranks must be a power of two.
        selection: How the largest elements are found; see `jaxcross.exchange.select`.
        skip: (path, leaf) -> whether a leaf is averaged uncompressed. By default, scalars, vectors,
            and leaves of any shape whose name is `bias` or `scale`.

    Raises:
        ValueError: An argument is out of range; or, at trace time, the number of ranks is not a
            power of two, or a compressed leaf has 2^31 elements or more, or is float64.

    Warns in `init` if it compresses nothing, unless you pass your own `skip`.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Shi et al., arXiv 1901.04359. Recursive doubling makes their final broadcast
    unnecessary.
    """
    density = sparse.check_density(density)
    check_selection(selection)
    axis = collectives.one_axis(axes, "`gtop_k`")

    def init(params: optax.Params) -> GTopKState:
        sparse.warn_if_none(params, skip, "`gtop_k`")
        return GTopKState(
            step=jnp.zeros((), jnp.int32),
            residual=sparse.residuals(params, skip, lambda size: size),
        )

    def update(
        updates: optax.Updates, state: GTopKState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, GTopKState]:
        del params
        size = jax.lax.axis_size(axis)
        if not collectives.is_power_of_two(size):
            raise ValueError(
                f"`gtop_k` over axis `{axis}` of {size} ranks: its tree needs a power of two. Use "
                "`top_k`, which works on any number of ranks."
            )
        check_state(state, init, updates, "`gtop_k`")
        found, treedef = jax.tree.flatten_with_path(updates)
        chosen = sparse.compressed_leaves(found, skip)
        residual = treedef.flatten_up_to(state.residual)
        out = []
        kept = []
        for (path, x), e, c in zip(found, residual, chosen, strict=True):
            if c:
                check_float32(path, x, "the values of `gtop_k`")
            update_, rest = exchange(x, e) if c else (jax.lax.pmean(x, axis), e)
            out.append(update_)
            kept.append(rest)
        return jax.tree.unflatten(treedef, out), GTopKState(
            step=jnp.asarray(optax.safe_increment(state.step)),
            residual=jax.tree.unflatten(treedef, kept),
        )

    def exchange(x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        vector = x.reshape(-1).astype(jnp.float32) + residual
        k = sparse.slots(density, vector.size)
        size = jax.lax.axis_size(axis)
        rank = jax.lax.axis_index(axis)
        own_values, own_indices = select(vector, k, selection=selection)
        own_values = collectives.saturate(own_values, x.dtype)  # then the mean over ranks fits, too
        values = own_values
        indices = own_indices
        alive = own_indices < vector.size
        for level in range(size.bit_length() - 1):
            other = collectives.swap((values, indices), axis, 1 << level)
            lower = (rank >> level) & 1 == 0
            # Both partners must get bitwise the same result. So both put the list of the lower rank
            # first, such that they add in the same order and break ties in the same way.
            first = jax.tree.map(lambda a, b: jnp.where(lower, a, b), (values, indices), other)  # noqa: B023
            second = jax.tree.map(lambda a, b: jnp.where(lower, b, a), (values, indices), other)  # noqa: B023
            values, indices = _merge(first, second, vector.size)
            place = jnp.minimum(jnp.searchsorted(indices, own_indices), k - 1)
            alive &= indices[place] == own_indices
        rest = sparse.residual_after(vector, jnp.where(alive, own_values, 0), own_indices)
        sum_ = sparse.sum_of_pairs(values[None], indices[None], vector.size)
        return (sum_ / size).reshape(x.shape).astype(x.dtype), rest

    return exchange_once("gtop_k", axes, optax.GradientTransformation(init, update))  # type: ignore[arg-type]


def _merge(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array], size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest sums of two lists of k pairs, ordered by index, empty slots last."""
    k = first[0].size
    indices = jnp.concatenate([first[1], second[1]])
    order = jnp.argsort(indices, stable=True)
    indices = indices[order]
    values = jnp.concatenate([first[0], second[0]])[order]
    # The pairs of both lists are now sorted by index. An index occurs at most once in each list. If
    # it's in both lists, its two values are now neighbours. We add the second value to the first,
    # and turn the second one's slot into an empty slot.
    twin = jnp.append(indices[1:] == indices[:-1], False)
    values = values + jnp.where(twin, jnp.append(values[1:], 0), 0)
    second_of_pair = jnp.append(False, twin[:-1])
    indices = jnp.where(second_of_pair, size, indices)
    values = jnp.where(indices < size, values, 0)
    # If fewer than k sums are nonzero, `select` also returns zeros, such as those of empty slots.
    values, found = select(values, k, selection="exact")
    indices = indices[found]
    order = jnp.argsort(indices, stable=True)
    return values[order], indices[order]
