"""mpi4jax's five calls as equations that the host executes with mpi4py, between executables.

The functions here have the same signatures and results as mpi4jax's, so the rest of the wire works
with either. Tracing a function such as `allreduce` adds an equation for the message to the jaxpr.
XLA never gets to compile this equation: `HostProgram` splits the program there, and calls mpi4py
between the two executables. The buffers are NumPy arrays, which mpi4py can send from and receive
into without copying.
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
"""Allocates memory for a result with the given shape and element type."""


def allreduce(x: jax.Array, op: Any, *, comm: Any) -> jax.Array:
    """Reduces `x` elementwise over the ranks with an MPI operator."""
    return _bind("allreduce", x, x.shape, comm, op=op)


def allgather(x: jax.Array, *, comm: Any) -> jax.Array:
    """Stacks every rank's `x` along a new first axis."""
    return _bind("allgather", x, (comm.Get_size(), *x.shape), comm)


def alltoall(x: jax.Array, *, comm: Any) -> jax.Array:
    """Sends block `j` of the first axis to rank `j`. Block `i` of the result is from rank `i`."""
    return _bind("alltoall", x, x.shape, comm)


def bcast(x: jax.Array, root: int, *, comm: Any) -> jax.Array:
    """Returns the root's `x`."""
    return _bind("bcast", x, x.shape, comm, root=root)


def sendrecv(
    x: jax.Array, like: jax.Array, source: Any, dest: Any, *, recvtag: int, comm: Any
) -> jax.Array:
    """Sends `x` to `dest` and returns the message from `source`, which is shaped like `like`."""
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
    # We copy `x` even on the root. The result has the same values there, but it can't be the same
    # array: `x` may belong to the user, and a later segment of the step may overwrite the result in
    # place.
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


# Prefix the names of our primitives to tell them apart from mpi4jax's, by which we recognise the
# user's own mpi4jax calls.
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
    """Wraps an MPI object to make it usable as a parameter of an equation.

    JAX requires parameters to be hashable, which mpi4py's objects aren't.
    """

    wrapped: Any


def _bind(name: str, x: Any, shape: tuple[int, ...], comm: Any, **params: Any) -> jax.Array:
    handles = {key: _Handle(value) for key, value in params.items()}
    return _PRIMITIVES[name].bind(x, shape=shape, comm=_Handle(comm), **handles)


def is_message(eqn: Any) -> bool:
    """Whether an equation is a message sent by the host."""
    return eqn.primitive.name in _NAMES


def maker(eqn: Any, receive: Receive) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that performs an equation's exchange on a NumPy operand.

    The function waits for the other ranks in the exchange. The operand must be contiguous and is
    left unmodified.

    Args:
        eqn: An equation for which `is_message` is true.
        receive: Allocates memory for the result.
    """
    params = {
        key: value.wrapped if isinstance(value, _Handle) else value
        for key, value in eqn.params.items()
    }
    return partial(_MAKE[eqn.primitive.name.removeprefix(PREFIX)], receive=receive, **params)


_NAMES = frozenset(p.name for p in _PRIMITIVES.values())
