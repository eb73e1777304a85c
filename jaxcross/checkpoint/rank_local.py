"""Recognises rank-local leaves, by their type or by the names that the job gives.

Comparing the ranks' values isn't enough, because a run with a single rank has nothing to compare
with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, keystr

from jaxcross.errors import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocal:
    """The rank-local fields of a strategy's state, as an attribute `rank_local` of its class.

    The class is a `NamedTuple`. Without an annotation, the attribute isn't one of its fields:

        class MyState(NamedTuple):
            step: jax.Array
            residual: PyTree

            rank_local = RankLocal(unsent=("residual",))

    Attributes:
        unsent: Fields whose contents only this rank has, such as residuals. They would be lost if
            the number of ranks changed.
        model: Fields that belong to a rank-local model. If there are any, parameters are rank-local
            as well.
        passing: Fields that differ only for a few steps, so one rank's checkpoint may be copied to
            several ranks.
        maybe_empty: Fields that hold no arrays under some arguments. If any other field is empty,
            the declaration doesn't count. NNX turns the state into a dict, which is then recognised
            by its other fields.
    """

    unsent: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    maybe_empty: tuple[str, ...] = ()


def declared(kind: type[Any]) -> RankLocal | None:
    """Returns what the class of a state declares, or None if it isn't a strategy's."""
    found = getattr(kind, "rank_local", None)
    return found if isinstance(found, RankLocal) and issubclass(kind, tuple) else None


_STATISTICS = "batch_stats"
"""Flax's name for the statistics of normalisation layers."""
_MULTI_STEPS = RankLocal(
    passing=("acc_grads",), maybe_empty=("acc_grads", "inner_opt_state", "skip_state")
)


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
        more = ", ..." if len(paths) > 5 else ""
        listed = quoted(keystr(path) for path in paths[:5]) + more
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


def _declared(kind: type[Any]) -> RankLocal | None:
    return _MULTI_STEPS if kind is optax.MultiStepsState else declared(kind)


def _is_declared(node: Any) -> bool:
    return _declared(type(node)) is not None


def _classes() -> dict[type[Any], RankLocal]:
    """Returns the classes of all strategies' states that are defined now, with what they declare.

    Named tuples derive from `tuple` directly, so no list of strategies is needed.
    """
    found = {kind: _declared(kind) for kind in tuple.__subclasses__()}
    return {kind: local for kind, local in found.items() if local is not None}


_Strategies = Mapping[KeyPath, Collection[RankLocal]]


def _strategies(state: Any, paths: Collection[KeyPath]) -> _Strategies:
    """Finds the nodes of a tree that are states of strategies. Returns what they declare, by path.

    NNX turns such states into dicts. So below a key `opt_state`, we also recognise them by the
    names of all their fields. Any other dict is the user's.
    """
    found: dict[KeyPath, set[RankLocal]] = {}
    for path, node in _nodes(state, _is_declared):
        local = _declared(type(node))
        held = {name for name in node._fields if jax.tree.leaves(getattr(node, name))}
        if local is not None and _is(type(node), local, held):
            found[path] = {local}
    below: dict[KeyPath, set[str]] = {}
    for path in paths:
        names = [_name(key) for key in path]
        if "opt_state" in names:
            for depth in range(names.index("opt_state") + 1, len(path)):
                below.setdefault(path[:depth], set()).add(names[depth])
    classes = _classes() if below else {}
    for path, fields in below.items():
        like = {local for kind, local in classes.items() if _is(kind, local, fields)}
        if like:
            found.setdefault(path, like)
    return found


def _is(kind: type[Any], local: RankLocal, names: set[str]) -> bool:
    """Returns whether `names`, the fields that have leaves, may be all of a strategy's state."""
    fields: set[str] = set(kind._fields)  # type: ignore[attr-defined]
    return fields - {*local.maybe_empty} <= names <= fields


def _nodes(
    tree: Any, wanted: Callable[[Any], bool], above: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the nodes of a tree that are `wanted`, even nested ones, with their paths."""
    if wanted(tree):
        yield above, tree
    inside = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda part: part is not tree and wanted(part)
    )
    for path, part in inside:
        if path and wanted(part):
            yield from _nodes(part, wanted, (*above, *path))


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
    return {path for path, _ in _nodes(state, lambda node: isinstance(node, nnx.BatchStat))}
