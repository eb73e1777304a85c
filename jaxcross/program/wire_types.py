"""Exchanges element types that MPI doesn't have: random keys, and 2-bit and 4-bit integers.

Random keys are exchanged as the words they consist of, and small integers as 8-bit integers.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError
from jaxcross.program.ir import Wire
from jaxcross.program.jaxpr_utils import is_shard_map, rewritten
from jaxcross.program.mpi4jax_lists import is_call

_SMALL = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
_SUMS = frozenset({"psum", "pmax", "pmin", "reduce_scatter"})


def convert_wire_types(jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire) -> compat.Jaxpr:
    """Converts such values around every exchange in a jaxpr, even inside loops.

    This leaves the body of a `shard_map` alone; the flattener converts it when extracting it.

    Args:
        jaxpr: Closed or open.
        axes: Axis name -> size.
        wire: Recognises exchanges.

    Raises:
        CutError: The step sums or compares random keys.
    """

    def converted(eqn: compat.Equation) -> compat.Equation:
        exchanges = wire.recognise(eqn, axes)
        return _call(eqn, axes, exchanges[0].op) if exchanges and not is_call(exchanges[0]) else eqn

    return rewritten(
        jaxpr,
        lambda eqn: any(map(_is_other, eqn.invars)),
        converted,
        enters=lambda eqn: not is_shard_map(eqn, axes),
    )


def _call(eqn: compat.Equation, axes: Mapping[str, int], op: str) -> compat.Equation:
    """Returns a call that converts an exchange's operands, exchanges them, and converts back."""
    if op in _SUMS and any(_is_key(compat.array_type(a).dtype) for a in eqn.invars):
        raise CutError(
            f"`{op}` of random keys at {compat.source_of(eqn)} is not possible, because keys "
            "cannot be added or compared. To give all ranks the key of one rank, use "
            "`jax.lax.all_gather(key, axis)[0]`. "
            "See docs/reference/limits-exchanges.md#collectives."
        )

    def call(*values: jax.Array) -> list[jax.Array]:
        results = compat.bind_equation(eqn, list(map(_to_wire, values)), eqn.params)
        return [_from_wire(r, v) for r, v in zip(results, values, strict=True)]

    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in map(compat.array_type, eqn.invars)]
    return compat.call_of(eqn, jax.make_jaxpr(call, axis_env=list(axes.items()))(*types))


def _to_wire(value: jax.Array) -> jax.Array:
    if _is_key(value.dtype):
        return jax.random.key_data(value)
    return value.astype(_SMALL.get(value.dtype.name, value.dtype))


def _from_wire(moved: jax.Array, like: jax.Array) -> jax.Array:
    if _is_key(like.dtype):
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(like))
    return moved.astype(like.dtype)


def _is_key(dtype: jax.typing.DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _is_other(atom: compat.Atom) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and (getattr(dtype, "name", "") in _SMALL or _is_key(dtype))
