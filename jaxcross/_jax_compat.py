"""The only file that touches private or version-dependent names of JAX.

jaxcross supports jax 0.10 to 0.12. From 0.11 `ClosedJaxpr is Jaxpr`; before, a closed jaxpr wraps an open one. Everyone
else builds and reads jaxprs through the functions below and never asks for a class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from traceback import extract_tb
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api_util as _api_util
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax.extend import core as _excore
from jax.extend import random as _exrandom
from jax.extend.core import primitives as _primitives
from jax.interpreters import partial_eval

Var = _excore.Var
Literal = _excore.Literal
Atom: TypeAlias = Var | Literal
Equation = _core.JaxprEqn
Aval: TypeAlias = _core.AbstractValue
ShapedArray: TypeAlias = _core.ShapedArray
Jaxpr: TypeAlias = Any  # open or closed: one class from JAX 0.11 on, two before
DropVar = _core.DropVar
Tracer = _core.Tracer
ArrayImpl = _array.ArrayImpl
InternalFloatingPointError = _api_util.InternalFloatingPointError  # of executables under jax_debug_nans
_PRNGImpl = type(_exrandom.threefry_prng_impl)
_generators: dict[str, Any] = sys.modules[_PRNGImpl.__module__].prngs  # whose module has moved between versions

INLINED = frozenset({
    "jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "custom_vmap_call", "composite",
})  # fmt: skip
"""Primitives that only call a jaxpr: what it does could stand in their place."""


def compilation_cache_dir() -> Path | None:
    """Returns the local folder in which JAX keeps compiled programs from run to run; None if the user named none."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return Path(folder)


def jit_disabled() -> bool:
    """Whether this thread is under `jax.disable_jit()`."""
    return _config.disable_jit.value


def x64_is_local() -> bool:
    """Whether this thread, by a context, means other element types by Python's and NumPy's numbers than others do."""
    return _config.enable_x64.value != _config.enable_x64.get_global()


def trace_context() -> Any:
    """All of JAX's configuration that decides what a trace becomes (`enable_x64`, ...); hashable. Costs 0.2 us."""
    return _config.trace_context()


def runs_pmap(code: Any) -> bool:
    """Whether this code object is what `jax.pmap` returns around a function."""
    name, file = getattr(code, "co_qualname", ""), getattr(code, "co_filename", "")
    return name.startswith("pmap.<locals>") and "jax" in Path(file).parts


def checks_varying() -> bool:
    """Whether a `shard_map(check_vma=True)` is being traced, in which types tell over which axes values vary."""
    return _config._check_vma.value


_bound: ContextVar[tuple[str, ...]] = ContextVar("bound", default=())


@contextmanager
def binding(axes: Iterable[str]) -> Iterator[None]:
    """While a step is traced over `axes`, outermost first: JAX's own environment of axes forgets their order."""
    before = _bound.set(tuple(axes))
    try:
        yield
    finally:
        _bound.reset(before)


def bound_axes() -> tuple[str, ...]:
    """The axes that `binding` named last; none outside of it."""
    return _bound.get()


def vary_over(x: Any, axes: Sequence[str]) -> Any:
    """`x` with a type that varies over `axes`, where `checks_varying()`. Sums the gradient over those that are new."""
    return jax.lax.pcast(x, tuple(a for a in axes if a not in jax.typeof(x).mat.varying), to="varying")


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr without its constants, and the constants that its `constvars` stand for."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, list(getattr(jaxpr, "consts", ()))


def with_plain_equations(jaxpr: Any, axes: Mapping[str, int]) -> Any:
    """A closed jaxpr in which no equation hides its jaxpr in an object, as `custom_root` of JAX 0.12 does.

    It is what `jax.jit` does before it compiles.
    """
    if not jaxpr.is_high:
        return jaxpr
    with _core.extend_axis_env_nd(list(axes.items())):
        return _partial_eval.lower_jaxpr2(jaxpr)


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds in its parameters, open or closed as they stand there."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def map_sub_jaxprs(eqn: Any, function: Any) -> Any:
    """The equation with `function` applied to every jaxpr among its parameters (open ones stay open)."""

    def convert(item: Any) -> Any:
        if hasattr(item, "_fields"):  # a named tuple, as `custom_linear_solve` has
            return type(item)(*map(convert, item))
        if type(item) in (tuple, list):
            return type(item)(convert(x) for x in item)
        if not is_jaxpr(item):
            return item
        inner, consts = open_jaxpr(item)
        mapped = function(inner)
        return mapped if item is inner and not consts else _excore.ClosedJaxpr(mapped, list(consts))

    params = {name: convert(value) for name, value in eqn.params.items()}
    mapped = [open_jaxpr(j)[0] for j in sub_jaxprs(eqn.replace(params=params))]
    effects = set(eqn.effects)
    if mapped:
        effects = {e for e in effects if not isinstance(e, _core.NamedAxisEffect)}
        effects |= {e for j in mapped for e in j.effects if isinstance(e, _core.NamedAxisEffect)}
    return eqn.replace(params=params, effects=effects)


def call_of_solver(eqn: Any) -> Any:
    """Returns a `custom_linear_solve` equation as a call of its solver alone."""
    lengths, solver = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    start = lengths.matvec + lengths.vecmat
    args = [*eqn.invars[start : start + lengths.solve], *eqn.invars[sum(lengths) :]]
    return call_of(eqn.replace(invars=args), solver)


def call_of(eqn: Any, jaxpr: Any) -> Any:
    """A call of a closed jaxpr in place of an equation, of its inputs and results."""
    return eqn.replace(primitive=_primitives.closed_call_p, params={"call_jaxpr": jaxpr}, effects=jaxpr.effects)


def array_type(atom: Atom) -> _core.ShapedArray:
    """Returns the shape and element type of a value: JAX declares `aval` as the base class, which has neither."""
    aval: Any = atom.aval
    return aval


def new_var(aval: Any) -> Any:
    """A fresh variable of the given abstract value."""
    return Var(aval)


def new_literal(value: Any, aval: Any) -> Any:
    """A literal atom."""
    return Literal(value, aval)


def make_jaxpr_of(invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], like: Any) -> Any:
    """A closed jaxpr without constants over the given equations; `like` lends its debug information."""
    effects = _core.join_effects(*(e.effects for e in eqns)) if eqns else _core.no_effects
    info = open_jaxpr(like)[0].debug_info.with_unknown_names()
    jaxpr = _excore.Jaxpr([], list(invars), list(outvars), list(eqns), effects, info)
    return _excore.ClosedJaxpr(jaxpr, [])


def with_input_shapes(jaxpr: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """A closed jaxpr with inputs of other shapes, and no mesh in their types; its equations stay as they are."""
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


def replace_eqns(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An open jaxpr with other equations and results; constants and inputs stay."""
    effects = _core.join_effects(*(e.effects for e in eqns)) if eqns else _core.no_effects
    return jaxpr.replace(eqns=list(eqns), outvars=list(outvars), effects=effects)


def one_result(jaxpr: Any, n: int) -> Any:
    """The jaxpr, closed or open, with what computes its n-th result alone."""
    inner, _ = open_jaxpr(jaxpr)
    changed, _, *_ = partial_eval.dce_jaxpr(inner, [i == n for i in range(len(inner.outvars))], instantiate=True)
    return changed if jaxpr is inner else jaxpr.replace(jaxpr=changed)


def is_named_axis_effect(effect: Any) -> bool:
    """Whether an effect only says that an equation speaks of a named axis."""
    return isinstance(effect, _core.NamedAxisEffect)


def is_ordered_effect(effect: Any) -> bool:
    """Whether equations with this effect happen in the order in which they are written."""
    return _effects.ordered_effects.contains(effect)


def is_array_type(value: Any) -> bool:
    """Whether JAX would take `value` as an array argument."""
    return _core.valid_jaxtype(value)


def source_of(eqn: Any, *, outside: str = "") -> str:
    """The user's line that made an equation, `file.py:12:4 (function)`, or `unknown line`.

    Args:
        eqn: The equation.
        outside: Part of a path, `package/folder`, whose files are not the user's.
    """
    info = eqn.source_info
    frames = list(_source_info_util.user_frames(info.traceback)) if outside else []
    inner = next((n for n, f in enumerate(frames) if f"/{outside}/" not in f.file_name.replace("\\", "/")), None)
    lines = _source_info_util.summarize(info, num_frames=1 if inner is None else inner + 1).split("\n")
    return lines[0] or "unknown line"


def stack_of(eqn: Any) -> list[str]:
    """The lines that made an equation, as `source_of` writes them, the innermost first; JAX's own are left out."""
    return _source_info_util.summarize(eqn.source_info, num_frames=sys.maxsize).splitlines()[::-1]


def is_cast_outside_of_shard_map(error: Exception) -> bool:
    """Whether JAX says by an error that `jax.lax.pcast` names an axis which no `shard_map` binds."""
    if isinstance(error, AssertionError):
        return str(error).startswith("ManualAxisType(")
    return isinstance(error, ValueError) and "should be called under jax.shard_map" in str(error)


def user_line_of(error: Exception) -> str:
    """The innermost line that an error came through outside of JAX, written as by `source_of`."""
    frames = [f for f in extract_tb(error.__traceback__) if _source_info_util.is_user_filename(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "unknown line"


def backends_started() -> bool:
    """Whether JAX has started a backend in this process; thread-pool settings come too late then."""
    return _xla_bridge.backends_are_initialized()


def aval_of(value: Any) -> Any:
    """The abstract value of a concrete argument, weak type included."""
    return jax.typeof(value)


def weakly_typed(array: jax.Array) -> jax.Array:
    """Returns the array with a weak type, as JAX makes arrays of Python numbers: another type prevails."""
    weak: Any = _lax._convert_element_type(array, weak_type=True)
    return weak


def generator_name(value: Any) -> str | None:
    """The name by which JAX knows a generator of random bits, in every process; None for anything else.

    One that was handed to JAX (`jax.extend.random.define_prng_impl`) has none: others may be called the same.
    """
    known = isinstance(value, _PRNGImpl) and _generators.get(value.name) is value
    return value.name if known else None


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, _excore.Jaxpr | _excore.ClosedJaxpr)


def is_closed_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr that carries its constants."""
    return isinstance(value, _excore.ClosedJaxpr)


def bind_equation(eqn: Any, values: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Evaluate (or trace) one equation on `values` with the given parameters, under its own name and source line."""
    primitive = eqn.primitive
    if primitive.name in _INVARIANT:  # it asks for a varying type, which `without_mesh` has taken away
        primitive, more = _INVARIANT[primitive.name]
        params = {**params, **more}
    with in_place_of(eqn):
        result = primitive.bind(*values, **primitive.get_bind_params(params))
    return result if primitive.multiple_results else [result]


_INVARIANT: dict[str, tuple[Any, dict[str, Any]]] = {
    "psum_invariant": (jax.lax.psum_p, {"axis_index_groups": None}),
    "all_gather_invariant": (jax.lax.all_gather_p, {}),
}


@contextmanager
def in_place_of(eqn: Any) -> Iterator[None]:
    """Gives what is traced inside the name, the source line and the configuration of an equation."""
    names = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    with _source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def close(jaxpr: Any) -> Any:
    """A closed jaxpr without constants."""
    return _excore.ClosedJaxpr(jaxpr, [])


def constants_first(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the jaxpr, closed, with its constants as its first arguments, and the constants."""
    inner, consts = open_jaxpr(jaxpr)
    if not consts:
        return jaxpr, ()
    invars, info = [*inner.constvars, *inner.invars], inner.debug_info.with_unknown_names()
    return close(inner.replace(constvars=[], invars=invars, debug_info=info)), consts


def bytes_of(array: Any) -> bytes:
    """Type, shape and content of a concrete array; waits for it."""
    if jnp.issubdtype(getattr(array, "dtype", np.dtype(float)), jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of constant operands of a `scan` and of the carried ones that follow them."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(len, eqn.params["ft_in"].unpack())  # from 0.12
    return consts, carry


# Inside a `shard_map` these say how values vary over the mesh, or lie on it; no value changes.
_CASTS = frozenset({
    "pvary", "pcast", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p", "sharding_constraint", "reshard",
})  # fmt: skip


def without_mesh(jaxpr: Any) -> Any:
    """The open body of a `shard_map`, as if its equations had been traced on one rank that knows of no mesh.

    Types lose their mesh and what varies over it, contexts and parameters the mesh itself, and casts between varying
    and invariant values go. What JAX inserted to exchange (`psum_invariant`) stays.
    """
    inner, _ = open_jaxpr(jaxpr)
    env: dict[Any, Any] = {}

    def new(atom: Any) -> Any:
        if isinstance(atom, Literal):
            # JAX's own arrays of NumPy's remember a type; a view of one does not.
            val: Any = atom.val.view() if isinstance(atom.val, np.ndarray) else atom.val
            return Literal(val, _without_mesh(atom.aval))
        if atom not in env:
            env[atom] = new_var(_without_mesh(atom.aval))
        return env[atom]

    constvars, invars = [new(v) for v in inner.constvars], [new(v) for v in inner.invars]
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
    """A type, a parameter or a context of an equation without the mesh that it speaks of."""
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
    """Leaves a function at its first equation: `arguments` and `parameters` of a `shard_map`, None of another one."""

    def __init__(self, arguments: Any = None, parameters: Any = None) -> None:
        self.arguments, self.parameters = arguments, parameters


class _Asking(_core.Trace):
    def process_shard_map(self, _primitive: Any, _function: Any, arguments: Any, /, **parameters: Any) -> Any:
        raise _Asked(arguments, parameters)

    def process_primitive(self, *_: Any, **__: Any) -> Any:
        raise _Asked

    process_call = process_custom_jvp_call = process_custom_vjp_call = process_primitive


class _AnySpec:
    """Equal to every spec: on axes of type `Explicit` JAX compares an argument's own with that of `in_specs`."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`in_specs` is left out, and an argument has no `{name}` to infer it from")


class _AnySharding:
    mesh, spec = jax.sharding.AbstractMesh((), ()), _AnySpec()


class _Unplaced(_core.ShapedArray):
    """The type of an array of which only the shape is known yet."""

    sharding: Any = _AnySharding()

    def __new__(cls, shape: Sequence[int], dtype: Any) -> Self:
        plain, made = _core.ShapedArray(tuple(shape), dtype), object.__new__(cls)
        for name in ("shape", "dtype", "weak_type", "manual_axis_type", "memory_space"):
            object.__setattr__(made, name, getattr(plain, name))
        return made


def first_shard_map(
    function: Callable[..., Any], shapes: Sequence[tuple[Sequence[int], Any]]
) -> tuple[Any, list[tuple[int | None, Any]]] | None:
    """Returns the mesh of the `shard_map` that `function` begins with, and the spec of each argument; or None.

    A value that `function` closes over has no number.

    The body does not run: `shapes`, each with its element type, need only be divisible by whatever cuts them.

    Raises:
        Exception: What JAX or the function say to such arguments.
    """
    trace = _Asking()
    tracers = [_core.Tracer(trace, _Unplaced(shape, dtype)) for shape, dtype in shapes]
    try:
        # JAX traces a `jit` before it binds its primitive, which `_Asking` would not see.
        with jax.disable_jit(), _core.set_current_trace(trace):
            function(*tracers)
    except _Asked as asked:
        place = {id(t): n for n, t in enumerate(tracers)}
        if asked.parameters is not None:
            pairs = zip(asked.arguments, asked.parameters["in_specs"], strict=True)
            return asked.parameters["mesh"], [(place.get(id(a)), spec) for a, spec in pairs]
    return None
