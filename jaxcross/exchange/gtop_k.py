"""Global top-k: a tree over ranks merges sparse gradients, keeping k elements at every hop.

With plain top-k (`top_k`), every rank receives the elements selected by all P ranks, so its traffic
grows with P - 1. Here, ranks merge their selections in pairs and keep only the k largest sums after
each merge, so the traffic only grows with log2(P).
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
    """Step count, and this rank's residual: one float32 vector per leaf, as long as the leaf.

    Nothing reads the step count; it's there because the state needs a second field. NNX turns
    states into dicts, and a dict whose only key is `residual` would be indistinguishable from
    parameters that happen to be called `residual`. With a step count, the fields match those of
    `top_k` on a flat axis.
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
    """Averages roughly the k largest elements across all ranks; at most k of D are nonzero.

    Each rank selects its k largest elements as a list of (value, index) pairs. The lists are then
    merged in log2(P) levels: at each level, pairs of ranks exchange their lists, add them up, and
    keep the k largest sums. The end result is approximately the k largest elements of the mean of
    all selections.

    Updates are the same on every rank. Whatever a rank hasn't contributed to the result stays in
    its own residual and is added to its next gradient. Deterministic.

    Each merge drops all elements beyond the k largest. Every rank that has contributed to a dropped
    element keeps its contribution in its residual, so nothing is lost. This holds even if another
    branch of the tree has kept an element with the same index.

    Bytes received per rank: `8 k log2(P)` (compared to `8 k (P-1)` for `top_k`), plus `2(P-1)/P n`
    for n bytes of leaves that `skip` exempts from compression.

    ```python
    tx = optax.chain(jaxcross.exchange.gtop_k(0.001, "batch"), optax.sgd(0.1))
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)  # grads are this rank's own
    ```

    Args:
        density: Fraction of the elements to keep.
        axes: One axis name. Several raise an error. The number of ranks must be a power of two.
        selection: How to find the largest elements; see `jaxcross.exchange.select`.
        skip: (path, leaf) -> whether a leaf is averaged uncompressed. Defaults to scalars, vectors,
            and leaves of any shape that are named `bias` or `scale`.

    Raises:
        ValueError: An argument is out of range; or, at trace time, the number of ranks is not a
            power of two, or a compressed leaf has 2^31 elements or more, or is float64.

    `init` warns if nothing would be compressed, unless you pass your own `skip`.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Shi et al., arXiv 1901.04359. Thanks to recursive doubling, we don't need their final
    broadcast.
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
                f"`gtop_k` exchanges along a tree, which needs a power of two of ranks, but axis "
                f"`{axis}` has {size}. Use `top_k`, which works on any number of ranks."
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
        own_values = collectives.saturate(own_values, x.dtype)  # so the mean over ranks fits, too
        values = own_values
        indices = own_indices
        alive = own_indices < vector.size
        for level in range(size.bit_length() - 1):
            other = collectives.swap((values, indices), axis, 1 << level)
            lower = (rank >> level) & 1 == 0
            # Both partners must get bitwise the same result, so both put the lower rank's list
            # first. That way, they add in the same order and break ties alike.
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
    """Returns the k largest sums of two lists of k pairs, sorted by index, empty slots last."""
    k = first[0].size
    indices = jnp.concatenate([first[1], second[1]])
    order = jnp.argsort(indices, stable=True)
    indices = indices[order]
    values = jnp.concatenate([first[0], second[0]])[order]
    # The pairs of both lists are now sorted by index. No index occurs twice in the same list, so if
    # both lists contain an index, its two values are adjacent. We add the second value to the
    # first, and turn the second slot into an empty slot.
    twin = jnp.append(indices[1:] == indices[:-1], False)
    values = values + jnp.where(twin, jnp.append(values[1:], 0), 0)
    second_of_pair = jnp.append(False, twin[:-1])
    indices = jnp.where(second_of_pair, size, indices)
    values = jnp.where(indices < size, values, 0)
    # If fewer than k sums are nonzero, `select` returns some zeros as well, e.g. from empty slots.
    values, found = select(values, k, selection="exact")
    indices = indices[found]
    order = jnp.argsort(indices, stable=True)
    return values[order], indices[order]
