"""Steps that change Flax NNX objects in place, as `nnx.jit` allows: the objects' state goes in, and comes back.

Only the objects are split, all those of one call together, so that what they share stays shared; every other argument
keeps its place and its type. What the step adds to an object, and objects that it returns, come back as well.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jaxcross.program.trace import Traced
    from jaxcross.step.crossover import Step


def holds_objects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument is or contains an NNX object (module, optimizer, metric, `Rngs`, variable) itself.

    State that was split from its object is none. Does not wait or communicate; costs nothing before Flax is imported.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    is_object, split = nnx.graph.is_graph_node, (nnx.State, nnx.statelib.FlatState)
    found: list[Any] = []
    kinds: dict[type, bool] = {}  # asked once a type: on the path of every step, and NNX takes microseconds to answer

    def stop(x: Any) -> bool:
        kind = type(x)
        if (stops := kinds.get(kind)) is None:
            if is_object(x):
                found.append(x)
            kinds[kind] = stops = bool(found) or isinstance(x, split)
        return stops

    jax.tree.leaves((args, kwargs), is_leaf=stop)
    return bool(found)


def call(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs `step` on the state of the objects among its arguments, then updates the objects.

    Waits and communicates as `step` does. If the step fails, the objects keep the state they had,
    less what was donated.

    Raises:
        ValueError: A static argument holds NNX objects.
    """
    from flax import nnx

    with nnx.update_context(step):
        args, kwargs = _split(step, args, kwargs)
        changed = _pure_step(step)(*args, **kwargs)
        _, _, out = nnx.from_tree(changed, ctxtag=step, is_inner=False)
    return out


def trace(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """`step` traced on the state of the objects among its arguments, which stay as they are.

    Does not compile, wait or communicate.
    """
    from flax import nnx

    with nnx.update_context(step):
        args, kwargs = _split(step, args, kwargs)
        return _pure_step(step).trace(*args, **kwargs)


def _split(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with graph and state in place of every object. Static arguments are passed as they are."""
    from flax import nnx

    static = _static(step, args)
    for n in static:
        if holds_objects((args[n],), {}):
            raise ValueError(
                f"static argument {n} of `{step.__name__}` holds NNX objects, whose arrays cannot be static. Leave it"
                " out of static_argnums: objects are split for the step, and what is static in them stays static."
            )
    split, split_kwargs = nnx.to_tree((_without(args, static), dict(kwargs)), ctxtag=step)
    return [args[n] if n in static else a for n, a in enumerate(split)], split_kwargs


def _static(step: Step, args: Sequence[Any]) -> tuple[int, ...]:
    from jaxcross.step.crossover import positions

    return tuple(n for n in positions(step.static, len(args)) if 0 <= n < len(args))


def _without(args: Sequence[Any], static: Sequence[int]) -> tuple[Any, ...]:
    # A static argument may be anything, also what JAX takes for a tree that it cannot flatten.
    return tuple(None if n in static else a for n, a in enumerate(args))


def _pure_step(step: Step) -> Step:
    """The step as a function of graphs and states; one for each step, so that it is compiled once."""
    from flax import nnx

    from jaxcross.step.crossover import crossover

    if (known := step.__dict__.get("_pure")) is not None:
        return known

    def pure(*args: Any, **kwargs: Any) -> Any:
        static = _static(step, args)
        merged, kwargs = nnx.from_tree((_without(args, static), kwargs), ctxtag=step, is_inner=True)
        out = step.step(*(args[n] if n in static else a for n, a in enumerate(merged)), **kwargs)
        return nnx.to_tree((*_objects((merged, kwargs)), out), ctxtag=step)

    pure.__name__ = step.__name__
    made = crossover(
        pure, axes=step.axes, cut=step.cut, bucket_bytes=step.bucket_bytes, donate_argnums=step.donate,
        static_argnums=step.static,
    )  # fmt: skip
    # Jobs share steps. `setdefault` is one operation of the interpreter: of several threads' steps one stays.
    return step.__dict__.setdefault("_pure", made)


def _objects(tree: Any) -> Any:
    """`tree` with None in place of all that is no NNX object: what the caller keeps is not sent back to it."""
    from flax import nnx

    is_object = nnx.graph.is_graph_node
    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=is_object)
