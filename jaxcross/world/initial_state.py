"""Checks that a pytree is identical on all ranks, or makes it so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from jaxcross._pytree import (
    described_static,
    forms_of,
    is_static_leaf,
    leaves_with_paths,
    numeric,
    on_host,
    rebuild,
)
from jaxcross.errors import ExchangeError

_CHUNK_BYTES = 2**30


def check_equal(state: Any, comm: Any, rank_local: Collection[str] = ()) -> Any:
    """Returns `state` after comparing digests of its leaves across all ranks. Waits for all ranks.

    Leaves whose paths are in `rank_local` aren't compared.

    Raises:
        ExchangeError: The state differs between ranks; raised on every rank, naming the first leaf
            that differs and two ranks. Also raised if another rank can't read its own state, in
            which case that rank raises the original error.
        TypeError: A leaf is neither an array nor a number, and can't be static. Raised on every
            rank, naming the first such leaf.
    """
    hint = (
        "Build the state from the same seed on every rank. If a leaf is supposed to differ, such "
        "as a dropout key, name it with `job.restore(state, rank_local=...)` or "
        "`jaxcross.Job(..., rank_local=...)`. With `mode='local'`, each rank keeps all of its "
        "values; with `mode='broadcast'`, all ranks take rank 0's."
    )
    _compare(_gathered(_digest, state, comm, rank_local), hint=hint)
    _check_arrays(state)
    return state


def broadcast(state: Any, comm: Any, rank_local: Collection[str] = ()) -> Any:
    """Returns this rank's tree with rank 0's values. Waits for all ranks.

    Only the values come from rank 0; every leaf keeps the type and device it has on this rank.
    Leaves whose paths are in `rank_local` keep their values, too.

    Raises:
        ExchangeError: The trees, shapes or element types differ between ranks; raised on every
            rank. Also raised if another rank can't read its own state, in which case that rank
            raises the original error.
        TypeError: A leaf is neither an array nor a number, and can't be static. Raised on every
            rank, naming the first such leaf.
    """
    _compare(
        _gathered(_form, state, comm, rank_local),
        hint="Only values can be broadcast, so build a state with the same tree, shapes and types "
        "on every rank.",
    )
    _check_arrays(state)
    failures: list[Exception] = []

    def received(path: Any, leaf: Any) -> Any:
        if jax.tree_util.keystr(path) in rank_local or is_static_leaf(leaf):
            return leaf
        values = _broadcast_leaf(leaf, comm)
        try:
            return _placed(values, leaf)
        except Exception as error:
            # This rank can't store the leaf, e.g. because its device is out of memory. Don't raise
            # yet: the other ranks will go on to broadcast the remaining leaves and would wait for
            # us forever, so keep taking part until the end.
            failures.append(error)
            return leaf

    state = jax.tree_util.tree_map_with_path(received, state)
    if failures:
        raise failures[0]
    return state


def _gathered(
    what: Callable[[Any], str], state: Any, comm: Any, rank_local: Collection[str]
) -> list[list[tuple[str, str]]]:
    """Returns the paths and descriptions of each rank's leaves. Waits for all ranks.

    Rank-local leaves all get the same description, so they never count as different.
    """

    def described(path: str, leaf: Any) -> str:
        if is_static_leaf(leaf):
            return described_static(leaf)
        return "rank-local" if path in rank_local and _is_numeric(leaf) else what(leaf)

    mine: list[tuple[str, str]] = []
    trouble = ""
    failure = None
    try:
        mine = [(path, described(path, leaf)) for path, leaf in leaves_with_paths(state)]
    except Exception as error:
        # This rank can't read a leaf, e.g. because it's out of memory or the leaf was donated.
        # Don't raise yet: the other ranks are waiting for us in the `allgather` below.
        trouble = f"{type(error).__name__}: {error}"
        failure = error
    every = comm.allgather((mine, trouble))
    if failure is not None:
        raise failure
    for rank, (_, trouble) in enumerate(every):
        if trouble:
            raise ExchangeError(
                f"Rank {rank} cannot read its state, which all ranks have to compare. Fix this "
                f"error there: {trouble}"
            )
    return [leaves for leaves, _ in every]


def _compare(all_ranks: list[list[tuple[str, str]]], *, hint: str) -> None:
    first = all_ranks[0]
    for rank, other in enumerate(all_ranks):
        for (path, mine), (theirs_path, theirs) in zip(first, other, strict=False):
            if path != theirs_path:
                raise ExchangeError(
                    f"The state's tree differs between ranks 0 and {rank}, first at `{path}` on "
                    f"rank 0 and `{theirs_path}` on rank {rank}. {hint}"
                )
            if mine != theirs:
                raise ExchangeError(
                    f"The state differs between ranks 0 and {rank}, first at `{path}`: {mine} on "
                    f"rank 0, and {theirs} on rank {rank}. Training would diverge silently. {hint}"
                )
        if len(other) != len(first):
            raise ExchangeError(
                f"The state's tree differs between ranks 0 and {rank}: it has {len(first)} leaves "
                f"on rank 0, and {len(other)} on rank {rank}. {hint}"
            )


def _check_arrays(state: Any) -> None:
    """Raises if a leaf isn't an array or a number.

    Must run after the comparison. By then, all ranks are known to have equal trees, so either all
    of them raise or none does.
    """
    for path, leaf in leaves_with_paths(state):
        if not is_static_leaf(leaf) and not _is_numeric(leaf):
            raise TypeError(
                f"`{path or 'state'}` of the state is of type `{type(leaf).__name__}`: its leaves "
                "must be arrays, numbers, or static leaves such as functions and texts, which can "
                "be compared between ranks. Leave other objects out of the state."
            )


def _is_numeric(leaf: Any) -> bool:
    return numeric(on_host(leaf).dtype)


def _form(leaf: Any) -> str:
    array = on_host(leaf)
    if not numeric(array.dtype):
        return f"of type {type(leaf).__name__}"
    return f"{array.dtype}{list(array.shape)}"


def _digest(leaf: Any) -> str:
    array = on_host(leaf)
    if not numeric(array.dtype):
        return _form(leaf)
    # Hash the array's memory in place. The arrays may already fill half of the memory, so there
    # might not be room for a copy.
    content = hashlib.blake2b(array.reshape(-1).view(np.uint8).data, digest_size=8)
    return f"{array.dtype}{list(array.shape)} {content.hexdigest()}"


def _broadcast_leaf(leaf: Any, comm: Any) -> np.ndarray:
    array = on_host(leaf)
    content = np.frombuffer(array.tobytes(), np.uint8).copy()
    for start in range(0, content.size, _CHUNK_BYTES):
        comm.Bcast(content[start : start + _CHUNK_BYTES], root=0)
    return content.view(array.dtype).reshape(array.shape)


def _placed(values: np.ndarray, leaf: Any) -> Any:
    """Returns rank 0's values with the type and device of this rank's leaf."""
    if isinstance(leaf, jax.Array):
        # Take the type and device from the leaf, not from JAX's current settings. We may be running
        # in the exchange thread, which doesn't see contexts such as `enable_x64` or
        # `default_device` that the job has entered in its own thread.
        with jax.enable_x64(True), jax.default_device(next(iter(leaf.devices()))):
            return rebuild(leaf, forms_of(leaf), {"": values})
    return type(leaf)(values) if isinstance(leaf, bool | int | float | complex) else values
