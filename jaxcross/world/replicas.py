"""Is a pytree equal on all ranks? Or make it so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._pytree import forms_of, rebuild
from jaxcross.errors import ExchangeError

_CHUNK_BYTES = 2**30


def check_equal(state: Any, comm: Any, rank_local: Collection[str] = ()) -> Any:
    """`state` itself, after all ranks have compared their leaves' bytes, except those of the paths
    `rank_local`. Waits for every rank.

    Raises:
        ExchangeError: On every rank, naming the first leaf that differs and two ranks; or a rank
            that cannot read its own, where it is what reading raised.
        TypeError: On every rank, naming the first leaf that is neither an array nor a number.
    """
    hint = (
        "Build it from the same seed on every rank. If each rank is to have its own value of a "
        "leaf, such as a dropout key, name it: `job.restore(state, rank_local=...)`, or "
        "`jaxcross.Job(..., rank_local=...)`. `mode='local'` lets each rank keep all of its "
        "values; `mode='broadcast'` takes rank 0's."
    )
    _compare(_gathered(_digest, state, comm, rank_local), hint=hint)
    _check_arrays(state)
    return state


def broadcast(state: Any, comm: Any, rank_local: Collection[str] = ()) -> Any:
    """Rank 0's values in this rank's tree, each leaf of this rank's type and where it was; leaves
    of the paths `rank_local` stay as they are. Waits for every rank.

    Raises:
        ExchangeError: On every rank, if shapes, element types or the tree itself differ; or a rank
            cannot read its own, where it is what reading raised.
        TypeError: On every rank, naming the first leaf that is neither an array nor a number.
    """
    _compare(
        _gathered(_form, state, comm, rank_local),
        hint="Only values can be broadcast: make the trees alike first.",
    )
    _check_arrays(state)
    failures: list[Exception] = []

    def received(path: Any, leaf: Any) -> Any:
        if jax.tree_util.keystr(path) in rank_local:
            return leaf
        values = _broadcast_leaf(leaf, comm)
        try:
            return _placed(values, leaf)
        except (
            Exception
        ) as error:  # of the device's memory perhaps; the others send the next leaf all the same
            failures.append(error)
            return leaf

    state = jax.tree_util.tree_map_with_path(received, state)
    if failures:
        raise failures[0]
    return state


def _gathered(
    what: Callable[[Any], str], state: Any, comm: Any, rank_local: Collection[str]
) -> list[list[tuple[str, str]]]:
    """Returns by rank the path of each leaf and its description, which is the same for all that are
    rank-local.
    """

    def described(path: str, leaf: Any) -> str:
        return "rank-local" if path in rank_local and _is_numeric(leaf) else what(leaf)

    mine = []
    trouble = ""
    failure = None
    try:
        mine = [(path, described(path, leaf)) for path, leaf in _leaves(state)]
    except (
        Exception
    ) as error:  # of memory perhaps, or the leaf was donated: the others wait all the same
        trouble = f"{type(error).__name__}: {error}"
        failure = error
    every = comm.allgather((mine, trouble))
    if failure is not None:
        raise failure
    for rank, (_, trouble) in enumerate(every):
        if trouble:
            raise ExchangeError(f"Rank {rank} cannot read its state: {trouble}")
    return [leaves for leaves, _ in every]


def _leaves(state: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


def _compare(all_ranks: list[list[tuple[str, str]]], *, hint: str) -> None:
    first = all_ranks[0]
    for rank, other in enumerate(all_ranks):
        for (path, mine), (theirs_path, theirs) in zip(first, other, strict=False):
            if path != theirs_path:
                raise ExchangeError(
                    f"The state's tree differs between ranks 0 and {rank}: `{path}` there, "
                    f"`{theirs_path}` here. {hint}"
                )
            if mine != theirs:
                raise ExchangeError(
                    f"The state differs between ranks 0 and {rank}, first at `{path}`: {mine} and "
                    f"{theirs}. Training would diverge silently. {hint}"
                )
        if len(other) != len(first):
            raise ExchangeError(
                f"The state's tree differs between ranks 0 and {rank}: {len(first)} and "
                f"{len(other)} leaves. {hint}"
            )


def _check_arrays(state: Any) -> None:
    """Comes after the comparison, so that all ranks raise, or none."""
    for path, leaf in _leaves(state):
        if not _is_numeric(leaf):
            raise TypeError(
                f"`{path or 'state'}` of the state is of type `{type(leaf).__name__}`: its leaves "
                "must be arrays or numbers, which can be compared between ranks. Leave texts and "
                "other objects out of the state."
            )


def _is_numeric(leaf: Any) -> bool:
    dtype = _host(leaf).dtype
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _form(leaf: Any) -> str:
    array = _host(leaf)
    if not _is_numeric(leaf):
        return f"of type {type(leaf).__name__}"
    return f"{array.dtype}{list(array.shape)}"


def _digest(leaf: Any) -> str:
    if not _is_numeric(leaf):
        return _form(leaf)
    array = np.ascontiguousarray(_host(leaf))
    # A view, not a copy, of arrays that may fill half of the memory.
    content = hashlib.blake2b(array.reshape(-1).view(np.uint8).data, digest_size=8)
    return f"{array.dtype}{list(array.shape)} {content.hexdigest()}"


def _broadcast_leaf(leaf: Any, comm: Any) -> np.ndarray:
    array = _host(leaf)
    content = np.frombuffer(array.tobytes(), np.uint8).copy()
    for start in range(0, content.size, _CHUNK_BYTES):
        comm.Bcast(content[start : start + _CHUNK_BYTES], root=0)
    return content.view(array.dtype).reshape(array.shape)


def _placed(values: np.ndarray, leaf: Any) -> Any:
    """Returns rank 0's values with the type and on the device of this rank's leaf."""
    if isinstance(leaf, jax.Array):
        # Its type and place stand fast, whatever the caller's contexts are: a job's do not hold on
        # the exchange lane.
        with jax.enable_x64(True), jax.default_device(next(iter(leaf.devices()))):
            return rebuild(leaf, forms_of(leaf), {"": values})
    return type(leaf)(values) if isinstance(leaf, bool | int | float | complex) else values
