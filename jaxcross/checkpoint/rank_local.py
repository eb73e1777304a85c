"""Recognises leaves that are each rank's own by their type. One rank that saves has no other to compare with."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath, keystr

from jaxcross.exchange.accumulate import AccumulateState
from jaxcross.exchange.delayed_mean import DelayedMeanState
from jaxcross.exchange.demo import DemoState
from jaxcross.exchange.diloco import DiLoCoState
from jaxcross.exchange.elastic_average import ElasticAverageState
from jaxcross.exchange.federated_average import FederatedAverageState
from jaxcross.exchange.gossip import GossipState
from jaxcross.exchange.gtop_k import GTopKState
from jaxcross.exchange.local_sgd import LocalSGDState
from jaxcross.exchange.no_loco import NoLoCoState
from jaxcross.exchange.one_bit_adam import OneBitAdamState
from jaxcross.exchange.per_rank import PerRankState
from jaxcross.exchange.power_sgd import PowerSGDState
from jaxcross.exchange.sparse_loco import SparseLoCoState
from jaxcross.exchange.staleness import BoundedStaleState, StaleState
from jaxcross.exchange.streaming_diloco import StreamingDiLoCoState
from jaxcross.exchange.top_k import TopKState

_Fields = Mapping[type[Any], frozenset[str]]

# States of exchanges, and which of their fields differ between ranks.
_OWN: _Fields = {
    TopKState: frozenset({"residual"}),
    GTopKState: frozenset({"residual"}),
    PowerSGDState: frozenset({"residual"}),
    DemoState: frozenset({"momentum"}),
    SparseLoCoState: frozenset({"residual"}),
    OneBitAdamState: frozenset({"worker_residual", "server_residual"}),
    StaleState: frozenset({"queue"}),
    BoundedStaleState: frozenset({"late"}),
    DelayedMeanState: frozenset({"pending"}),
    StreamingDiLoCoState: frozenset({"pending"}),
}

# States of strategies under which each rank has a model of its own, and the fields that go with that model.
_MODELS: _Fields = {
    LocalSGDState: frozenset({"inner"}),
    DiLoCoState: frozenset({"inner"}),
    StreamingDiLoCoState: frozenset({"inner"}),
    FederatedAverageState: frozenset({"inner"}),
    ElasticAverageState: frozenset({"inner"}),
    GossipState: frozenset({"inner"}),
    NoLoCoState: frozenset({"anchor", "velocity", "inner"}),
    SparseLoCoState: frozenset({"inner"}),
    BoundedStaleState: frozenset({"inner"}),
}

# All fields that differ between ranks during training. A restart may give every rank a copy of those not in `_OWN`.
_APART: tuple[_Fields, ...] = (
    _OWN, _MODELS, {
        PerRankState: frozenset({"per_rank"}), optax.MultiStepsState: frozenset({"acc_grads"}),
        AccumulateState: frozenset({"total"}),
    },
)  # fmt: skip

# Fields that may have no leaves.
_MAY_BE_EMPTY = frozenset(
    {"inner", "outer", "pending", "arrived", "inner_opt_state", "acc_grads", "skip_state", "total"}
)

_STATISTICS = "batch_stats"
"""The name that Flax gives to the statistics of normalisation layers."""


def rank_local_leaves(state: Any) -> list[str]:
    """Paths of the leaves that an exchange keeps for its rank."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    strategies = _strategies(state, paths)
    return [keystr(path) for path in paths if _owned(path, strategies, _OWN)]


def common_leaves(state: Any, except_: Collection[str] = ()) -> list[str]:
    """Returns paths of the leaves that training changes alike on every rank, if they were equal on all ranks before.

    Left out are what the states of exchanges declare to be a rank's own; under a strategy with a model on each rank,
    all floating-point leaves outside of such states; gradients that `accumulate` and `optax.MultiSteps` add up; the
    statistics of normalisation layers (`batch_stats` of Flax, `nnx.BatchStat`), which a step may leave unsynchronised.

    Args:
        state: The state of a job.
        except_: Names of further leaves to leave out: a key or attribute anywhere in a path, or the beginning of a path
            as `jax.tree_util.keystr` spells it.
    """
    found = jax.tree_util.tree_leaves_with_path(state)
    strategies = _strategies(state, [path for path, _ in found])
    models = any(kind in _MODELS for kinds in strategies.values() for kind in kinds)
    names, statistics = {_STATISTICS, *except_}, _nnx_statistics(state)

    def common(path: KeyPath, leaf: Any) -> bool:
        if any(_owned(path, strategies, fields) for fields in _APART):
            return False
        if any(_name(key) in names for key in path):
            return False
        beginnings = [path[: n + 1] for n in range(len(path))]
        if any(start in statistics or keystr(start) in names for start in beginnings):
            return False
        return not models or _in_strategy(path, strategies) or not _floating(leaf)

    return [keystr(path) for path, leaf in found if common(path, leaf)]


_Strategies = Mapping[KeyPath, Collection[type[Any]]]


def _strategies(state: Any, paths: Collection[KeyPath]) -> _Strategies:
    """The nodes of a tree that are states of strategies, and of which ones.

    NNX makes dicts of them: below a key `opt_state` they are known by the names of all their fields as well. Other
    dicts are the user's.
    """
    kinds = {kind for fields in _APART for kind in fields}
    found: dict[KeyPath, set[type[Any]]] = {}
    for path, node in _nodes(state, tuple(kinds)):
        if _is(type(node), {name for name in node._fields if jax.tree.leaves(getattr(node, name))}):
            found[path] = {type(node)}
    below: dict[KeyPath, set[str]] = {}
    for path in paths:
        names = [_name(key) for key in path]
        if "opt_state" in names:
            for depth in range(names.index("opt_state") + 1, len(path)):
                below.setdefault(path[:depth], set()).add(names[depth])
    for path, fields in below.items():
        if like := {kind for kind in kinds if _is(kind, fields)}:
            found.setdefault(path, like)
    return found


def _is(kind: type[Any], names: set[str]) -> bool:
    """Whether these fields of a node, those that have leaves, may be all of a strategy's state."""
    fields: set[str] = set(kind._fields)  # type: ignore[attr-defined]
    return fields - _MAY_BE_EMPTY <= names <= fields


def _nodes(tree: Any, kinds: type[Any] | tuple[type[Any], ...], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The nodes of a tree that are of some classes, also those inside one another, with their paths."""
    if isinstance(tree, kinds):
        yield above, tree
    inside = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda part: part is not tree and isinstance(part, kinds)
    )
    for path, part in inside:
        if path and isinstance(part, kinds):
            yield from _nodes(part, kinds, (*above, *path))


def _owned(path: KeyPath, strategies: _Strategies, fields: _Fields) -> bool:
    return any(
        _name(key) in fields[kind]
        for n, key in enumerate(path)
        for kind in strategies.get(path[:n], ())
        if kind in fields
    )


def _in_strategy(path: KeyPath, strategies: _Strategies) -> bool:
    """Whether a leaf is a field of a strategy's state, such as the centre of `elastic_average`."""
    return any(kind in _MODELS for n in range(len(path)) for kind in strategies.get(path[:n], ()))


def _name(key: Any) -> str:
    return keystr((key,), simple=True)


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, float | complex) or jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact)


def _nnx_statistics(state: Any) -> set[KeyPath]:
    """Paths of the variables of NNX that hold statistics."""
    if (nnx := sys.modules.get("flax.nnx")) is None:
        return set()
    return {path for path, _ in _nodes(state, nnx.BatchStat)}
