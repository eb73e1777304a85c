"""mpi4jax's five calls as equations that no executable contains: the host makes them, between
executables, by mpi4py.

A trace that calls `allreduce` of this module instead of mpi4jax's has one equation per message,
which `HostProgram` carries out. Signatures and results are mpi4jax's. The buffers are NumPy arrays,
so Python's MPI binding sends and receives in place: no copy is made on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive

Receive = Callable[[tuple[int, ...], Any], np.ndarray]
"""Returns memory for a result of this shape and type."""


def allreduce(x: jax.Array, op: Any, *, comm: Any) -> jax.Array:
    """Reduces elementwise by an MPI operator."""
    return _bind("allreduce", x, x.shape, comm, op=op)


def allgather(x: jax.Array, *, comm: Any) -> jax.Array:
    """Stacks every rank's `x` along a new first axis."""
    return _bind("allgather", x, (comm.Get_size(), *x.shape), comm)


def alltoall(x: jax.Array, *, comm: Any) -> jax.Array:
    """Sends block `j` of the first axis to rank `j`; block `i` of the result came from rank `i`."""
    return _bind("alltoall", x, x.shape, comm)


def bcast(x: jax.Array, root: int, *, comm: Any) -> jax.Array:
    """Returns the root's `x`."""
    return _bind("bcast", x, x.shape, comm, root=root)


def sendrecv(
    x: jax.Array, like: jax.Array, source: Any, dest: Any, *, recvtag: int, comm: Any
) -> jax.Array:
    """Sends `x` to `dest` and returns what `source` sends, which has the shape of `like`."""
    return _bind(
        "sendrecv", x, like.shape, comm, source=int(source), dest=int(dest), recvtag=recvtag
    )


def _allreduce(x: np.ndarray, receive: Receive, *, comm: Any, op: Any, **_: Any) -> np.ndarray:
    result = receive(x.shape, x.dtype)
    comm.Allreduce(x, result, op)
    return result


def _allgather(x: np.ndarray, receive: Receive, *, comm: Any, shape: tuple[int, ...]) -> np.ndarray:
    result = receive(shape, x.dtype)
    comm.Allgather(x, result)
    return result


def _alltoall(x: np.ndarray, receive: Receive, *, comm: Any, **_: Any) -> np.ndarray:
    result = receive(x.shape, x.dtype)
    comm.Alltoall(x, result)
    return result


def _bcast(x: np.ndarray, receive: Receive, *, comm: Any, root: int, **_: Any) -> np.ndarray:
    # The root gets a copy as well: a later segment may overwrite the result, and `x` may be the
    # user's.
    result = receive(x.shape, x.dtype)
    if comm.Get_rank() == root:
        result[...] = x
    comm.Bcast(result, root)
    return result


def _sendrecv(
    x: np.ndarray,
    receive: Receive,
    *,
    comm: Any,
    source: int,
    dest: int,
    recvtag: int,
    shape: tuple[int, ...],
) -> np.ndarray:
    result = receive(shape, x.dtype)
    comm.Sendrecv(x, dest, 0, result, source, recvtag)
    return result


# Primitives don't have mpi4jax's names, by which the user's own calls are recognised.
_MAKE: dict[str, Callable[..., np.ndarray]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "bcast": _bcast,
    "sendrecv": _sendrecv,
}
PREFIX = "host_"
_PRIMITIVES = {name: Primitive(PREFIX + name) for name in _MAKE}
for _primitive in _PRIMITIVES.values():
    _primitive.def_abstract_eval(lambda x, *, shape, **_: ShapedArray(shape, x.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """An object of MPI as a parameter of an equation. JAX asks for a hash, which mpi4py's objects
    don't have.
    """

    wrapped: Any


def _bind(name: str, x: Any, shape: tuple[int, ...], comm: Any, **params: Any) -> jax.Array:
    handles = {key: _Handle(value) for key, value in params.items()}
    return _PRIMITIVES[name].bind(x, shape=shape, comm=_Handle(comm), **handles)


def is_message(eqn: Any) -> bool:
    """Whether an equation is a message that the host sends."""
    return eqn.primitive.name in _NAMES


def maker(eqn: Any, receive: Receive) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that makes an equation's exchange: it takes the operand and returns the
    result.

    The function waits for the peers. The operand must be contiguous, and is only read.

    Args:
        eqn: One that `is_message`.
        receive: Returns the memory for the result.
    """
    params = {
        key: value.wrapped if isinstance(value, _Handle) else value
        for key, value in eqn.params.items()
    }
    return partial(_MAKE[eqn.primitive.name.removeprefix(PREFIX)], receive=receive, **params)


_NAMES = frozenset(p.name for p in _PRIMITIVES.values())
