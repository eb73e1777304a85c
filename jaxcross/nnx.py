"""Steps that change Flax NNX objects in place, as `nnx.jit` allows: the objects' state goes in, and comes back."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcross.step import Step


def holds_objects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument is an NNX module or optimizer itself, not its split state."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return any(isinstance(a, nnx.Module | nnx.Optimizer) for a in (*args, *kwargs.values()))


def call(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs `step` on the state of the objects among its arguments, then updates the objects."""
    from flax import nnx

    pure = _pure_step(step)
    graph, state = nnx.split((tuple(args), dict(kwargs)))
    out, new_state = pure(graph, state)
    nnx.update((tuple(args), dict(kwargs)), new_state)
    return out


def _pure_step(step: Step) -> Any:
    """The step as a function of graph and state; one for each step, so that it is compiled once."""
    from flax import nnx

    from jaxcross.step import crossover

    if (known := getattr(step, "_pure", None)) is not None:
        return known

    def pure(graph: Any, state: Any) -> Any:
        args, kwargs = nnx.merge(graph, state)
        out = step.step(*args, **kwargs)
        return out, nnx.state((args, kwargs))

    pure.__name__ = step.__name__
    step._pure = crossover(  # type: ignore[attr-defined]
        pure, axes=step.axes, cut=step.cut, bucket_bytes=step.bucket_bytes, donate_argnums=(1,) if step.donate else ()
    )
    return step._pure  # type: ignore[attr-defined]
