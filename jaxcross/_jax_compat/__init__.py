"""The only folder that uses private or version-dependent JAX names.

jaxcross supports JAX 0.10 to 0.12, which represent jaxprs in two different ways. Before 0.11, a
closed jaxpr is an object that wraps an open one; from 0.11 on, there's only one class (`ClosedJaxpr
is Jaxpr`). The rest of jaxcross is shielded from this: it builds and reads jaxprs with the
functions below, and never checks their class.

The private names for `jax.shard_map` live in `shard_map.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from jaxcross._lazy import on_first_use
from jaxcross._versions import unsupported_jax

_reason = unsupported_jax(jax.__version__)
if _reason:
    raise ImportError(_reason)

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
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax.extend import core as _excore
from jax.extend import random as _exrandom
from jax.extend.core import primitives as _primitives
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxlib import xla_client as _xla_client

Var = _excore.Var
Literal = _excore.Literal
Atom: TypeAlias = Var | Literal
Equation = _core.JaxprEqn
Aval: TypeAlias = _core.AbstractValue
ShapedArray: TypeAlias = _core.ShapedArray
Jaxpr: TypeAlias = Any  # open or closed; one class from JAX 0.11 on, two before
DropVar = _core.DropVar
Tracer = _core.Tracer
ArrayImpl = _array.ArrayImpl
# Raised by executables under `jax_debug_nans`.
InternalFloatingPointError = _api_util.InternalFloatingPointError
_PRNGImpl = type(_exrandom.threefry_prng_impl)
# Look up the module through the class, because it has moved between JAX versions.
_generators: dict[str, Any] = sys.modules[_PRNGImpl.__module__].prngs

INLINED = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "remat",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_lin",
        "custom_vmap_call",
        "composite",
    }
)
"""Primitives that merely call a jaxpr, so we can replace them with that jaxpr's equations."""


def compilation_cache_dir() -> Path | None:
    """Returns the local folder of JAX's persistent compilation cache, or None.

    None if the user hasn't set a folder, has disabled the cache, or keeps it in remote storage.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return Path(folder)


def jit_disabled() -> bool:
    """Whether this thread is inside `jax.disable_jit()`."""
    return _config.disable_jit.value


def invalid_values_to_find() -> list[str]:
    """Returns `nan` if `jax_debug_nans` is set in this thread, and `inf` if `jax_debug_infs` is."""
    return [
        name
        for name, asked in (("nan", _config.debug_nans), ("inf", _config.debug_infs))
        if asked.value
    ]


def x64_is_local() -> bool:
    """Whether `enable_x64` in this thread differs from the global setting.

    If so, Python and NumPy numbers get different element types here than in other threads.
    """
    return _config.enable_x64.value != _config.enable_x64.get_global()


def trace_context() -> Any:
    """Returns all JAX settings that affect a trace (`enable_x64`, ...), hashable.

    Takes 0.2 us.
    """
    return _config.trace_context()


def runs_pmap(code: Any) -> bool:
    """Whether this code object belongs to a function returned by `jax.pmap`."""
    name = getattr(code, "co_qualname", "")
    file = getattr(code, "co_filename", "")
    return name.startswith("pmap.<locals>") and "jax" in Path(file).parts


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the open jaxpr and the values of its `constvars`."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, list(getattr(jaxpr, "consts", ()))


def with_plain_equations(jaxpr: Any, axes: Mapping[str, int]) -> Any:
    """Returns a closed jaxpr in which no equation hides its jaxpr inside an object.

    In JAX 0.12, a `custom_root` equation keeps its jaxpr inside an object, where we couldn't find
    its exchanges. So we lower the equation, just as `jax.jit` does before compiling.
    """
    if not jaxpr.is_high:
        return jaxpr
    with _core.extend_axis_env_nd(list(axes.items())):
        return _partial_eval.lower_jaxpr2(jaxpr)


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs in an equation's parameters, open or closed as they come."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def shardings_of(eqn: Any) -> Iterator[NamedSharding]:
    """Yields the named shardings in an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, NamedSharding):
                yield item


def map_sub_jaxprs(eqn: Any, function: Any) -> Any:
    """Returns the equation with `function` applied to every jaxpr in its parameters.

    Open jaxprs stay open.
    """

    def convert(item: Any) -> Any:
        if hasattr(item, "_fields"):  # a named tuple, as in `custom_linear_solve`
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
    """Turns a `custom_linear_solve` equation into a call of just its solver."""
    lengths = eqn.params["const_lengths"]
    solver = eqn.params["jaxprs"].solve
    start = lengths.matvec + lengths.vecmat
    args = [*eqn.invars[start : start + lengths.solve], *eqn.invars[sum(lengths) :]]
    return call_of(eqn.replace(invars=args), solver)


def call_of(eqn: Any, jaxpr: Any) -> Any:
    """Returns a call of a closed jaxpr, to replace an equation with the same inputs and results."""
    return eqn.replace(
        primitive=_primitives.closed_call_p, params={"call_jaxpr": jaxpr}, effects=jaxpr.effects
    )


def array_type(atom: Atom) -> _core.ShapedArray:
    """Returns a value's shape and element type.

    JAX annotates `aval` with the base class, which has neither.
    """
    aval: Any = atom.aval
    return aval


def new_var(aval: Any) -> Any:
    """Returns a new variable with this abstract value."""
    return Var(aval)


def new_literal(value: Any, aval: Any) -> Any:
    """Returns a literal with this value and abstract value."""
    return Literal(value, aval)


def make_jaxpr_of(
    invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], like: Any
) -> Any:
    """Builds a closed jaxpr from these equations, without constants.

    The debug information is copied from `like`.
    """
    effects = _core.join_effects(*(e.effects for e in eqns)) if eqns else _core.no_effects
    info = open_jaxpr(like)[0].debug_info.with_unknown_names()
    jaxpr = _excore.Jaxpr([], list(invars), list(outvars), list(eqns), effects, info)
    return _excore.ClosedJaxpr(jaxpr, [])


def replace_eqns(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Returns an open jaxpr with new equations and results, but the same constants and inputs."""
    effects = _core.join_effects(*(e.effects for e in eqns)) if eqns else _core.no_effects
    return jaxpr.replace(eqns=list(eqns), outvars=list(outvars), effects=effects)


def one_result(jaxpr: Any, n: int) -> Any:
    """Returns the jaxpr, closed or open, reduced to what its n-th result depends on."""
    inner, _ = open_jaxpr(jaxpr)
    changed, _, *_ = partial_eval.dce_jaxpr(
        inner, [i == n for i in range(len(inner.outvars))], instantiate=True
    )
    return changed if jaxpr is inner else jaxpr.replace(jaxpr=changed)


def is_named_axis_effect(effect: Any) -> bool:
    """Whether an effect merely says that an equation uses a named axis."""
    return isinstance(effect, _core.NamedAxisEffect)


def is_ordered_effect(effect: Any) -> bool:
    """Whether equations with this effect must run in the order they're written."""
    return _effects.ordered_effects.contains(effect)


def is_array_type(value: Any) -> bool:
    """Whether JAX accepts `value` as an array argument."""
    return _core.valid_jaxtype(value)


def source_of(eqn: Any, *, outside: str = "") -> str:
    """Returns the user's line behind an equation: `file.py:12:4 (function)` or `unknown line`.

    Args:
        eqn: The equation.
        outside: Part of a path, like `package/folder`. Files below it don't count as the user's.
    """
    info = eqn.source_info
    frames = list(_source_info_util.user_frames(info.traceback)) if outside else []
    inner = next(
        (n for n, f in enumerate(frames) if f"/{outside}/" not in f.file_name.replace("\\", "/")),
        None,
    )
    lines = _source_info_util.summarize(info, num_frames=1 if inner is None else inner + 1).split(
        "\n"
    )
    return lines[0] or "unknown line"


def stack_of(eqn: Any) -> list[str]:
    """Returns the lines that led to an equation, innermost first, without JAX's own.

    Formatted like the result of `source_of`.
    """
    return _source_info_util.summarize(eqn.source_info, num_frames=sys.maxsize).splitlines()[::-1]


def user_line_of(error: Exception) -> str:
    """Returns the innermost line outside JAX that an error passed through.

    Formatted like the result of `source_of`.
    """
    frames = [
        f for f in extract_tb(error.__traceback__) if _source_info_util.is_user_filename(f.filename)
    ]
    return (
        f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})"
        if frames
        else "unknown line"
    )


def register_host_calls() -> None:
    """Registers the FFI calls of all imported packages with XLA.

    JAX does the same when it starts the CPU backend.

    Raises:
        RuntimeError: A call was compiled against a newer interface than jaxlib's.
    """
    register: Any = _xla_client._xla.register_custom_call_target  # pyright: ignore[reportPrivateImportUsage]
    _xla_client.register_custom_call_handler("cpu", register)


def put_on_host(x: np.ndarray, host: Any, *, committed: bool) -> jax.Array:
    """Equivalent to `jax.device_put(x, host)`, but takes 15 us instead of 100 us.

    If the memory is page-aligned, the JAX array uses it without copying.
    """
    aval = _core.ShapedArray(x.shape, x.dtype)
    return _pxla.batched_device_put(
        aval, SingleDeviceSharding(host), [x], [host], committed, enable_x64=True
    )


def collect_garbage() -> None:
    """Makes JAX release the Python objects of deleted arrays now instead of in a later call."""
    _xla_client._xla.collect_garbage()  # pyright: ignore[reportPrivateImportUsage]


def backends_started() -> bool:
    """Whether JAX has started a backend in this process.

    If so, it's too late to change thread-pool settings.
    """
    return _xla_bridge.backends_are_initialized()


def aval_of(value: Any) -> Any:
    """Returns the abstract value of a concrete argument, including its weak type."""
    return jax.typeof(value)


def weakly_typed(array: jax.Array) -> jax.Array:
    """Returns the array with a weak type, like the arrays that JAX makes from Python numbers.

    When combined with another array, the other array's type wins.
    """
    weak: Any = _lax._convert_element_type(array, weak_type=True)
    return weak


def generator_name(value: Any) -> str | None:
    """Returns the name of one of JAX's own random-bit generators, the same in every process.

    Only the generators that ship with JAX are identified by their names. For anything else,
    including those defined with `jax.extend.random.define_prng_impl`, the result is None, because a
    different generator could have the same name.
    """
    known = isinstance(value, _PRNGImpl) and _generators.get(value.name) is value
    return value.name if known else None


def is_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr, open or closed."""
    return isinstance(value, _excore.Jaxpr | _excore.ClosedJaxpr)


def is_closed_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr that carries its constants."""
    return isinstance(value, _excore.ClosedJaxpr)


def bind_equation(eqn: Any, values: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Evaluates or traces a single equation on `values`, with the given parameters.

    The equation's name and source line are preserved.
    """
    primitive = eqn.primitive
    # The primitives in `_INVARIANT` require types that say which mesh axes a value varies over, but
    # `without_mesh` has stripped the mesh from all types. Switch to equivalent primitives that
    # don't need a mesh.
    if primitive.name in _INVARIANT:
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
    """Traces everything inside with the name, source line and settings of an equation."""
    names = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        _source_info_util.user_context(eqn.source_info.traceback, name_stack=names),
        eqn.ctx.manager,
    ):
        yield


def close(jaxpr: Any) -> Any:
    """Returns a closed jaxpr without constants."""
    return _excore.ClosedJaxpr(jaxpr, [])


def constants_first(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the closed jaxpr with its constants as leading arguments, and the constants."""
    inner, consts = open_jaxpr(jaxpr)
    if not consts:
        return jaxpr, ()
    invars = [*inner.constvars, *inner.invars]
    info = inner.debug_info.with_unknown_names()
    return close(inner.replace(constvars=[], invars=invars, debug_info=info)), consts


def bytes_of(array: Any) -> bytes:
    """Returns a concrete array's type, shape and content as bytes. Waits for the array."""
    if jnp.issubdtype(getattr(array, "dtype", np.dtype(float)), jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns how many constant operands a `scan` has, and how many carried operands after them."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(len, eqn.params["ft_in"].unpack())  # from 0.12
    return consts, carry


if TYPE_CHECKING:  # also from `shard_map.py`, which builds on the names above
    from jaxcross._jax_compat.shard_map import (
        begins_under_vmap,
        checks_varying,
        first_shard_map,
        vary_over,
        with_input_shapes,
        without_mesh,
    )
    from jaxcross._jax_compat.shard_map import (
        is_cast_outside_of_shard_map as is_cast_outside_of_shard_map,
    )
else:
    __getattr__, *_ = on_first_use(__name__)
