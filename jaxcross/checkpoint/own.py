"""Which leaves of a state are each rank's own, by what they are. One rank that saves has no other to compare with."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import KeyPath, keystr

from jaxcross.exchange.gtop_k import GTopKState
from jaxcross.exchange.one_bit_adam import OneBitAdamState
from jaxcross.exchange.power_sgd import PowerSGDState
from jaxcross.exchange.staleness import StaleState
from jaxcross.exchange.top_k import TopKState

# States of exchanges, and which of their fields differ between ranks.
_OWN: dict[type[Any], frozenset[str]] = {
    TopKState: frozenset({"residual"}),
    GTopKState: frozenset({"residual"}),
    PowerSGDState: frozenset({"residual"}),
    OneBitAdamState: frozenset({"worker_residual", "server_residual"}),
    StaleState: frozenset({"queue"}),
}

# Fields that hold an optimizer's state, which may have no leaves.
_MAY_BE_EMPTY = frozenset({"inner"})


def own_leaves(state: Any) -> list[str]:
    """Paths of the leaves that an exchange keeps for its rank.

    States of exchanges are known by the names of all their fields: NNX makes dicts of them, and one name alone may be
    that of a user's parameter.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    below: dict[KeyPath, set[str]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            below.setdefault(path[:depth], set()).add(_name(key))
    return [keystr(path) for path in paths if any(_owned(key, below[path[:n]]) for n, key in enumerate(path))]


def _owned(key: Any, siblings: set[str]) -> bool:
    return any(
        _name(key) in own and set(kind._fields) - _MAY_BE_EMPTY <= siblings <= set(kind._fields)
        for kind, own in _OWN.items()
    )


def _name(key: Any) -> str:
    return keystr((key,), simple=True)
