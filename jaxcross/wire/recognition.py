"""Recognises exchanges: JAX's named-axis collectives over our axes, and mpi4jax's primitives.

These functions only read a program's equations and never communicate. Ranks that run the same step
find the same exchanges, except for mpi4jax's sends and receives, whose peers depend on the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.errors import ExchangeError
from jaxcross.program import Exchange, holds
from jaxcross.wire.rank_grid import RankGrid

# Maps JAX's names for collectives to ours. JAX has several variants of some collectives that send
# the same data and only differ in the type of the result, so we don't distinguish between them.
_OPS = {
    "psum": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "pmax": "pmax",
    "unreduced_pmax": "pmax",
    "pmin": "pmin",
    "unreduced_pmin": "pmin",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "pbroadcast",
}
REDUCTIONS = ("psum", "pmax", "pmin")

# Collectives we don't implement over MPI, and what to use instead.
_UNSUPPORTED = {
    "ragged_all_to_all": "pad to equal blocks and use `jax.lax.all_to_all`",
    "pbroadcast_dynamic": "use `jax.lax.pbroadcast` with a fixed source",
    "psend": "use `jax.lax.ppermute`",
    "precv": "use `jax.lax.ppermute`",
}

# Primitives that name our axes but don't send anything.
LOCAL_PRIMITIVES = frozenset({"pvary", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"})


def recognise(eqn: compat.Equation, axes: Mapping[str, int]) -> tuple[Exchange, ...] | None:
    """Returns an equation's exchanges over `axes`, one per operand, or None if it has none.

    An mpi4jax call always counts as one exchange, regardless of how many operands it has. The
    exception is the transpose of an mpi4jax all-reduce, which doesn't count at all because mpi4jax
    doesn't send anything for it.

    Raises:
        ExchangeError: The equation is a collective over our axes that we can't perform over MPI.
    """
    name = eqn.primitive.name
    if name.endswith("_mpi"):
        return _recognise_mpi(eqn)
    named = _axes_of(eqn)
    ours = tuple(a for a in named if isinstance(a, str) and a in axes)
    if not ours or name in LOCAL_PRIMITIVES or name == "axis_index":
        return None
    if name not in _OPS:
        if name in _UNSUPPORTED or name.endswith(("_start", "_done")):
            remedy = _UNSUPPORTED.get(
                name, "use the blocking collective: jaxcross overlaps it by itself"
            )
            raise ExchangeError(
                f"`{name}` over {', '.join(map(repr, ours))} cannot be made over MPI, at "
                f"{compat.source_of(eqn)}. Instead, {remedy}. "
                "See docs/reference/limits-exchanges.md#collectives."
            )
        return None
    foreign = [a for a in named if not isinstance(a, int) and a not in axes]
    if foreign:
        raise ExchangeError(
            f"`{name}` mixes axes of jaxcross ({', '.join(map(repr, ours))}) with others "
            f"({', '.join(map(repr, foreign))}), at {compat.source_of(eqn)}. Exchange over them "
            "one after the other."
        )
    op = _OPS[name]
    positions = tuple(a for a in named if isinstance(a, int))
    params = _params(op, eqn.params) + ((("positions", positions),) if positions else ())
    source = compat.source_of(eqn)
    _check_indices(op, dict(params), ours, math.prod(axes[a] for a in ours), source)
    return tuple(
        Exchange(
            op=op,
            axes=ours,
            dtype=str(t.dtype),
            shape=tuple(n for i, n in enumerate(t.shape) if i not in positions),
            params=params,
            source=source,
        )
        for t in map(compat.array_type, eqn.invars)
    )


def group_of(exchange: Exchange, mesh: RankGrid) -> tuple[tuple[str, ...], Any]:
    """Returns the axes and groups of an exchange, as arguments for `RankGrid.group`.

    The order of the axes determines how the ranks in a group are numbered.
    """
    # Number a group's ranks in the same way as XLA. Normally that's by the order in which the user
    # names the axes, but for `ppermute`, it's by the order of the axes in the mesh.
    axes = exchange.axes
    if exchange.op == "ppermute":
        axes = tuple(a for a in mesh.names if a in axes)
    return axes, dict(exchange.params).get("groups")


def _check_indices(
    op: str, params: Mapping[str, Any], axes: Sequence[str], size: int, source: str
) -> None:
    """Checks a collective's indices, like XLA does for `pmap`.

    MPI would terminate all ranks if we passed it invalid indices.
    """
    perm = params.get("perm", ((params["source"], 0),) if op == "pbroadcast" else ())
    for what, indices in (
        ("sources", [s for s, _ in perm]),
        ("destinations", [d for _, d in perm]),
    ):
        if len(set(indices)) < len(indices) or not set(indices) <= set(range(size)):
            raise ExchangeError(
                f"{what} of `{op}` over {', '.join(map(repr, axes))} must be indices from 0 to "
                f"{size - 1}, each at most once, got {indices}, at {source}."
            )
    groups = params.get("groups")
    if groups is not None and sorted(i for group in groups for i in group) != list(range(size)):
        raise ExchangeError(
            f"`axis_index_groups` of `{op}` over {', '.join(map(repr, axes))} must name each index "
            f"from 0 to {size - 1} once, got {[list(group) for group in groups]}, at {source}."
        )


def names_axis(eqn: compat.Equation, axes: Mapping[str, int]) -> bool:
    """Whether an equation names one of our axes."""
    return any(isinstance(a, str) and a in axes for a in _axes_of(eqn))


def involves_axes(eqn: compat.Equation, axes: Mapping[str, int]) -> bool:
    """Whether an equation is an exchange or names one of our axes, at any depth."""

    def concerned(eqn: compat.Equation) -> bool:
        return eqn.primitive.name.endswith("_mpi") or names_axis(eqn, axes)

    return concerned(eqn) or any(holds(sub, concerned) for sub in compat.sub_jaxprs(eqn))


def names_axis_inside(jaxpr: compat.Jaxpr, axes: Mapping[str, int]) -> bool:
    """Whether any equation in the jaxpr, at any depth, names one of our axes."""
    return holds(jaxpr, lambda eqn: names_axis(eqn, axes))


def _axes_of(eqn: compat.Equation) -> tuple[Any, ...]:
    value = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    value = tuple(value) if isinstance(value, tuple | list | frozenset | set) else (value,)
    return tuple(a for a in value if isinstance(a, str | int))


def _params(op: str, params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns all parameters that affect the messages, other than the operand and the axes.

    They're hashable and don't contain any MPI handles.
    """
    found: list[tuple[str, Any]] = []
    if op == "all_gather":
        found += [("dimension", params["all_gather_dimension"]), ("tiled", params["tiled"])]
    elif op == "reduce_scatter":
        found += [("dimension", params["scatter_dimension"]), ("tiled", params["tiled"])]
    elif op == "all_to_all":
        found += [("split_axis", params["split_axis"]), ("concat_axis", params["concat_axis"])]
    elif op == "ppermute":
        found += [("perm", tuple((int(s), int(d)) for s, d in params["perm"]))]
    elif op == "pbroadcast":
        found += [("source", int(params["source"]))]
    groups = params.get("axis_index_groups")
    if groups is not None:
        found += [("groups", tuple(tuple(int(i) for i in g) for g in groups))]
    return tuple(found)


def _recognise_mpi(eqn: compat.Equation) -> tuple[Exchange, ...] | None:
    """Recognises an mpi4jax call on one of the user's communicators.

    The ranks compare their exchanges, so an exchange has to identify its communicator in a way
    that's the same on all ranks. MPI's handle won't do, because it's different in every process. We
    list the communicator's members instead.
    """
    params = eqn.params
    if params.get("transpose"):
        return None  # mpi4jax defines the transpose of an all-reduce as the identity
    comm = unwrap(params["comm"])
    op = eqn.primitive.name.removesuffix("_mpi")
    source = compat.source_of(eqn, outside="mpi4jax/_src")
    if not comm:  # `MPI.COMM_NULL` is falsy
        raise ExchangeError(
            f"`mpi4jax.{op}` is called with `MPI.COMM_NULL`, at {source}: this rank is no member "
            "of that communicator (`Split` gives it none for the color `MPI.UNDEFINED`), or it was "
            "freed. Make the call on members only."
        )
    found: list[tuple[str, Any]] = [("ranks", world_ranks(comm))]
    label = comm.Get_name()
    if label:
        found.append(("comm", re.sub(r"\W", "_", label)))
    if "op" in params:
        found.append(("reduction", _reduction_name(unwrap(params["op"]))))
    _check_numbers(op, params, len(found[0][1]), source)
    if "root" in params:
        found.append(("root", int(params["root"])))
    found += _point_to_point(op, params)
    if op == "sendrecv":
        got = compat.array_type(eqn.outvars[0])
        found += [("recv_dtype", str(got.dtype)), ("recv_shape", tuple(got.shape))]
    aval = compat.array_type(eqn.invars[0]) if eqn.invars else None
    return (
        Exchange(
            op=f"mpi.{op}",
            axes=(),
            dtype="uint8" if aval is None else str(aval.dtype),
            shape=(0,) if aval is None else tuple(aval.shape),
            params=tuple(found),
            source=source,
        ),
    )


def _check_numbers(call: str, params: Mapping[str, Any], size: int, source: str) -> None:
    """Checks the ranks and tags in an mpi4jax call.

    MPI would terminate the job if they were invalid.
    """
    from mpi4py import MPI

    others = {"dest": (MPI.PROC_NULL,), "source": (MPI.PROC_NULL, MPI.ANY_SOURCE)}
    for name in ("root", "dest", "source"):
        number = int(params.get(name, 0))
        if not 0 <= number < size and number not in others.get(name, ()):
            raise ExchangeError(
                f"`{name}` of `mpi4jax.{call}` must be a rank of its communicator, 0 to "
                f"{size - 1}, got {number}, at {source}."
            )
    for name in ("tag", "sendtag", "recvtag"):
        tag = int(params.get(name, 0))
        if tag < 0 and (tag != MPI.ANY_TAG or name == "sendtag" or call == "send"):
            raise ExchangeError(
                f"`{name}` of `mpi4jax.{call}` must be 0 or more, got {tag}, at {source}."
            )


def _point_to_point(op: str, params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the peers and tags of a send or receive.

    A peer is a rank of the communicator, None for `PROC_NULL`, or `any`. A tag is a number or
    `any`.
    """
    from mpi4py import MPI

    peers: dict[int, Any] = {MPI.PROC_NULL: None, MPI.ANY_SOURCE: "any"}
    ends = {name: int(params[name]) for name in ("dest", "source") if name in params}
    found = [(name, peers.get(number, number)) for name, number in ends.items()]
    tags = {"send": {"send_tag": "tag"}, "recv": {"recv_tag": "tag"}}
    for name, param in tags.get(op, {"send_tag": "sendtag", "recv_tag": "recvtag"}).items():
        if param in params:
            tag = int(params[param])
            found.append((name, "any" if tag == MPI.ANY_TAG else tag))
    return found


def unwrap(value: Any) -> Any:
    """Returns the MPI object inside a parameter of an mpi4jax equation."""
    # mpi4jax wraps MPI's handles in a class with a hash but no equality, so two wrappers of the
    # same handle never compare equal. Unwrap them.
    return value.wrapped if type(value).__name__ == "HashableMPIType" else value


def world_ranks(comm: Any) -> tuple[int, ...]:
    """Returns a communicator's members as ranks of `COMM_WORLD`, in the communicator's order."""
    from mpi4py import MPI

    group = comm.Get_group()
    world = MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, None, world))
    finally:
        group.Free()
        world.Free()


def _reduction_name(op: Any) -> str:
    from mpi4py import MPI

    names = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
    return next((n for n in names if getattr(MPI, n) == op), "user")
