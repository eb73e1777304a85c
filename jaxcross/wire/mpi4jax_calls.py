"""A program's own mpi4jax calls: how ranks compare them and which communicators they use.

If two jobs call mpi4jax on the same communicator, or if the script also uses that communicator
outside its steps, MPI may match a message with the wrong receive. So each job gets its own
communicators, which we substitute for the user's in the job's calls.

When a job ends, we keep its communicators and hand them to the next job on the same ranks. Creating
new ones for every job isn't an option, because MPI only has a few thousand of them, and we can't
free them either, because compiled executables contain their handles.
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
"""A communicator's members in order, and the name the user gave it."""


@dataclass(slots=True)
class _Lent:
    comm: Any
    job: ref[Any]


@dataclass(slots=True)
class JobComms:
    """Keeps track of the communicators of each job on this rank.

    Only the exchange lane adds communicators, but job threads may read concurrently.
    """

    _lent: dict[tuple[CommKey, int], _Lent] = field(default_factory=dict)

    def for_job(self, job: Any) -> dict[CommKey, Any]:
        """Returns a job's communicators."""
        return {key: lent.comm for (key, _), lent in self._lent.copy().items() if lent.job() is job}

    def in_use(self) -> list[tuple[CommKey, int]]:
        """Returns the key and number of each communicator still in use by a job on this rank."""
        return [
            place
            for place, lent in self._lent.copy().items()
            if (job := lent.job()) and not job.done.is_set()
        ]

    def assign(self, job: Any, key: CommKey, number: int, make: Callable[[], Any]) -> None:
        """Gives a job the communicator with this key and number, creating it if necessary."""
        lent = self._lent.get((key, number))
        self._lent[key, number] = _Lent(make() if lent is None else lent.comm, ref(job))


def calls_of(
    program: Program, members: Callable[[Exchange], tuple[int, ...]]
) -> tuple[Exchange, ...]:
    """Returns all of a program's exchanges in order, each with the `ranks` in its group.

    A program may use several communicators with the same ranks and name. To tell them apart, we add
    a suffix to the name: `#1` for the second communicator, `#2` for the third, etc.

    Args:
        program: The program.
        members: Returns the ranks in an exchange over named axes.
    """
    found: list[Exchange] = []
    alike: dict[CommKey, list[int]] = {}  # handles of communicators with the same members and name
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
    """Returns the members and name of a call's communicator.

    Unlike the handle, these are identical on all ranks.
    """
    params = dict(exchange.params)
    return params["ranks"], params.get("comm", "")


def handle_of(comm: Any) -> int:
    """Returns MPI's handle for a communicator, which is only valid in this process."""
    from mpi4py import MPI

    return MPI._handleof(comm)


def with_communicators(jaxpr: compat.Jaxpr, comms: Mapping[CommKey, Any]) -> compat.Jaxpr:
    """Returns an open jaxpr whose mpi4jax calls use the communicators in `comms`.

    Includes nested jaxprs. Calls with a communicator that isn't in `comms` are left unchanged.
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

    Yields None for exchanges over named axes.
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
