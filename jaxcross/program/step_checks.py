"""Checks what's passed to `crossover` and to a step.

A step must exchange over ranks, not over a single process's local devices. `jax.pmap` only reaches
local devices, though, and so do arrays sharded along a mesh axis that has the same name as an axis
over ranks. We raise an error for both, because otherwise each rank would train on its own.

Several arguments may share a buffer, as in `{"params": p, "ema": p}`, but XLA doesn't accept the
same buffer twice in a call that may overwrite it. So before a step, we copy arrays that share a
buffer (`copy_shared`). If XLA still comes across such a buffer, `find_shared` names its arrays for
the error text.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxcross import _jax_compat as compat
from jaxcross._pytree import PyTree, buffer_of
from jaxcross.errors import CutError

_PMAP = (
    "`jax.pmap` runs a function on devices of this process, but `crossover` runs it on ranks. "
    "Give `crossover` the function itself, pmap's `axis_name` as `axes`, and arguments without the "
    "leading axis of devices; its `donate_argnums` and `static_broadcasted_argnums` become "
    "`donate_argnums` and `static_argnums` of `crossover`."
)


def check_step(step: object, name: str) -> None:
    """Checks that `step` is a function we can trace.

    Raises:
        TypeError: It can't be called, is a class, is already compiled, or is (or wraps) a
            `jax.pmap`.
    """
    if isinstance(step, jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced):
        raise TypeError(
            f"`crossover` takes a function, not a `{type(step).__name__}`. Pass the function "
            "itself, because `crossover` traces and compiles it."
        )
    if isinstance(step, type) or not callable(step):
        what = (
            f"the class `{step.__name__}`" if isinstance(step, type) else f"`{type(step).__name__}`"
        )
        raise TypeError(
            f"`crossover` takes a function, not {what}. Pass a function or a callable instance."
        )
    if any(compat.runs_pmap(getattr(function, "__code__", None)) for function in _layers(step)):
        raise TypeError(f"`{name}` is a `jax.pmap`. {_PMAP}")


def check_mesh_axes(jaxpr: compat.Jaxpr, args: PyTree, axes: Collection[str], name: str) -> None:
    """Checks that no sharding in a step uses the name of an axis over ranks.

    Meshes over local devices are fine as long as their axes have other names. What this check is
    after is a step written for a single global array, with a mesh axis in place of `psum`. It would
    run without an error, but XLA only exchanges between the devices of the mesh, so each rank would
    train on its own.

    Args:
        jaxpr: The step, which isn't a `shard_map` over ranks.
        args: Its arguments, `(args, kwargs)`.
        axes: The names of the axes over ranks.
        name: The step's name for messages.

    Raises:
        CutError: An argument, or an equation in the step, is laid out along such an axis.
    """
    for path, leaf in jax.tree.leaves_with_path(args):
        axis = _axis_in_spec(getattr(leaf, "sharding", None), axes)
        if axis:
            _refuse_axis(name, axis, f"argument `{argument_path(path)}` is sharded")
    _check_equations(jaxpr, axes, name)


def _check_equations(jaxpr: compat.Jaxpr, axes: Collection[str], name: str) -> None:
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        for sharding in compat.shardings_of(eqn):
            axis = _axis_in_spec(sharding, axes)
            # A user who writes `reshard(grads, P())` wants a sum over the mesh, but it wouldn't
            # reach other ranks, so refuse it. Literals are fine, because JAX itself reshards
            # constants.
            if eqn.primitive.name in _LAYS_OUT and not all(
                isinstance(a, compat.Literal) for a in eqn.invars
            ):
                axis = axis or next((a for a in sharding.mesh.axis_names if a in axes), None)
            if axis is not None:
                _refuse_axis(
                    name,
                    axis,
                    f"`{eqn.primitive.name}` at {compat.source_of(eqn)} lays out an array",
                )
        for inner in compat.sub_jaxprs(eqn):
            _check_equations(inner, axes, name)


_LAYS_OUT = frozenset({"reshard", "sharding_constraint", "jit", "pjit"})


def _axis_in_spec(sharding: object, axes: Collection[str]) -> str | None:
    """Returns the first of `axes` that a sharding splits an array along, or None."""
    if not isinstance(sharding, NamedSharding):
        return None
    named = (
        a for entry in sharding.spec for a in (entry if isinstance(entry, tuple) else (entry,))
    )
    return next((a for a in named if a in axes), None)


def _refuse_axis(name: str, axis: str, what: str) -> None:
    raise CutError(
        f"{what} along `{axis}`, which is an axis over ranks in `{name}`: a mesh reaches the "
        "devices of this rank only, so XLA would exchange nothing with other ranks, and each rank "
        "would train alone. Exchange over ranks by name, e.g. `grads = jax.lax.pmean(grads, "
        f'"{axis}")`, or make the whole step a `jax.shard_map` over `{axis}`. If the mesh is meant '
        "for this rank's own devices, give its axis another name."
    )


def explain_failed_trace(step: Callable[..., Any], error: Exception, name: str) -> None:
    """Raises a clearer error if a failed trace's own error is misleading; otherwise returns.

    Raises:
        CutError: The step refers to a `jax.pmap`, or contains a `jax.jit` that got an array for one
            of its static arguments.
    """
    if any(
        compat.runs_pmap(getattr(each, "__code__", None))
        for inner in _layers(step)
        for each in _named(inner)
    ):
        raise CutError(f"`{name}` calls a `jax.pmap`. {_PMAP}") from error
    if "Non-hashable static arguments" in str(error):
        raise CutError(
            f"`{name}` was called with an array where its `jax.jit` has a static argument. Name "
            "its static arguments in `static_argnums` or `static_argnames` of `crossover` as well, "
            "or leave out the `jit`."
        ) from error


def copy_signature(function: Callable[..., Any], step: Callable[..., Any]) -> None:
    """Makes JAX's errors about `function` show the name, line and arguments of `step` instead."""
    *_, inner = _layers(step)
    function.__wrapped__ = inner  # type: ignore[attr-defined]
    with suppress(TypeError, ValueError):  # a callable without a signature
        function.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]


def _named(function: Callable[..., Any]) -> Iterator[Any]:
    """Yields the values of the globals and nonlocals that a function refers to.

    If tracing fails because the step calls a function made by `pmap`, the traceback doesn't show
    that call, since JAX strips its own frames from tracebacks. Instead, we look for such a function
    among the values that the step's code refers to.
    """
    code = getattr(function, "__code__", None)
    if code is not None:
        known = inspect.getclosurevars(function)
        yield from (*known.globals.values(), *known.nonlocals.values())


def _layers(step: Any) -> Iterator[Callable[..., Any]]:
    """Yields a callable, followed by the functions it wraps, from the outside in.

    Looks through partials, methods, `jit` and other decorators.
    """
    seen: set[int] = set()
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        yield step
        inner = (
            step.func if isinstance(step, functools.partial) else getattr(step, "__wrapped__", None)
        )
        step = inner if inner is not None else getattr(step, "__func__", None)


def remedy_for(leaf: object, tree: PyTree) -> str:
    """Tells the user what to do about a leaf of `tree` that isn't an array."""
    holder = _holder_of(leaf, tree)
    if holder is not None and (callable(leaf) or type(leaf).__module__ == "builtins"):
        return (
            f"`{type(holder).__name__}` is a pytree that has it among its leaves. Replace it by "
            "something that can be hashed and compared, such as a function, a string, a tuple or a "
            "frozen dataclass. If it holds arrays, make its class a pytree (`equinox.Module`, "
            "`flax.struct.dataclass`)."
        )
    if dataclasses.is_dataclass(leaf):
        return (
            "A dataclass is a pytree only once it is registered: put "
            f"`@jax.tree_util.register_dataclass` above `{type(leaf).__name__}`, or make it a "
            "`flax.struct.dataclass`."
        )
    return (
        "Register the class as a pytree (flax.struct.dataclass), name a hashable argument by "
        "`static_argnums` or `static_argnames`, or close over it."
    )


def _holder_of(leaf: object, tree: PyTree) -> object | None:
    """Returns the innermost node around a leaf that isn't a plain container.

    None if it's only inside tuples, lists and dicts.
    """
    nodes: list[object] = []
    jax.tree.leaves(tree, is_leaf=lambda node: bool(nodes.append(node)))
    around = (
        node
        for node in reversed(nodes)
        if node is not leaf and type(node) not in (tuple, list, dict)
    )
    return next(
        (node for node in around if any(each is leaf for each in jax.tree.leaves(node))), None
    )


def argument_path(path: tuple[Any, ...]) -> str:
    """Formats the tree path of a leaf of `(args, kwargs)` as the user would write it."""
    which = path[0].idx  # 0: args, 1: kwargs
    return ("args" if which == 0 else "kwargs") + jax.tree_util.keystr(path[1:])


def copy_shared(leaves: list[Any], donated: Collection[int], *, new_types: bool) -> None:
    """Replaces donated arrays that occur more than once in `leaves` with copies.

    Afterwards, each buffer is donated at most once, as XLA requires. Of the donated arrays that
    share a buffer, all but the first are copied. If an argument that isn't donated uses the same
    buffer, they are all copied.

    Args:
        leaves: Flat arguments; changed in place.
        donated: Positions in `leaves` of the arguments the step may overwrite.
        new_types: Whether to compare buffers rather than Python objects. Distinct arrays can share
            a buffer, e.g. after `jax.device_put`. Comparing buffers takes 0.2 us per array, so
            callers only do that on the first call with these types.
    """
    if not donated or not (new_types or len(set(map(id, leaves))) < len(leaves)):
        return
    key: Callable[[Any], Hashable] = buffer_of if new_types else id
    seen = {
        key(x)
        for place, x in enumerate(leaves)
        if place not in donated and isinstance(x, jax.Array)
    }
    for place in sorted(donated):
        leaf = leaves[place]
        if not isinstance(leaf, jax.Array):
            continue
        if key(leaf) in seen:
            leaves[place] = jnp.array(leaf)
        seen.add(key(leaf))


def find_shared(arrays: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the names of the first two arrays found to share a buffer, or None."""
    seen: dict[Hashable, str] = {}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            continue
        first = seen.setdefault(buffer_of(array), name)
        if first != name:
            return first, name
    return None
