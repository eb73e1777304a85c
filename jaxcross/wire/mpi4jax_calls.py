"""A program's own mpi4jax calls: how ranks compare them, and which communicators they use.

If two jobs call mpi4jax on the same communicator, or if the script also uses that communicator
outside of its steps, MPI may match a message with the wrong receive. So each job gets its own
communicators, and we replace the user's communicators by these in the job's calls.

When a job ends, we keep its communicators, and give them to the next job on the same ranks. We
can't create new ones for every job, because MPI only has a few thousand of them, and we can't free
them, because compiled executables contain their handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

from jaxcross import _jax_compat as compat
from jaxcross.program import Exchange, Program
from jaxcross.wire.recognition import recognise, unwrap

CommKey = tuple[tuple[int, ...], str]
"""A communicator's members in order, and the name that the user gave it."""


@dataclass(slots=True)
class _Lent:
    comm: Any
    job: ref[Any]


@dataclass(slots=True)
class JobComms:
    """The communicators of each job on this rank.

    Only the exchange lane adds communicators. The jobs' threads may read at the same time.
    """

    _lent: dict[tuple[CommKey, int], _Lent] = field(default_factory=dict)

    def for_job(self, job: Any) -> dict[CommKey, Any]:
        """Returns a job's communicators."""
        return {key: lent.comm for (key, _), lent in self._lent.copy().items() if lent.job() is job}

    def in_use(self) -> list[tuple[CommKey, int]]:
        """Returns the key and number of each communicator that a job on this rank still uses."""
        return [
            place
            for place, lent in self._lent.copy().items()
            if (job := lent.job()) and not job.done.is_set()
        ]

    def assign(self, job: Any, key: CommKey, number: int, make: Callable[[], Any]) -> None:
        """Gives a job the communicator with this key and number. Creates it if it doesn't exist."""
        lent = self._lent.get((key, number))
        self._lent[key, number] = _Lent(make() if lent is None else lent.comm, ref(job))


def calls_of(
    program: Program, members: Callable[[Exchange], tuple[int, ...]]
) -> tuple[Exchange, ...]:
    """Returns all exchanges of a program in order, each with its group's `ranks`.

    A program may use several communicators with the same ranks and the same name. To tell them
    apart, we number them by a suffix of the name: `#1` for the second communicator, `#2` for the
    third one, and so on.

    Args:
        program: The program.
        members: Returns the ranks of an exchange over named axes.
    """
    found: list[Exchange] = []
    alike: dict[CommKey, list[int]] = {}  # handles of communicators with equal members and names
    for segment in program.collectives:
        comms = _comms_in(segment.jaxpr, dict(program.axes))
        for exchange, comm in zip(segment.exchanges, comms, strict=True):
            if comm is None:
                found.append(
                    replace(exchange, params=(*exchange.params, ("ranks", members(exchange))))
                )
                continue
            handles = alike.setdefault(comm_key_of(exchange), [])
            handle = handle_of(comm)
            if handle not in handles:
                handles.append(handle)
            number = handles.index(handle)
            if number:
                params = {**dict(exchange.params), "comm": f"{comm_key_of(exchange)[1]}#{number}"}
                exchange = replace(exchange, params=tuple(params.items()))
            found.append(exchange)
    return tuple(found)


def comm_key_of(exchange: Exchange) -> CommKey:
    """Returns the members and the name of a call's communicator.

    Unlike its handle, these are the same on all ranks.
    """
    params = dict(exchange.params)
    return params["ranks"], params.get("comm", "")


def handle_of(comm: Any) -> int:
    """Returns MPI's handle of a communicator, which is only valid in this process."""
    from mpi4py import MPI

    return MPI._handleof(comm)


def with_communicators(jaxpr: compat.Jaxpr, comms: Mapping[CommKey, Any]) -> compat.Jaxpr:
    """Returns the open jaxpr in which mpi4jax's calls use the communicators in `comms`.

    Also does so in nested jaxprs. A call whose communicator isn't in `comms` stays as it is.
    """

    def changed(eqn: compat.Equation) -> compat.Equation:
        found = recognise(eqn, {}) if eqn.primitive.name.endswith("_mpi") else None
        if found is None:
            return compat.map_sub_jaxprs(eqn, lambda inner: with_communicators(inner, comms))
        comm = comms.get(comm_key_of(found[0]))
        wrapper = type(eqn.params["comm"])
        return eqn if comm is None else eqn.replace(params={**eqn.params, "comm": wrapper(comm)})

    return compat.replace_eqns(jaxpr, [changed(eqn) for eqn in jaxpr.eqns], jaxpr.outvars)


def _comms_in(jaxpr: compat.Jaxpr, axes: Mapping[str, int]) -> Iterator[Any]:
    """Yields the communicator of each exchange, in the order of `Segment.exchanges`.

    For an exchange over named axes it yields None.
    """
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        found = recognise(eqn, axes)
        if found is not None:
            yield from (
                unwrap(eqn.params["comm"]) if x.op.startswith("mpi.") else None for x in found
            )
            continue
        for sub in compat.sub_jaxprs(eqn):
            yield from _comms_in(sub, axes)
