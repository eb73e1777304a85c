"""The wire of one exchange lane: recogniser and lowerer over a world's communicators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Exchange, Program
from jaxcross.wire.calls import calls_of
from jaxcross.wire.job_comms import Key
from jaxcross.wire.lower import lower
from jaxcross.wire.messages import MAX_COUNT, Channel
from jaxcross.wire.rank_grid import RankGrid
from jaxcross.wire.recognise import group_of, recognise


class WireWorld(Protocol):
    """The ranks and communicators that a wire uses; see `jaxcross.world.World`."""

    def rank_grid(self, axes: str | Mapping[str, int]) -> RankGrid: ...
    def communicator(
        self, grid: RankGrid, axes: Sequence[str], groups: Sequence[Sequence[int]] | None = None, *, lane: int = 0
    ) -> Any: ...


@final
class MpiWire:
    """`jaxcross.program.ir.Wire` over MPI. Immutable; its communicators belong to one lane.

    Args:
        world: The ranks and their communicators.
        lane: The exchange lane that will run what is lowered. Two lanes never share a communicator.
        max_count: Elements of the longest message; longer ones are split.
        comms: In place of the communicators that mpi4jax's own calls name.
    """

    __slots__ = ("_comms", "_lane", "_max_count", "_world")

    def __init__(
        self, world: WireWorld, *, lane: int = 0, max_count: int = MAX_COUNT, comms: Mapping[Key, Any] | None = None
    ) -> None:
        self._world = world
        self._lane = lane
        self._max_count = max_count
        self._comms = dict(comms or {})

    def recognise(self, eqn: compat.Equation, axes: Mapping[str, int]) -> tuple[Exchange, ...] | None:
        """The equation's exchanges over `axes`, or None. Neither waits nor communicates."""
        return recognise(eqn, axes)

    def lower(self, jaxpr: compat.Jaxpr, axes: Mapping[str, int]) -> Callable[..., list[Any]]:
        """A jit-traceable function that computes the closed `jaxpr`, its exchanges made over MPI.

        Waits for the other members of each group that has no communicator yet. The function's exchanges run in
        equation order; a run of it waits for the peers.
        """
        grid = self._world.rank_grid(axes)

        def connect(names: Sequence[str], groups: Any) -> Channel:
            ranks = grid.group(names, groups)
            comm = self._world.communicator(grid, names, groups, lane=self._lane)
            return Channel(comm=comm, rank=ranks.index(grid.rank), size=len(ranks), max_count=self._max_count)

        return lower(jaxpr, grid, connect, self._comms)

    def calls(self, program: Program) -> tuple[Exchange, ...]:
        """Returns all exchanges of a program in order, each with its `ranks`. Neither waits nor communicates."""
        grid = self._world.rank_grid(dict(program.axes))
        return calls_of(program, lambda exchange: grid.group(*group_of(exchange, grid)))

    def create_communicators(self, exchanges: Iterable[Exchange], axes: Mapping[str, int]) -> None:
        """Makes the communicators that these exchanges need, so that `lower` does not have to wait for other ranks.

        Waits for the other members of each group that has none yet, in the order of `exchanges`.
        """
        grid = self._world.rank_grid(axes)
        for exchange in (x for x in exchanges if x.axes):  # mpi4jax's own calls have theirs
            self._world.communicator(grid, *group_of(exchange, grid), lane=self._lane)

    def coords(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Returns this rank's index along each axis. Pure."""
        grid = self._world.rank_grid(axes)
        return dict(zip(grid.names, grid.coords, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MpiWire) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        """Returns all that executables depend on: they hold handles of this world's communicators of this lane."""
        return id(self._world), self._lane, self._max_count, tuple((k, id(c)) for k, c in sorted(self._comms.items()))
