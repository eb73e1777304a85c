"""Traces a `jax.shard_map` step, written for a single process's devices, for one rank of many.

Such a step expects global arrays, but here it only gets its rank's shards. So we first find out the
specs of its `shard_map`. Together with the types of the shards, these give us the types of the
global arrays, which we then trace the step with.

Later, flattening extracts the body of the `shard_map`, which is what a single rank computes. With
`check_vma=True`, the body includes the exchanges that JAX inserts for gradients.

No devices are used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import begins_under_vmap, first_shard_map, with_input_shapes
from jaxcross.errors import CutError

Specs = Sequence[tuple[int | None, Any]]
"""Pairs of a step argument's number and the spec that shards it.

The number is None for arrays that aren't arguments of the step.
"""
_JITS = ("jit", "pjit")


def trace_shards(
    step: Callable[..., Any], avals: Sequence[Any], axes: Mapping[str, int], name: str
) -> compat.Jaxpr | None:
    """Returns the closed jaxpr of a flat step that's a single `shard_map`, or None otherwise.

    Args:
        step: Takes and returns flat arrays; jitted or not. Its mesh can be abstract, made of
            devices, or taken from the context.
        avals: Types of the rank's own shards, which become the jaxpr's input types.
        axes: The axes over ranks, outermost first.
        name: The step's name for messages.

    Raises:
        CutError: The mesh doesn't match `axes`, the step computes something outside its
            `shard_map`, a spec shards an array that isn't an argument of the step, or two specs
            shard the same argument differently.
    """
    context = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    # Try the step's own mesh first. If that fails, the step may expect a mesh from its context.
    for enter in (contextlib.nullcontext, lambda: jax.sharding.use_abstract_mesh(context)):
        with enter():
            asked = _ask(step, avals, axes)
            if asked is not None and _over_ranks(asked[0], axes):
                mesh, specs = asked
                _check_mesh(mesh, axes, name)
                closed = jax.make_jaxpr(step)(
                    *_global_types(avals, _spec_of_each(specs, name), mesh)
                )
                check_nothing_else(closed, name)
                return with_input_shapes(closed, [a.shape for a in avals])
    return None


def check_no_vmap(
    step: Callable[..., Any], avals: Sequence[Any], axes: Mapping[str, int], name: str
) -> None:
    """Checks that a flat step isn't a `jax.vmap` of a `shard_map`, which can't be traced.

    Raises:
        CutError: It is.
    """
    if begins_under_vmap(step, _divisible(avals, axes)):
        raise CutError(
            f"`{name}` is a `jax.vmap` of a `shard_map`, whose specs are those of one element of "
            "the `vmap`: they do not say how a rank's arguments are split. Put the `vmap` inside, "
            "`jax.shard_map(jax.vmap(f), in_specs=..., out_specs=...)`, with a `None` in each spec "
            "for the dimension that it maps, such as `P(None, 'data')`."
        )


def is_shard_map(jaxpr: compat.Jaxpr, axes: Mapping[str, int]) -> bool:
    """Whether a jaxpr is nothing but a `shard_map` over ranks, jitted or not."""
    eqns = compat.open_jaxpr(jaxpr)[0].eqns
    if len(eqns) != 1:
        return False
    if eqns[0].primitive.name in _JITS:
        return any(is_shard_map(inner, axes) for inner in compat.sub_jaxprs(eqns[0]))
    return eqns[0].primitive.name == "shard_map" and _over_ranks(eqns[0].params["mesh"], axes)


def _over_ranks(mesh: Any, axes: Mapping[str, int]) -> bool:
    """Whether a mesh spans ranks rather than this rank's local devices."""
    return isinstance(mesh, jax.sharding.AbstractMesh) or any(a in axes for a in mesh.axis_names)


def _ask(
    step: Callable[..., Any], avals: Sequence[Any], axes: Mapping[str, int]
) -> tuple[Any, Specs] | None:
    try:
        return first_shard_map(step, _divisible(avals, axes))
    except Exception:  # a trace with the step's real arguments raises a better error
        return None


def _divisible(avals: Sequence[Any], axes: Mapping[str, int]) -> list[tuple[tuple[int, ...], Any]]:
    """Returns shapes that any spec can shard, along with the element types.

    Every dimension is multiplied by the number of ranks to make it divisible.
    """
    ranks = math.prod(axes.values())
    return [(tuple(n * ranks for n in a.shape), a.dtype) for a in avals]


def _spec_of_each(specs: Specs, name: str) -> dict[int, Any]:
    """Returns each argument's spec. Arrays that aren't arguments must not be sharded."""
    found: dict[int, Any] = {}
    for n, spec in specs:
        if n is None:
            if any(axes is not None for axes in spec):
                raise CutError(
                    f"the `shard_map` of `{name}` has the spec {spec} for an array that is not an "
                    "argument of the step, so each rank would split its own copy again. Pass each "
                    "rank's shard to the step as an argument, or give the array the spec P()."
                )
        elif _plain(found.setdefault(n, spec)) != _plain(spec):
            raise CutError(
                f"the `shard_map` of `{name}` takes the same argument of the step twice, with the "
                f"specs {found[n]} and {spec}, but a rank only has one shard of it. Pass it to the "
                "step as two arguments, one for each spec."
            )
    return found


def _plain(spec: Any) -> list[Any]:
    """Strips trailing Nones from a spec: `P("data")` and `P("data", None)` are equivalent."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return entries


def _global_types(
    avals: Sequence[Any], cut: Mapping[int, Any], mesh: Any
) -> list[jax.ShapeDtypeStruct]:
    shapes = [list(a.shape) for a in avals]
    for n, spec in cut.items():
        for dim, named in enumerate(spec):
            for axis in named if isinstance(named, tuple) else (named,):
                shapes[n][dim] *= 1 if axis is None else mesh.shape[axis]
    shardings = [
        NamedSharding(mesh.abstract_mesh, cut.get(n, PartitionSpec())) for n in range(len(avals))
    ]
    return [
        jax.ShapeDtypeStruct(tuple(shape), a.dtype, weak_type=a.weak_type, sharding=sharding)
        for shape, a, sharding in zip(shapes, avals, shardings, strict=True)
    ]


def _check_mesh(mesh: Any, axes: Mapping[str, int], name: str) -> None:
    if list(mesh.shape.items()) != list(axes.items()):
        raise CutError(
            f"`{name}` is a `shard_map` over {_axes_text(mesh.shape)}, but its axes over ranks are "
            f"{_axes_text(axes)}. Give `crossover` the mesh's own axes, in their order, and start "
            "as many ranks. "
            "See docs/howto/tensor-parallelism.md#run-a-shard_map-step."
        )


def check_nothing_else(jaxpr: compat.Jaxpr, name: str) -> None:
    """Checks that a step with a `shard_map` over ranks computes nothing outside of it.

    Raises:
        CutError: It does, or its `shard_map` leaves axes to XLA's partitioner.
    """
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "shard_map":
            if set(eqn.params["newly_manual_axes"]) != set(eqn.params["mesh"].axis_names):
                raise CutError(
                    f"the `shard_map` of `{name}` leaves axes to XLA's partitioner, which does not "
                    "reach over ranks. Leave out `axis_names`, and exchange along every axis by "
                    "name. "
                    "See docs/howto/tensor-parallelism.md#run-a-shard_map-step."
                )
        elif eqn.primitive.name in _JITS:
            for inner in compat.sub_jaxprs(eqn):
                check_nothing_else(inner, name)
        else:
            raise CutError(
                f"`{name}` computes `{eqn.primitive.name}` outside of its `shard_map`, at "
                f"{compat.source_of(eqn)}: outside of it, JAX assumes global arrays, but a rank "
                "only has its own shards. Make the whole step one `shard_map`, with nothing before "
                "or after it. "
                "See docs/howto/tensor-parallelism.md#run-a-shard_map-step."
            )


def _axes_text(axes: Mapping[str, int]) -> str:
    return ", ".join(f"`{a}` of {n}" for a, n in axes.items())
