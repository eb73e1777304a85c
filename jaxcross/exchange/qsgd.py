"""QSGD: unbiased random rounding of gradients to a few multiples of their norm."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange import collectives
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.validation import check_real, whole_number

_LARGEST = float(jnp.finfo(jnp.float32).max)


class QSGDState(NamedTuple):
    """The number of steps, which determines all rounding together with the seed, leaf and rank."""

    step: jax.Array


def qsgd(levels: int, axes: collectives.Axes, *, seed: int = 0) -> optax.GradientTransformation:
    """Averages leaves over ranks, each randomly rounded to multiples of `norm / levels`.

    Rounding is unbiased. Each rank uses different random numbers, derived from the seed, the step,
    the leaf and the rank. The result is the same on every rank, and across runs with the same seed
    and number of ranks.

    For a leaf of D elements, the variance on each rank is at most `min(D / levels^2, sqrt(D) /
    levels)` times the leaf's squared norm. So with `levels` around sqrt(D), rounding adds about as
    much noise as the gradient already has. As with `pmean`, the division by the number of ranks
    comes last, so a sum beyond float32's range becomes infinite.

    Bytes received per rank: `(P-1) (D + 4)` for a leaf of D elements. With fewer than 8 ranks,
    that's less than for an uncompressed float32 mean (`mean`).

    ```python
    tx = optax.chain(jaxcross.exchange.qsgd(127, "batch"), optax.sgd(0.1))
    ```

    Args:
        levels: 1 (ternary) to 127.
        axes: One axis name, or a tuple of names that act as a single axis.
        seed: Seed for the rounding.

    Raises:
        ValueError: `levels` is not a positive whole number, or doesn't fit one byte together with
            its sign; or, at trace time, a leaf is not real floating-point, or is float64.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Alistarh et al., arXiv 1610.02132, section 3.1.
    """
    levels = whole_number(levels, "levels", "`qsgd`")
    if levels > 127:
        raise ValueError(
            "`levels` of `qsgd` must be from 1 to 127, because a level and its sign are sent as "
            f"one byte, got {levels}."
        )

    names = collectives.axis_names(axes)

    def init(params: optax.Params) -> QSGDState:
        del params
        return QSGDState(step=jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: QSGDState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, QSGDState]:
        del params
        check_real(updates, "the levels of `qsgd`", float64=False)
        leaves, treedef = jax.tree.flatten(updates)
        new = QSGDState(step=jnp.asarray(optax.safe_increment(state.step)))
        if not leaves:
            return updates, new
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rank = jax.lax.axis_index(names)
        coded = [
            _quantise(x, levels, jax.random.fold_in(jax.random.fold_in(key, leaf), rank))
            for leaf, x in enumerate(leaves)
        ]
        every_unit = collectives.gather(
            jnp.stack([unit for _, unit in coded]), names
        )  # [P, leaves]
        every_code = [collectives.gather(code, names) for code, _ in coded]
        out = [
            # Rounding up by a level can exceed the range of the update's type.
            collectives.saturate(_mean(code, every_unit[:, leaf]), x.dtype)
            .reshape(x.shape)
            .astype(x.dtype)
            for leaf, (code, x) in enumerate(zip(every_code, leaves, strict=True))
        ]
        return jax.tree.unflatten(treedef, out), new

    return exchange_once("qsgd", names, optax.GradientTransformation(init, update))  # type: ignore[arg-type]


def _quantise(x: jax.Array, levels: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns signed levels as int8, and the size of a level, i.e. the norm over `levels`."""
    vector = x.reshape(-1).astype(jnp.float32)
    # Scale first, because squares can under- or overflow even if the elements themselves don't.
    largest = jnp.max(jnp.abs(vector), initial=0.0)
    scaled = jnp.where(largest > 0, vector / largest, 0)
    length = jnp.sqrt(jnp.sum(scaled * scaled))
    share = jnp.where(length > 0, jnp.abs(scaled) / length, 0) * levels
    level = jnp.minimum(jnp.floor(share + jax.random.uniform(key, vector.shape)), levels)
    norm = largest * length
    unit = jnp.where(jnp.isfinite(norm), norm / levels, largest * (length / levels))
    # If some elements are close to the largest float32, their norm can overflow, and so can an
    # element that's rounded up to the next multiple of the unit. In that case, shrink the unit
    # slightly and round the element down.
    unit = jnp.where(jnp.isinf(unit * levels), jnp.minimum(unit, _LARGEST) * (1 - 2**-20), unit)
    level = jnp.where(jnp.isinf(level * unit), level - 1, level)
    # Integers can't represent NaN or infinity, so mark such a leaf with a NaN unit.
    code = jnp.where(jnp.isfinite(level), level * jnp.sign(scaled), 0).astype(jnp.int8)
    return code, jnp.where(jnp.all(jnp.isfinite(vector)), unit, jnp.nan)


def _mean(codes: jax.Array, units: jax.Array) -> jax.Array:
    """Returns the mean over ranks of `codes[rank] * units[rank]`, added in rank order."""

    def add(rank: jax.Array, sum_: jax.Array) -> jax.Array:
        return sum_ + codes[rank].astype(jnp.float32) * units[rank]

    # Start the sum with the first rank's values instead of zeros. Under
    # `shard_map(check_vma=True)`, JAX considers zeros identical on all ranks, and rejects a loop
    # whose carry is identical on all ranks before the first iteration but not after it.
    first = add(jnp.int32(0), jnp.zeros(codes.shape[1], jnp.float32))
    return jax.lax.fori_loop(1, codes.shape[0], add, first) / codes.shape[0]
