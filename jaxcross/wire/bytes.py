"""Computes in two independent ways how many bytes a rank receives in an exchange.

`wire_bytes` predicts the number from a formula before the exchange is turned into MPI messages;
`issued_bytes` adds up the resulting messages. The tests check that the two agree, so a mistake in
either won't go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross.program import Exchange
from jaxcross.wire import host_calls, mpi_collectives, mpi_messages

_REDUCE = ("psum", "pmax", "pmin", "mpi.allreduce")
_GATHER = ("all_gather", "mpi.allgather", "mpi.gather")
_BLOCKS = ("all_to_all", "reduce_scatter", "mpi.alltoall")


def wire_bytes(exchange: Exchange, sizes: Mapping[str, int]) -> int:
    """Predicts how many bytes a rank receives in an exchange (on the rank that receives most).

    When each of P ranks contributes n bytes, a rank receives:

    - 2(P-1)/P n bytes in an all-reduce, regardless of whether MPI uses a ring or recursive halving,
    - (P-1) n bytes in an all-gather,
    - (P-1)/P n bytes in an all-to-all or a reduce-scatter,
    - n bytes in a permutation or a broadcast.

    Inside a loop, the number of bytes is multiplied by the number of iterations. A `while` loop
    counts as a single iteration, because we can't predict how often it will run. Does not
    communicate.

    Args:
        exchange: The exchange to predict.
        sizes: Number of ranks along each axis.
    """
    return exchange.times * _once(exchange, sizes)


def group_size(exchange: Exchange, sizes: Mapping[str, int]) -> int:
    """Returns the size of the largest group of an exchange, given the axis sizes."""
    params = dict(exchange.params)
    groups = params.get("groups")
    ranks = params.get("ranks")
    if groups:
        return max(map(len, groups))
    if ranks:
        return len(ranks)
    return math.prod(sizes[a] for a in exchange.axes)


def _once(exchange: Exchange, sizes: Mapping[str, int]) -> int:
    params = dict(exchange.params)
    size = group_size(exchange, sizes)
    count = exchange.count
    item = _itemsize(exchange.dtype)
    if (
        exchange.op == "psum"
        and mpi_messages.is_narrow_float(jnp.dtype(exchange.dtype))
        and size > 1
    ):
        if mpi_collectives.gathers(count, item, size):
            return (size - 1) * count * item
        return 2 * (size - 1) * -(-count // size) * item
    if exchange.op in ("pmax", "pmin") and jnp.issubdtype(
        jnp.dtype(exchange.dtype), jnp.complexfloating
    ):
        return (size - 1) * count * item
    if exchange.op in ("pmax", "pmin") and exchange.dtype.endswith("fnuz"):
        # These 8-bit floats are sent as float32; see `mpi_collectives._extreme`.
        item = _itemsize("float32")
    if exchange.op == "ppermute":
        moved = any(source != dest for source, dest in params["perm"])
        return count * item if moved else 0
    return math.ceil(_received(_kind(exchange.op), count * item, size))


def issued_bytes(jaxpr: compat.Jaxpr, size: int) -> int:
    """Returns how many bytes this rank receives in one run of a lowered jaxpr.

    Assumes that `size` ranks take part in every message.
    """
    return math.ceil(sum((_messages(jaxpr, size)), Fraction(0)))


def _messages(jaxpr: compat.Jaxpr, size: int) -> list[Fraction]:
    found: list[Fraction] = []
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        for sub in compat.sub_jaxprs(eqn):
            found += _messages(sub, size) * eqn.params.get("length", 1)  # iterations of a `scan`
        call = call_of(eqn)
        if call is None:
            continue
        aval = eqn.outvars[0].aval if call == "sendrecv" else eqn.invars[0].aval
        nbytes = aval.size * _itemsize(str(aval.dtype))
        found.append(_received(_kind(f"mpi.{call}"), nbytes, size))
    return found


def call_of(eqn: compat.Equation) -> str | None:
    """Returns the MPI call made by an equation of a lowered jaxpr, e.g. `allreduce`, or None.

    The name is the same for mpi4jax and host calls.
    """
    name = eqn.primitive.name
    if host_calls.is_message(eqn):
        return name.removeprefix(host_calls.PREFIX)
    return name.removesuffix("_mpi") if name.endswith("_mpi") else None


def _kind(op: str) -> str:
    for kind, members in (("reduce", _REDUCE), ("gather", _GATHER), ("blocks", _BLOCKS)):
        if op in members:
            return kind
    return "none" if op in ("mpi.barrier", "mpi.send") else "copy"


def _received(kind: str, nbytes: int, size: int) -> Fraction:
    factor = {
        "reduce": Fraction(2 * (size - 1), size),
        "gather": Fraction(size - 1),
        "blocks": Fraction(size - 1, size),
        "copy": Fraction(min(size - 1, 1)),
        "none": Fraction(0),
    }[kind]
    return factor * nbytes


def _itemsize(dtype: str) -> int:
    return np.dtype(jnp.dtype(dtype)).itemsize
