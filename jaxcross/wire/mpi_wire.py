"""The exchange lane's wire, which recognises exchanges and lowers them to MPI messages.

Exchanges can be sent over MPI in two ways; all ranks of a world use the same. With *mpi4jax*, each
segment of the step is a single XLA executable that contains the exchanges as calls. With *mpi4py*,
the host performs each exchange between two executables and receives into its own buffers
(`host_program`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

from jax.extend.core import jaxpr_as_fun

from jaxcross import _jax_compat as compat
from jaxcross.program import Exchange, Lowered, Program, Traceable
from jaxcross.wire import host_calls, primitive
from jaxcross.wire.host_program import HostLowered, holds_message
from jaxcross.wire.lower import calls_mpi4jax, lower
from jaxcross.wire.mpi4jax_calls import CommKey, calls_of
from jaxcross.wire.mpi_messages import MAX_COUNT, Channel
from jaxcross.wire.recognition import group_of, recognise

if TYPE_CHECKING:
    from jaxcross.world import World

WireLibrary = Literal["mpi4jax", "mpi4py"]
"""The library that performs the exchanges."""


@final
class MpiWire:
    """Implements `jaxcross.program.ir.Wire` over MPI. Immutable.

    Args:
        world: The ranks and their communicators.
        over: The library that performs the exchanges. If None, the world decides.
        max_count: Maximum number of elements per message. Longer messages are split.
        comms: Replacements for the communicators in the user's own mpi4jax calls.
    """

    __slots__ = ("_comms", "_max_count", "_over", "_world")

    def __init__(
        self,
        world: World,
        *,
        over: WireLibrary | None = None,
        max_count: int = MAX_COUNT,
        comms: Mapping[CommKey, Any] | None = None,
    ) -> None:
        self._world = world
        self._over = world.over if over is None else over
        self._max_count = max_count
        self._comms = dict(comms or {})

    def recognise(
        self, eqn: compat.Equation, axes: Mapping[str, int]
    ) -> tuple[Exchange, ...] | None:
        """Returns the equation's exchanges over `axes`, or None. Does not communicate."""
        return recognise(eqn, axes)

    def lower(self, jaxpr: compat.Jaxpr, axes: Mapping[str, int]) -> Lowered:
        """Lowers a closed jaxpr's exchanges to MPI messages, in the order of the equations.

        If the ranks in an exchange don't have a communicator yet, this creates it and waits for the
        other ranks to do the same.

        If the jaxpr contains the user's own mpi4jax calls, all of its exchanges go through mpi4jax,
        even if the world has chosen mpi4py. That's the only way for XLA to keep all of them in
        order.
        """
        grid = self._world.rank_grid(axes)
        if self._over == "mpi4jax" or calls_mpi4jax(jaxpr):
            import mpi4jax

            calls: Any = mpi4jax
        else:
            calls = host_calls

        def connect(names: Sequence[str], groups: Any) -> Channel:
            ranks = grid.group(names, groups)
            comm = self._world.communicator(grid, names, groups)
            place = ranks.index(grid.rank)
            return Channel(
                calls=calls, comm=comm, rank=place, size=len(ranks), max_count=self._max_count
            )

        lowered = lower(jaxpr, grid, connect, self._comms)
        if holds_message(lowered):
            return HostLowered(lowered, self._world.arena.take, self._world.abort)
        if not lowered.effects:  # nothing to send, because every group consists of a single rank
            return Traceable(jaxpr_as_fun(lowered))
        lowered, consts = compat.constants_first(lowered)
        return Traceable(lambda *args: primitive.bind(lowered, *consts, *args))

    def calls(self, program: Program) -> tuple[Exchange, ...]:
        """Returns a program's exchanges in order, each with the `ranks` in its group.

        Does not communicate.
        """
        grid = self._world.rank_grid(dict(program.axes))
        return calls_of(program, lambda exchange: grid.group(*group_of(exchange, grid)))

    def create_communicators(self, exchanges: Iterable[Exchange], axes: Mapping[str, int]) -> None:
        """Creates the communicators for these exchanges up front, so that `lower` doesn't have to
        wait.

        Goes through the exchanges in order. For each group that doesn't have a communicator yet,
        waits for the group's other members.
        """
        grid = self._world.rank_grid(axes)
        # The user's own mpi4jax calls, which have no axes, already have a communicator.
        for exchange in (x for x in exchanges if x.axes):
            self._world.communicator(grid, *group_of(exchange, grid))

    def coords(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Returns this rank's index along each axis. Does not communicate."""
        grid = self._world.rank_grid(axes)
        return dict(zip(grid.names, grid.coords, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MpiWire) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        """Returns everything about this wire that affects executables.

        That includes the world, because executables contain handles to its communicators.
        """
        return (
            id(self._world),
            self._over,
            self._max_count,
            tuple((k, id(c)) for k, c in sorted(self._comms.items())),
        )
