"""An optimizer whose state differs between ranks, declared by the type of its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax


class PerRankState(NamedTuple):
    """Attributes: `per_rank`, the state of an optimizer that steps on this rank's own gradients or parameters."""

    per_rank: optax.OptState


def per_rank(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, its state wrapped in `PerRankState`, so that comparisons between ranks leave it out."""

    def init(params: optax.Params) -> PerRankState:
        return PerRankState(optimizer.init(params))

    def update(
        updates: optax.Updates, state: PerRankState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, PerRankState]:
        updates, inner = optimizer.update(updates, state.per_rank, params, **extra)
        return updates, PerRankState(inner)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
