"""Refuses to exchange a leaf twice over one axis: after another exchange, or inside the optimizer of one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import optax

from jaxcross.exchange import collectives


class _Mark(NamedTuple):
    leaf: weakref.ref[Any]
    by: str
    axes: frozenset[Hashable]


_marks: dict[int, _Mark] = {}
"""By the identity of what a strategy returned, arrays or tracers, as long as they live."""


class _Running(threading.local):
    """The exchanges whose `update` this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.all: list[tuple[str, frozenset[Hashable]]] = []


_running = _Running()


def exchange_once(
    by: str, axis_name: collectives.AxisName, exchange: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Wraps `exchange`, named `by`, so that it refuses leaves that another exchange has just returned over one of its
    axes, and refuses to run in the optimizer of one.

    The first is two strategies in a chain whose masks overlap. Neither what was computed with in between is recognised
    nor a mean that the step makes itself, which may be on purpose. Costs
    nothing at run time.

    Raises:
        ValueError: When traced, before the first step, and on every rank.
    """
    axes = frozenset(collectives.axis_names(axis_name))
    exchange = optax.with_extra_args_support(exchange)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        for outer, theirs in _running.all:
            if theirs <= axes:  # over a part of its axes is another matter: a mean in the node, every step
                raise ValueError(
                    f"`{by}` is inside the optimizer of `{outer}`, and both exchange over {_names(theirs)}. A leaf is"
                    " exchanged once: leave one of the two out."
                )
        given = {id(leaf) for leaf in jax.tree.leaves(updates)}
        for path, leaf in jax.tree.leaves_with_path(updates):
            mark = _marks.get(id(leaf))
            if mark is not None and mark.leaf() is leaf and (shared := mark.axes & axes):
                raise ValueError(
                    f"`{by}` is given the leaf `{jax.tree_util.keystr(path)}`, which `{mark.by}` has exchanged over"
                    f" {_names(shared)} already. A leaf is exchanged once: let the masks of `optax.masked` not overlap,"
                    " or leave one of the two out."
                )
        _running.all.append((by, axes))
        try:
            out, state = exchange.update(updates, state, params, **extra)
        finally:
            _running.all.pop()
        for leaf in jax.tree.leaves(out):
            if id(leaf) not in given and isinstance(leaf, jax.Array):  # a leaf that came back unchanged is not a result
                key = id(leaf)
                _marks[key] = _Mark(weakref.ref(leaf, lambda _, key=key: _marks.pop(key, None)), by, axes)
        return out, state

    return optax.GradientTransformationExtraArgs(exchange.init, update)


def _names(axes: frozenset[Hashable]) -> str:
    return ", ".join(f"`{axis}`" for axis in sorted(axes, key=str))
