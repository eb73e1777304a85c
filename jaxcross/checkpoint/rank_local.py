"""Recognises rank-local leaves, by their type or by the names that the job gives.

Comparing the ranks' values isn't enough, because a run with a single rank has nothing to compare
with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, keystr

from jaxcross import exchange
from jaxcross.exchange.per_rank import RankLocal

_STATISTICS = "batch_stats"
"""Flax's name for the statistics of normalisation layers."""


def rank_local_leaves(state: Any) -> list[str]:
    """Returns the paths of the leaves that an exchange keeps for its own rank."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    strategies = _strategies(state, paths)
    return [keystr(path) for path in paths if _owned(path, strategies, _unsent)]


def named_leaves(state: Any, names: Collection[str]) -> list[str]:
    """Returns the paths of the leaves that a job names with `rank_local`.

    Args:
        state: A job's state.
        names: Each is a key or attribute anywhere in a path, or the beginning of a path as
            `jax.tree_util.keystr` spells it.

    Raises:
        ValueError: No path contains a name. It's misspelled, or belongs to another state.
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for path in paths:
        beginnings = {keystr(path[: n + 1]) for n in range(len(path))} | {
            _name(key) for key in path
        }
        for name in beginnings & found.keys():
            found[name].append(keystr(path))
    unknown = [name for name, leaves in found.items() if not leaves]
    if unknown:
        listed = ", ".join(f"`{keystr(path)}`" for path in paths[:5]) + (
            ", ..." if len(paths) > 5 else ""
        )
        raise ValueError(
            f"`rank_local` names {unknown[0]!r}, which is in the path of no leaf. Name a key or an "
            "attribute of a path, or the beginning of a path. The state's leaves are "
            f"{listed or 'none'}."
        )
    return list(dict.fromkeys(path for leaves in found.values() for path in leaves))


def common_leaves(state: Any) -> list[str]:
    """Returns the paths of the leaves that training keeps identical across ranks, if they start so.

    We leave out:

    - leaves that the states of exchanges declare rank-local;
    - under a strategy with a separate model on each rank, all floating-point leaves outside such
      states;
    - gradients that `accumulate` and `optax.MultiSteps` add up;
    - statistics of normalisation layers (Flax's `batch_stats`, `nnx.BatchStat`), because a step may
      leave them unsynchronised.
    """
    found = jax.tree_util.tree_leaves_with_path(state)
    strategies = _strategies(state, [path for path, _ in found])
    models = any(kind.model for kinds in strategies.values() for kind in kinds)
    statistics = _nnx_statistics(state)

    def common(path: KeyPath, leaf: Any) -> bool:
        if _owned(path, strategies, _differing):
            return False
        if any(_name(key) == _STATISTICS for key in path):
            return False
        if any(path[: n + 1] in statistics for n in range(len(path))):
            return False
        return not models or _in_strategy(path, strategies) or not _floating(leaf)

    return [keystr(path) for path, leaf in found if common(path, leaf)]


@cache
def _declared() -> Mapping[type[Any], RankLocal]:
    """Returns what the classes of the strategies' states declare."""
    modules = (
        import_module(f"{exchange.__name__}.{found.name}")
        for found in iter_modules(exchange.__path__)
    )
    classes = {
        each for module in modules for each in vars(module).values() if isinstance(each, type)
    }
    ours = {
        each: each.rank_local
        for each in classes
        if isinstance(getattr(each, "rank_local", None), RankLocal)
    }
    optional = ("acc_grads", "inner_opt_state", "skip_state")
    return {**ours, optax.MultiStepsState: RankLocal(passing=("acc_grads",), maybe_empty=optional)}


_Strategies = Mapping[KeyPath, Collection[RankLocal]]


def _strategies(state: Any, paths: Collection[KeyPath]) -> _Strategies:
    """Finds the nodes of a tree that are states of strategies. Returns what they declare, by path.

    NNX turns such states into dicts. So below a key `opt_state`, we also recognise them by the
    names of all their fields. Any other dict is the user's.
    """
    declared = _declared()
    found: dict[KeyPath, set[RankLocal]] = {}
    for path, node in _nodes(state, tuple(declared)):
        kind = type(node)
        if _is(
            kind,
            declared[kind],
            {name for name in node._fields if jax.tree.leaves(getattr(node, name))},
        ):
            found[path] = {declared[kind]}
    below: dict[KeyPath, set[str]] = {}
    for path in paths:
        names = [_name(key) for key in path]
        if "opt_state" in names:
            for depth in range(names.index("opt_state") + 1, len(path)):
                below.setdefault(path[:depth], set()).add(names[depth])
    for path, fields in below.items():
        like = {local for kind, local in declared.items() if _is(kind, local, fields)}
        if like:
            found.setdefault(path, like)
    return found


def _is(kind: type[Any], local: RankLocal, names: set[str]) -> bool:
    """Returns whether `names`, the fields that have leaves, may be all of a strategy's state."""
    fields: set[str] = set(kind._fields)  # type: ignore[attr-defined]
    return fields - {*local.maybe_empty} <= names <= fields


def _nodes(
    tree: Any, kinds: type[Any] | tuple[type[Any], ...], above: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the nodes of a tree that are of some classes, even nested ones, with their paths."""
    if isinstance(tree, kinds):
        yield above, tree
    inside = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda part: part is not tree and isinstance(part, kinds)
    )
    for path, part in inside:
        if path and isinstance(part, kinds):
            yield from _nodes(part, kinds, (*above, *path))


def _owned(
    path: KeyPath, strategies: _Strategies, fields: Callable[[RankLocal], Collection[str]]
) -> bool:
    return any(
        _name(key) in fields(kind)
        for n, key in enumerate(path)
        for kind in strategies.get(path[:n], ())
    )


def _unsent(kind: RankLocal) -> Collection[str]:
    return kind.unsent


def _differing(kind: RankLocal) -> Collection[str]:
    return (*kind.unsent, *kind.model, *kind.passing)


def _in_strategy(path: KeyPath, strategies: _Strategies) -> bool:
    """Returns whether a leaf is in a strategy's state, e.g. the centre of `elastic_average`."""
    return any(kind.model for n in range(len(path)) for kind in strategies.get(path[:n], ()))


def _name(key: Any) -> str:
    return keystr((key,), simple=True)


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, float | complex) or jnp.issubdtype(
        getattr(leaf, "dtype", bool), jnp.inexact
    )


def _nnx_statistics(state: Any) -> set[KeyPath]:
    """Returns the paths of NNX's variables that hold statistics."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return set()
    return {path for path, _ in _nodes(state, nnx.BatchStat)}
