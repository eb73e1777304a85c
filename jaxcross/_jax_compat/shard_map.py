"""JAX's private names for `shard_map`: varying types, its body, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any, Self

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core

from jaxcross._jax_compat import Literal, map_sub_jaxprs, new_var, open_jaxpr


def checks_varying() -> bool:
    """Whether a `shard_map(check_vma=True)` is being traced.

    Inside such a `shard_map`, types say which axes their values vary over.
    """
    return _config._check_vma.value


def vary_over(x: Any, axes: Sequence[str]) -> Any:
    """Returns `x` with a type that varies over `axes`. Only call this if `checks_varying()`.

    This makes JAX sum the gradient of `x` over those axes that `x` didn't vary over before.
    """
    return jax.lax.pcast(
        x, tuple(a for a in axes if a not in jax.typeof(x).mat.varying), to="varying"
    )


def is_cast_outside_of_shard_map(error: Exception) -> bool:
    """Whether JAX's error means that `jax.lax.pcast` names an axis that no `shard_map` binds."""
    if isinstance(error, AssertionError):
        return str(error).startswith("ManualAxisType(")
    return isinstance(error, ValueError) and "should be called under jax.shard_map" in str(error)


def with_input_shapes(jaxpr: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """Returns a closed jaxpr with different input shapes, and no mesh in the types of its inputs.

    The equations stay the same.
    """
    inner, _ = open_jaxpr(jaxpr)
    new = {
        v: new_var(_without_mesh(v.aval).update(shape=tuple(shape)))
        for v, shape in zip(inner.invars, shapes, strict=True)
    }

    def swapped(atoms: Sequence[Any]) -> list[Any]:
        return [a if isinstance(a, Literal) else new.get(a, a) for a in atoms]

    eqns = [e.replace(invars=swapped(e.invars)) for e in inner.eqns]
    changed = inner.replace(
        invars=list(new.values()),
        outvars=swapped(inner.outvars),
        eqns=eqns,
        debug_info=inner.debug_info.with_unknown_names(),
    )
    return changed if jaxpr is inner else jaxpr.replace(jaxpr=changed)


# Inside a `shard_map`, these primitives state which mesh axes a value varies over, or where it's
# placed. They don't change the value itself, so a single rank can do without them.
_CASTS = frozenset(
    {
        "pvary",
        "pcast",
        "preduced",
        "vary_unreduced_cast",
        "vary_unreduced_cast_p",
        "sharding_constraint",
        "reshard",
    }
)


def without_mesh(jaxpr: Any) -> Any:
    """Returns a `shard_map`'s open body as if it had been traced on one rank, without a mesh.

    Each rank runs the body on its own shards, so it doesn't need a mesh. We strip it from types,
    contexts and parameters. Since types then no longer say which axes a value varies over, we also
    drop the casts that change this. Exchanges inserted by JAX (`psum_invariant`) stay.
    """
    inner, _ = open_jaxpr(jaxpr)
    env: dict[Any, Any] = {}

    def new(atom: Any) -> Any:
        if isinstance(atom, Literal):
            # JAX's own subclasses of NumPy arrays carry a type; a view doesn't.
            val: Any = atom.val.view() if isinstance(atom.val, np.ndarray) else atom.val
            return Literal(val, _without_mesh(atom.aval))
        if atom not in env:
            env[atom] = new_var(_without_mesh(atom.aval))
        return env[atom]

    constvars = [new(v) for v in inner.constvars]
    invars = [new(v) for v in inner.invars]
    eqns = []
    for eqn in inner.eqns:
        if eqn.primitive.name in _CASTS:
            env.update(zip(eqn.outvars, map(new, eqn.invars), strict=True))
            continue
        eqn = map_sub_jaxprs(eqn, without_mesh)
        eqns.append(
            eqn.replace(
                invars=[new(a) for a in eqn.invars],
                outvars=[new(v) for v in eqn.outvars],
                params={name: _without_mesh(value) for name, value in eqn.params.items()},
                ctx=_without_mesh(eqn.ctx),
            )
        )
    return inner.replace(
        constvars=constvars,
        invars=invars,
        outvars=[new(a) for a in inner.outvars],
        eqns=eqns,
        debug_info=inner.debug_info.with_unknown_names(),
    )


def _without_mesh(value: Any) -> Any:
    """Strips the mesh from a type, parameter or context of an equation."""
    empty = jax.sharding.AbstractMesh((), ())
    if isinstance(value, _core.ShapedArray):
        return _core.ShapedArray(value.shape, value.dtype, value.weak_type)
    if isinstance(value, jax.sharding.AbstractMesh):
        return empty
    if isinstance(value, jax.sharding.NamedSharding):
        return None
    if isinstance(value, _core.JaxprEqnContext):
        with value.manager, jax.sharding.use_abstract_mesh(empty):
            return _core.JaxprEqnContext()
    return value


class _Asked(BaseException):
    """Raised at a function's first equation, to get back out of the function.

    If that equation is a `shard_map`, the exception carries its `arguments` and `parameters`;
    otherwise, they're None.
    """

    def __init__(self, arguments: Any = None, parameters: Any = None) -> None:
        self.arguments = arguments
        self.parameters = parameters


class _Asking(_core.Trace):
    def process_shard_map(
        self, _primitive: Any, _function: Any, arguments: Any, /, **parameters: Any
    ) -> Any:
        raise _Asked(arguments, parameters)

    def process_primitive(self, *_: Any, **__: Any) -> Any:
        raise _Asked

    process_call = process_custom_jvp_call = process_custom_vjp_call = process_primitive


class _AnySpec:
    """Equal to every spec.

    If an axis has type `Explicit`, JAX compares the argument's own spec with the one in `in_specs`.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`in_specs` is left out, and an argument has no `{name}` to infer it from: pass "
            "`in_specs`"
        )


class _AnySharding:
    mesh = jax.sharding.AbstractMesh((), ())
    spec = _AnySpec()


class _Unplaced(_core.ShapedArray):
    """The type of an array that hasn't been placed yet, so we only know its shape."""

    sharding: Any = _AnySharding()

    def __new__(cls, shape: Sequence[int], dtype: Any) -> Self:
        plain = _core.ShapedArray(tuple(shape), dtype)
        made = object.__new__(cls)
        for name in ("shape", "dtype", "weak_type", "manual_axis_type", "memory_space"):
            object.__setattr__(made, name, getattr(plain, name))
        return made


def first_shard_map(
    function: Callable[..., Any], shapes: Sequence[tuple[Sequence[int], Any]]
) -> tuple[Any, list[tuple[int | None, Any]]] | None:
    """Returns the mesh of the `shard_map` that `function` starts with, and each argument's spec.

    None if the function's first equation isn't a `shard_map`. Otherwise, there's a pair for every
    array that the `shard_map` takes: the number of the argument of `function` that it is (None if
    the function closes over the array instead), and its spec.

    The body of the `shard_map` doesn't run, so the shapes don't have to match any real arguments,
    as long as they're divisible by the number of parts that the specs split them into. Each entry
    of `shapes` consists of a shape and an element type.

    Raises:
        Exception: Whatever JAX or the function raises for such arguments.
    """
    trace = _Asking()
    tracers = [_core.Tracer(trace, _Unplaced(shape, dtype)) for shape, dtype in shapes]
    try:
        # Disable `jit`, because JAX traces the function inside a `jit` before it binds the `jit`
        # primitive itself, so `_Asking` would never see the equations inside.
        with jax.disable_jit(), _core.set_current_trace(trace):
            function(*tracers)
    except _Asked as asked:
        place = {id(t): n for n, t in enumerate(tracers)}
        if asked.parameters is not None:
            pairs = zip(asked.arguments, asked.parameters["in_specs"], strict=True)
            return asked.parameters["mesh"], [(place.get(id(a)), spec) for a, spec in pairs]
    return None


def begins_under_vmap(
    function: Callable[..., Any], shapes: Sequence[tuple[Sequence[int], Any]]
) -> bool:
    """Whether `first_shard_map` fails because the `shard_map` is inside a `jax.vmap`."""
    with _config.traceback_filtering("off"):  # otherwise JAX removes its own frames from tracebacks
        try:
            first_shard_map(function, shapes)
        except Exception as error:
            return any(
                frame.f_code.co_name == "vmap_f" for frame, _ in walk_tb(error.__traceback__)
            )
    return False
