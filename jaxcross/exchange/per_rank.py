"""State that differs between ranks, declared by its type, and an optimizer whose whole state
does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optax


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocal:
    """The fields of a strategy's state that differ between ranks, as an attribute `rank_local` of
    the state's class.

    Attributes:
        unsent: What this rank alone has, such as residuals. A number of ranks that changes would
            lose it.
        model: What goes with a model of this rank's own. If there is such a field, parameters
            differ as well.
        passing: What differs for a few steps only; a checkpoint of one rank may be copied to
            several.
        maybe_empty: Fields without arrays under some arguments. NNX turns the state into a dict,
            which is recognised by its other fields.
    """

    unsent: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    maybe_empty: tuple[str, ...] = ()


class PerRankState(NamedTuple):
    """Attributes: `per_rank`, the state of an optimizer that steps on this rank's own gradients or
    parameters.
    """

    per_rank: optax.OptState

    rank_local = RankLocal(passing=("per_rank",))


def per_rank(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, its state wrapped in `PerRankState`, so that comparisons between ranks leave it
    out.
    """

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
