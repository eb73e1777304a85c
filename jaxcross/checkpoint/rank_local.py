"""Recognises rank-local leaves, either by the types of the states they're in or by name.

Most leaves of a state should be identical on all ranks, but others are specific to a rank, e.g. the
residual of a compressed gradient exchange. A checkpoint with such leaves can't be restored on a
different number of ranks. Comparing values between ranks at the time of saving isn't enough to
identify them: if there's only a single rank, it has nothing to compare with, but its checkpoint
might later be restored on several ranks.
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

from jaxcross._pytree import is_static_leaf
from jaxcross.errors import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocal:
    """Declares which fields of a strategy's state are rank-local.

    The state's class is a `NamedTuple` with this declaration in its class attribute `rank_local`.
    Don't annotate the attribute with a type, or it becomes one of the tuple's fields:

        class MyState(NamedTuple):
            step: jax.Array
            residual: PyTree

            rank_local = RankLocal(unsent=("residual",))

    Attributes:
        unsent: Fields with data that exist only on this rank, such as residuals. Changing the
            number of ranks would lose some of it.
        model: Fields that belong to a separate model on each rank. If there are any, the model's
            parameters are rank-local as well.
        passing: Fields that only differ between ranks for a few steps, which means that a single
            rank's checkpoint can be copied to several ranks.
        maybe_empty: Fields that, depending on the strategy's arguments, may not contain any arrays.
            All other fields must contain arrays, or else the declaration is ignored. The reason is
            that NNX turns the state into a dict, which can only be recognised by the names of its
            fields.
    """

    unsent: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    maybe_empty: tuple[str, ...] = ()


def declared(kind: type[Any]) -> RankLocal | None:
    """Returns the declaration of a state's class, or None if it has none."""
    found = getattr(kind, "rank_local", None)
    return found if isinstance(found, RankLocal) and issubclass(kind, tuple) else None


_STATISTICS = "batch_stats"
"""What Flax calls the statistics of normalisation layers."""
_MULTI_STEPS = RankLocal(
    passing=("acc_grads",), maybe_empty=("acc_grads", "inner_opt_state", "skip_state")
)


def rank_local_leaves(state: Any) -> list[str]:
    """Returns the paths of leaves with data that exist only on this rank, such as residuals."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    strategies = _strategies(state, paths)
    return [keystr(path) for path in paths if _owned(path, strategies, _unsent)]


def named_leaves(state: Any, names: Collection[str]) -> list[str]:
    """Returns the paths of the leaves that a job names in `rank_local`.

    Args:
        state: A job's state.
        names: Each name is a key or attribute anywhere in a leaf's path, or the beginning of a path
            in the notation of `jax.tree_util.keystr`.

    Raises:
        ValueError: A name doesn't occur in any path, so it's probably misspelled.
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
            f"`rank_local` names {unknown[0]!r}, which no leaf has in its path. Name a key or an "
            "attribute of a path, or the beginning of a path. The state's leaves are "
            f"{listed or 'none'}."
        )
    return list(dict.fromkeys(path for leaves in found.values() for path in leaves))


def common_leaves(state: Any) -> list[str]:
    """Returns the paths of the leaves that stay identical across ranks during training.

    We assume that all leaves are identical at the start of training. The following may differ
    between ranks later on, even if training is correct, so they're left out:

    - leaves that an exchange strategy declares rank-local;
    - the model's parameters, if a strategy trains a separate model on each rank, where any
      floating-point leaf outside the strategy's own state is taken for a parameter;
    - gradients that are accumulated over several steps by `accumulate` or `optax.MultiSteps`;
    - statistics of normalisation layers (Flax's `batch_stats` and `nnx.BatchStat`), which steps
      don't have to average over ranks;
    - static leaves, which have no values that could change.
    """
    found = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if not is_static_leaf(leaf)
    ]
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
    """Returns the state classes of all strategies defined so far, with their declarations.

    There's no need for a registry: a `NamedTuple` is a direct subclass of `tuple`, which makes
    these classes easy to find.
    """
    found = {kind: _declared(kind) for kind in tuple.__subclasses__()}
    return {kind: local for kind, local in found.items() if local is not None}


_Strategies = Mapping[KeyPath, Collection[RankLocal]]


def _strategies(state: Any, paths: Collection[KeyPath]) -> _Strategies:
    """Finds the strategies' states in a tree. Returns their declarations, by path.

    In NNX, an optimizer's state consists of dicts, so the class of a strategy's state is lost. To
    make up for that, we also look at the dicts below a key `opt_state`: if a dict's keys are the
    field names of a strategy's state, that's what we take it for. Dicts anywhere else belong to the
    user and are left alone, whatever their keys.
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
    """Whether a node whose non-empty fields are `names` could be a strategy's state."""
    fields: set[str] = set(kind._fields)  # type: ignore[attr-defined]
    return fields - {*local.maybe_empty} <= names <= fields


def _nodes(
    tree: Any, wanted: Callable[[Any], bool], above: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the nodes for which `wanted` returns True, with their paths, including nested ones."""
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
    """Whether a leaf is in the state of a strategy that trains a separate model on each rank.

    An example is the centre variable of `elastic_average`.
    """
    return any(kind.model for n in range(len(path)) for kind in strategies.get(path[:n], ()))


def _name(key: Any) -> str:
    return keystr((key,), simple=True)


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, float | complex) or jnp.issubdtype(
        getattr(leaf, "dtype", bool), jnp.inexact
    )


def _nnx_statistics(state: Any) -> set[KeyPath]:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return set()
    return {path for path, _ in _nodes(state, lambda node: isinstance(node, nnx.BatchStat))}
