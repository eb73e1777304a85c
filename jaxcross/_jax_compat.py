"""The only file that touches private or version-dependent names of JAX.

jaxcross supports jax 0.10 to 0.12. From 0.11 `ClosedJaxpr is Jaxpr`; before, a closed jaxpr wraps an open one. Everyone
else builds and reads jaxprs through the functions below and never asks for a class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax.extend import core as _excore

Var = _excore.Var
Literal = _excore.Literal
DropVar = _core.DropVar
Tracer = _core.Tracer
ArrayImpl = _array.ArrayImpl


def compilation_cache_dir() -> Path | None:
    """Where JAX keeps compiled programs from run to run, if the user told it to."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    return None if folder is None else Path(folder)


def jit_disabled() -> bool:
    """Whether this thread is under `jax.disable_jit()`."""
    return _config.disable_jit.value


def trace_context() -> Any:
    """All of JAX's configuration that decides what a trace becomes (`enable_x64`, ...); hashable. Costs 0.2 us."""
    return _config.trace_context()


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr without its constants, and the constants that its `constvars` stand for."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, list(getattr(jaxpr, "consts", ()))


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds in its parameters, open or closed as they stand there."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def map_sub_jaxprs(eqn: Any, function: Any) -> Any:
    """The equation with `function` applied to every jaxpr among its parameters (open ones stay open)."""

    def convert(item: Any) -> Any:
        if type(item) in (tuple, list):  # named tuples hold no jaxprs, and are built otherwise
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


def replace_eqns(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """An open jaxpr with other equations and results; constants and inputs stay."""
    effects = _core.join_effects(*(e.effects for e in eqns)) if eqns else _core.no_effects
    return jaxpr.replace(eqns=list(eqns), outvars=list(outvars), effects=effects)


def is_named_axis_effect(effect: Any) -> bool:
    """Whether an effect only says that an equation speaks of a named axis."""
    return isinstance(effect, _core.NamedAxisEffect)


def is_array_type(value: Any) -> bool:
    """Whether JAX would take `value` as an array argument."""
    return _core.valid_jaxtype(value)


def source_of(eqn: Any) -> str:
    """The user's line that made an equation, `file.py:12:4 (function)`, or `unknown line`."""
    return _source_info_util.summarize(eqn.source_info) or "unknown line"


def backends_started() -> bool:
    """Whether JAX has started a backend in this process; thread-pool settings come too late then."""
    return _xla_bridge.backends_are_initialized()


def aval_of(value: Any) -> Any:
    """The abstract value of a concrete argument, weak type included."""
    return jax.typeof(value)


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, _excore.Jaxpr | _excore.ClosedJaxpr)


def is_closed_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr that carries its constants."""
    return isinstance(value, _excore.ClosedJaxpr)


def bind_equation(eqn: Any, values: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Evaluate (or trace) one equation on `values` with the given parameters, under its own name and source line."""
    names = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    with _source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        result = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return result if eqn.primitive.multiple_results else [result]


def close(jaxpr: Any) -> Any:
    """A closed jaxpr without constants."""
    return _excore.ClosedJaxpr(jaxpr, [])


def bytes_of(array: Any) -> bytes:
    """Type, shape and content of a concrete array; waits for it."""
    if jnp.issubdtype(getattr(array, "dtype", np.dtype(float)), jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many leading operands of a `scan` are constants, and how many after them are carried."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(len, eqn.params["ft_in"].unpack())  # from 0.12
    return consts, carry
