"""What is asked of a jaxpr, and what of it nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.program.segments import Exchange, Wire

INLINED = frozenset({
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_lin", "custom_vmap_call", "composite",
})  # fmt: skip
"""Primitives that only call a jaxpr: what it does could stand in their place."""


def holds_exchange(
    jaxpr: Any, axes: Mapping[str, int], wire: Wire, *, only: Callable[[Exchange], bool] = lambda _: True
) -> bool:
    """Whether a jaxpr, or one inside it, puts something on the wire, of which `only` holds."""
    inner, _ = compat.open_jaxpr(jaxpr)
    return any(
        any(map(only, wire.recognise(eqn, axes) or ()))
        or any(holds_exchange(j, axes, wire, only=only) for j in compat.sub_jaxprs(eqn))
        for eqn in inner.eqns
    )


def holds_shard_map(jaxpr: Any, axes: Mapping[str, int]) -> bool:
    """Whether a jaxpr, or one inside it, is mapped over shards along one of `axes`."""
    return any(
        is_shard_map(eqn, axes) or any(holds_shard_map(j, axes) for j in compat.sub_jaxprs(eqn))
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns
    )


def is_shard_map(eqn: Any, axes: Mapping[str, int]) -> bool:
    """Whether an equation maps over shards along one of `axes`."""
    return eqn.primitive.name == "shard_map" and any(a in axes for a in eqn.params["mesh"].axis_names)


def drop_unread(eqns: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """The equations whose results are read in the end, or that have a real effect, in order."""
    live = {a for a in outs if not isinstance(a, compat.Literal)}
    kept = []
    for eqn in reversed(eqns):
        lasting = any(not compat.is_named_axis_effect(e) for e in eqn.effects)
        if lasting or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
    return kept[::-1]
