"""Declares state that differs between ranks, by its type.

The class of a strategy's state lists its rank-local fields in an attribute `rank_local`, which is
all that checkpoints and comparisons of replicas need: no list of strategies exists. The state of
your own exchange may declare its fields in the same way. `per_rank` wraps an optimizer whose whole
state is rank-local.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import optax


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocal:
    """The rank-local fields of a strategy's state, as an attribute `rank_local` of its class.

    The class is a `NamedTuple`. Without an annotation, the attribute isn't one of its fields:

        class MyState(NamedTuple):
            step: jax.Array
            residual: PyTree

            rank_local = RankLocal(unsent=("residual",))

    Attributes:
        unsent: Fields whose contents only this rank has, such as residuals. They would be lost if
            the number of ranks changed.
        model: Fields that belong to a rank-local model. If there are any, parameters are rank-local
            as well.
        passing: Fields that differ only for a few steps, so one rank's checkpoint may be copied to
            several ranks.
        maybe_empty: Fields that hold no arrays under some arguments. If any other field is empty,
            the declaration doesn't count. NNX turns the state into a dict, which is then recognised
            by its other fields.
    """

    unsent: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    maybe_empty: tuple[str, ...] = ()


def declared(kind: type[Any]) -> RankLocal | None:
    """Returns what the class of a state declares, or None if it isn't a strategy's."""
    found = getattr(kind, "rank_local", None)
    return found if isinstance(found, RankLocal) and issubclass(kind, tuple) else None


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
    """Wraps the state of `optimizer` in a `PerRankState`, so that comparisons of ranks skip it."""

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
