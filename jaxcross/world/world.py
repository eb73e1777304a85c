"""A process's view of the MPI world: its rank, communicators and watchdog, and how to abort."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from jaxcross._endings import ExitKind
from jaxcross.errors import clause, first_line
from jaxcross.health import (
    INTERRUPTED,
    TERMINATED,
    AbortReason,
    FlightRecorder,
    Monitor,
    WaitingFor,
    Watchdog,
    abort_everywhere,
    missing_ranks,
)
from jaxcross.wire import Arena, JobComms, RankGrid, make_rank_grid
from jaxcross.world.control_plane import Control
from jaxcross.world.exchange_owner import ExchangeOwner
from jaxcross.world.mailbox import Mailbox
from jaxcross.world.neighbours import Accepts, Neighbours
from jaxcross.world.sched_slice import ask_for_short_slices

if TYPE_CHECKING:
    from jaxcross.program import ExecutableCache
    from jaxcross.wire import MpiWire, WireLibrary

_AGREEMENT = "agreement of the ranks that exchange with one another"


@dataclass(slots=True)
class _GroupComm:
    """The communicator of a group of ranks, once it has been created.

    Creating a communicator waits for all members of the group, and the lock is held meanwhile. So
    each group has a lock of its own. With a common lock, a thread that waits for one group would
    block threads that need another group, and the ranks could deadlock.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    comm: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks, seen from this one. Created by `jaxcross.initialize`, once per process.

    Attributes:
        rank: This process's number among all processes, from 0 to size - 1.
        size: Number of ranks.
        local_rank: This process's number among the processes on its node.
        local_size: Number of ranks on this node.
        vendor: The MPI implementation, e.g. `mpich` or `openmpi`.
        over: The library for the exchanges, `mpi4jax` or `mpi4py`. The same on every rank.
        arena: The memory into which exchanges over mpi4py receive.
        pool_size: Number of threads in XLA's CPU pool. The same on every rank, because it affects
            the last bits of results.
        control: For small agreements between all ranks. Only one thread at a time may use it.
        executables: All executables that this process has compiled. Jobs with equal programs share
            them.
        make_wire: Creates the wire; see `wire`.
        unpickle: Returns the world of the process in which it's called.
        exchange_owner: Decides which thread or run may exchange now.
        heartbeat_timeout_s: If a rank sends no heartbeat for longer than this many seconds, it's
            reported and all ranks are aborted. 0 for never.
        flight: Records this rank's current activities, and writes its event file.
        exchanger: A thread that runs exchanges concurrently with computation outside a run. (In a
            run, the exchange lane does this.)
        estimate_request: As JSON, what `jaxcross estimate` wants to know from the script's first
            step. Empty if the script should train.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    vendor: str
    pool_size: int
    heartbeat_timeout_s: float
    over: WireLibrary
    control: Control
    arena: Arena = field(default_factory=Arena, repr=False)
    flight: FlightRecorder = field(repr=False)
    executables: ExecutableCache = field(repr=False)
    make_wire: Callable[..., MpiWire] = field(repr=False)
    unpickle: Callable[[], World] = field(repr=False)
    exchange_owner: ExchangeOwner = field(default_factory=ExchangeOwner, repr=False)
    exchanger: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, "jaxcross-exchanges", ask_for_short_slices),
        repr=False,
    )
    estimate_request: str = field(default="", repr=False)
    _base: Any = field(repr=False)
    _watchdog: Watchdog = field(repr=False)
    job_comms: JobComms = field(default_factory=JobComms, repr=False)
    _neighbours: Neighbours = field(repr=False)
    _group_comms: dict[Any, _GroupComm] = field(default_factory=dict, repr=False)
    _group_comms_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __reduce__(self) -> tuple[Callable[[], World], tuple[()]]:
        """Pickles as a reference to the world of the process that unpickles it.

        A script may send objects that contain the world, such as steps, to its worker processes. A
        worker can't use its rank's communicators. So when a worker unpickles such an object, it
        gets its own world in place of the rank's.
        """
        return self.unpickle, ()

    def rank_grid(self, axes: str | Mapping[str, int]) -> RankGrid:
        """Returns the ranks as a row-major grid with these axes. Pure.

        Raises:
            ValueError: The product of the axes' sizes isn't the number of ranks.
        """
        return make_rank_grid(axes, rank=self.rank, size=self.size)

    def communicator(
        self,
        grid: RankGrid,
        axes: Sequence[str],
        groups: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """Returns the mpi4py communicator of this rank's group along `axes`, created once per
        group.

        The first call for a group waits until every member of the group has made it, while ranks
        outside the group aren't involved. Several threads may request communicators for different
        groups at the same time. They may do so in any order, even if that order differs between
        ranks.

        Raises:
            ValueError: An axis is unknown.
        """
        from mpi4py import MPI

        ranks = grid.group(axes, groups)
        if len(ranks) == 1:
            return MPI.COMM_SELF
        with self._group_comms_lock:
            group_comm = self._group_comms.setdefault(ranks, _GroupComm())
        with group_comm.lock:
            if group_comm.comm is None:
                what = f"making a communicator of ranks {ranks}"
                others = [r for r in ranks if r != self.rank]
                # A communicator may be created in a job's thread, at an arbitrary time relative to
                # other waits of this rank. So different ranks may enter this wait in a different
                # order, and the watchdog can't find missing ranks by counting waits. Instead, it
                # looks at what each rank is waiting for.
                waiting_for = partial(missing_ranks, "", what, others, excuse_local=False)
                with self.monitor(job="", step=0, segment=-1, what=what, waiting_for=waiting_for):
                    # Several threads may create communicators from the same parent at the same
                    # time. MPI can then tell the calls apart only by their tags, so the tag has to
                    # depend on the group.
                    group_comm.comm = self.new_communicator(ranks, repr(ranks))
        return group_comm.comm

    def new_communicator(self, ranks: Sequence[int], what: str) -> Any:
        """Returns a new mpi4py communicator of these ranks, in this order. Waits for these ranks.

        All of these ranks must make such calls in the same order.
        """
        group = self._base.Get_group().Incl(ranks)
        try:
            return self._base.Create_group(group, zlib.crc32(what.encode()) % 2**20)
        finally:
            group.Free()

    def wire(self) -> MpiWire:
        """Returns the wire through which programs exchange. Does not communicate."""
        return self.make_wire(self)

    def gather_connected(
        self,
        name: str,
        text: str,
        partners: Iterable[int],
        *,
        accepts: Accepts | None = None,
    ) -> dict[int, str]:
        """Returns the texts of all ranks that exchange with this one in step `name`, by rank.

        The result also contains the texts of ranks with which this rank exchanges only indirectly,
        i.e. through other ranks. The call waits for exactly the ranks in the result, so all of them
        must make it. See `jaxcross.world.neighbours`.
        """
        partners = set(partners)
        if not partners and accepts is None:
            return {self.rank: text}
        waiting_for = partial(missing_ranks, name, _AGREEMENT, sorted(partners), excuse_local=False)
        with self.monitor(job=name, step=0, segment=-1, what=_AGREEMENT, waiting_for=waiting_for):
            return self._neighbours.gather(text, partners, accepts=accepts)

    def mailbox(self) -> Mailbox:
        """Returns a mailbox for messages between all ranks, with a communicator of its own.

        Waits for all ranks, which must make these calls in the same order.
        """
        with self.monitor(job="", step=0, segment=-1, what="making a mailbox"):
            return Mailbox(self._base.Dup())

    def monitor(
        self,
        *,
        job: str,
        step: int,
        segment: int,
        what: str,
        waiting_for: WaitingFor | None = None,
        local: bool = False,
    ) -> Monitor:
        """Returns a context for a wait for other ranks. If it takes too long, aborts all ranks.

        If the context isn't left within `stall_timeout_s`, the watchdog reports which ranks are
        missing and aborts all ranks. Every rank must enter these contexts in the same order,
        because the watchdogs find missing ranks by counting them. Contexts with `waiting_for` or
        `local` aren't counted, so they may come in any order. Entering a context takes about a
        microsecond, and does not communicate.

        Args:
            job: The job that waits, or "" for none.
            step: The job's step.
            segment: The segment in the job's program, or -1 for none.
            what: The name of the wait in reports.
            waiting_for: Returns the ranks that hold up this wait; see `jaxcross.health.WaitingFor`.
            local: Whether it depends on this rank alone when the context is left.
        """
        return self._watchdog.monitor(
            job=job, step=step, segment=segment, what=what, waiting_for=waiting_for, local=local
        )

    def abort(self, message: str, *, code: int = 1) -> NoReturn:
        """Prints `message` with this rank's number, and terminates all ranks. Does not return."""
        first = clause(first_line(message))
        size = self._base.Get_size()  # raises in a worker, which must not terminate any rank
        kinds = {INTERRUPTED: ExitKind.INTERRUPTED, TERMINATED: ExitKind.TERMINATED}
        kind = kinds.get(code, ExitKind.FAILED)
        abort_everywhere(
            f"jaxcross: rank {self.rank} aborts all {size} ranks: {message}",
            AbortReason(text=f"rank {self.rank} aborts all ranks: {first}", kind=kind, code=code),
            self._watchdog.notify,
        )

    @property
    def stall_timeout_s(self) -> float:
        """Seconds after which a wait for other ranks is reported and all ranks are aborted."""
        return self._watchdog.timeout_s

    def broadcast_or_check(
        self, state: Any, *, mode: str = "check", rank_local: Collection[str] = ()
    ) -> Any:
        """Returns a job's initial state, which is then identical on all ranks. Waits for all ranks.

        All ranks must make these calls in the same order, and from one thread at a time.

        Args:
            state: A pytree of arrays.
            mode: With `check`, compares the ranks' states, and returns `state`. With `broadcast`,
                returns rank 0's values, on the same devices as this rank's.
            rank_local: Paths of leaves that may have a different value on each rank, and that stay
                as they are. Must be the same on every rank.

        Raises:
            ExchangeError: The ranks' trees differ or, with `check`, their values do. Raised on
                every rank, naming the leaf and two ranks.
        """
        from jaxcross.world.initial_state import broadcast, check_equal

        if mode not in ("check", "broadcast"):
            raise ValueError(f"`mode` is {mode!r}: use 'check' or 'broadcast'.")
        with self.monitor(job="", step=0, segment=-1, what="state check"):
            return (check_equal if mode == "check" else broadcast)(state, self._base, rank_local)
