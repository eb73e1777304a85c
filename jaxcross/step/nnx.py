"""Support for steps that update Flax NNX objects in place, as with `nnx.jit`.

JAX can't trace functions that modify their arguments. So before the step, we split each NNX object
into its graph and its state, run the step on these, and then write the new state back to the
object. All objects in a call are split together, which keeps shared variables shared. State that
the step adds to an object comes back too, as do objects that it returns. All other arguments keep
their positions and types.

While an object is split, Flax has to remember which graph belongs to it, so that it can update the
object later. It does so under a tag of our choice; we use the `Step` itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxcross._arguments import in_words
from jaxcross._pytree import PyTree
from jaxcross.errors import JobError

if TYPE_CHECKING:
    from jaxcross.jobs import JobEngine
    from jaxcross.program import Traced
    from jaxcross.step.step import Step


def holds_objects(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> bool:
    """Whether any argument is or contains an NNX object: a module, optimizer, metric, or variable.

    Random streams (`nnx.Rngs`) count as objects, but state that the user has already split from its
    object (`nnx.State`) doesn't. Does not wait or communicate. Returns immediately if Flax hasn't
    been imported, because then there can't be any objects.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    is_object = nnx.graph.is_graph_node
    split = (nnx.State, nnx.statelib.FlatState)
    found: list[object] = []
    # It takes NNX microseconds to tell whether a leaf is an object, and there may be a lot of
    # leaves. The answer only depends on the leaf's type, so ask just once per type.
    stops_at: dict[type, bool] = {}

    def stop(x: object) -> bool:
        stops = stops_at.get(type(x))
        if stops is None:
            if is_object(x):
                found.append(x)
            stops_at[type(x)] = stops = bool(found) or isinstance(x, split)
        return stops

    jax.tree.leaves((args, kwargs), is_leaf=stop)
    return bool(found)


def claim(
    step: Step[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree], job: JobEngine
) -> None:
    """Checks that no other running job passes the same NNX objects to a step.

    Otherwise both jobs' steps would update the same arrays, in an order that may differ between
    ranks. Does not wait or communicate.

    Raises:
        JobError: Another running job has passed one of these objects, or a part of it, to a step.
    """
    from flax import nnx

    is_object = nnx.graph.is_graph_node
    owners = job.world.object_owners

    def taken_by(node: Any) -> JobEngine | None:
        other = owners.get(node)
        return None if other is None else other()

    for top in filter(is_object, jax.tree.leaves((args, kwargs), is_leaf=is_object)):
        if isinstance(top, nnx.Variable) or taken_by(top) is job:
            continue
        # Walking through an object takes long, so we only do it in the job's first step. Start with
        # the outermost object, because that's the one users know.
        for _, node in reversed(list(nnx.iter_graph(top))):
            if not is_object(node) or not _has_identity(node):
                continue
            with job.world.object_owners_lock:
                other = taken_by(node)
                if other is None or other is job or other.done.is_set():
                    owners[node] = weakref.ref(job)
                    continue
            kind = type(node).__name__
            raise JobError(
                f"Job `{job.name}` passes an NNX object (`{kind}`) to `{step.__name__}`, and job "
                f"`{other.name}`, which is still running, has passed the same object to a step. "
                "Their updates would be mixed up. Create the model and the `nnx.Optimizer` in the "
                "function of each job. Only the `optax` optimizer can be shared. If a step only "
                "reads the object, pass what `nnx.split` returns."
            )


def _has_identity(node: Any) -> bool:
    """Whether an object is compared by identity and can be weakly referenced.

    That's true of modules and optimizers, but not of their variables.
    """
    return type(node).__hash__ is object.__hash__ and hasattr(node, "__weakref__")


def call(step: Step[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
    """Runs `step` on the state of any objects in its arguments, then updates the objects.

    Waits and communicates in the same way as calling `step`. If the step fails, the objects keep
    their previous state, except that arrays donated to the step are lost.

    Raises:
        ValueError: A static argument contains NNX objects.
    """
    from flax import nnx

    with nnx.update_context(step):
        split, split_kwargs = _split(step, args, kwargs)
        changed = step.pure_step()(*split, **split_kwargs)
        _, _, out = nnx.from_tree(changed, ctxtag=step, is_inner=False)
    return out


def bind(
    step: Step[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Traced, list[PyTree]]:
    """Traces `step` on the state of any objects in its arguments, without changing the objects.

    Returns the traced step and the flattened arguments, with objects replaced by their state. Does
    not compile, wait or communicate.
    """
    from flax import nnx

    with nnx.update_context(step):
        split, split_kwargs = _split(step, args, kwargs)
        return step.pure_step().bind(*split, **split_kwargs)


def pure_function(step: Step[..., Any]) -> Callable[..., PyTree]:
    """Returns a version of `step` that takes and returns graphs and states instead of objects.

    It returns the changed objects in addition to the step's results.
    """
    from flax import nnx

    def pure(*args: PyTree, **kwargs: PyTree) -> PyTree:
        static = step.static.places(len(args), kwargs)
        merged, merged_kwargs = nnx.from_tree(
            _without(args, kwargs, static), ctxtag=step, is_inner=True
        )
        out = step.step(*_with(merged, args, static), **_with_named(merged_kwargs, kwargs, static))
        return nnx.to_tree((*_only_objects((merged, merged_kwargs)), out), ctxtag=step)

    pure.__name__ = step.__name__
    return pure


def _split(
    step: Step[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[list[PyTree], dict[str, PyTree]]:
    """Returns the arguments with every object replaced by its graph and state.

    Static arguments are passed through unchanged.
    """
    from flax import nnx

    static = step.static.places(len(args), kwargs)
    for place in static:
        value = args[place] if isinstance(place, int) else kwargs[place]
        if holds_objects((value,), {}):
            raise ValueError(
                f"static argument {in_words(place)} of `{step.__name__}` holds NNX objects, whose "
                "arrays cannot be static. Do not make the argument static: jaxcross splits the "
                "objects for the step, and treats their static parts as static."
            )
    split, split_kwargs = nnx.to_tree(_without(args, kwargs, static), ctxtag=step)
    return _with(split, args, static), _with_named(split_kwargs, kwargs, static)


def _without(
    args: Sequence[PyTree], kwargs: Mapping[str, PyTree], static: Sequence[int | str]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    # Splitting flattens all arguments. Static arguments can be arbitrary Python objects, including
    # some that JAX takes for a pytree but can't flatten, so replace them with None first.
    return (
        tuple(None if n in static else a for n, a in enumerate(args)),
        {name: None if name in static else a for name, a in kwargs.items()},
    )


def _with(
    split: Sequence[PyTree], args: Sequence[PyTree], static: Sequence[int | str]
) -> list[PyTree]:
    """Puts the static arguments from `args` back into `split`."""
    return [args[n] if n in static else a for n, a in enumerate(split)]


def _with_named(
    split: Mapping[str, PyTree], kwargs: Mapping[str, PyTree], static: Sequence[int | str]
) -> dict[str, PyTree]:
    return {name: kwargs[name] if name in static else a for name, a in split.items()}


def _only_objects(tree: PyTree) -> PyTree:
    """Returns `tree` with all leaves other than NNX objects replaced by None.

    The others can't have changed, and the caller still has them.
    """
    from flax import nnx

    is_object = nnx.graph.is_graph_node
    return jax.tree.map(lambda x: x if is_object(x) else None, tree, is_leaf=is_object)
