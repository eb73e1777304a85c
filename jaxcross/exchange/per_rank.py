"""An optimizer state that's entirely rank-local."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax

from jaxcross.checkpoint import RankLocal


class PerRankState(NamedTuple):
    """State of an optimizer that steps on this rank's own gradients or parameters.

    Attributes:
        per_rank: The optimizer's state.
    """

    per_rank: optax.OptState

    rank_local = RankLocal(passing=("per_rank",))


def per_rank(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Wraps the state of `optimizer` in a `PerRankState`, which comparisons between ranks skip."""

    def init(params: optax.Params) -> PerRankState:
        return PerRankState(optimizer.init(params))

    def update(
        updates: optax.Updates,
        state: PerRankState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, PerRankState]:
        updates, inner = optimizer.update(updates, state.per_rank, params, **extra)
        return updates, PerRankState(inner)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
