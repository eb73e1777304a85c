"""A process's view of the MPI world: its rank, communicators and watchdog, and how to abort."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

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
    """A group's communicator, once it has been created.

    Creating a communicator blocks until all members of the group have joined in, and we hold the
    lock the whole time. That's why every group has its own lock: if they shared a lock, a thread
    waiting for one group would block threads that need a different group, and the ranks could
    deadlock.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    comm: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks, as seen from this rank. Created by `jaxcross.initialize`, once per process.

    Attributes:
        rank: This process's number among all processes, from 0 to size - 1.
        size: Number of ranks.
        local_rank: This process's number among the processes on its node.
        local_size: Number of ranks on this node.
        vendor: The MPI implementation, e.g. `mpich` or `openmpi`.
        over: Library for the exchanges, `mpi4jax` or `mpi4py`. The same on all ranks.
        arena: Memory that exchanges over mpi4py receive into.
        pool_size: Number of threads in XLA's CPU pool. The same on all ranks, because it affects
            the last bits of results.
        control: For small agreements between all ranks. Only one thread may use it at a time.
        executables: All executables compiled by this process. Jobs with equal programs share them.
        make_wire: Creates the wire; see `wire`.
        unpickle: Returns the world of whichever process it's called in.
        exchange_owner: Decides which thread or run may exchange right now.
        object_owners: Weak references to the jobs that last passed an NNX object to a step.
        object_owners_lock: Held while a job checks and sets an owner.
        heartbeat_timeout_s: If a rank sends no heartbeat for longer than this many seconds, it's
            reported and all ranks are aborted. 0 disables this.
        flight: Records what this rank is doing, and writes its event file.
        exchanger: A thread that overlaps exchanges with computation outside a run. (In a run,
            that's the job of the exchange lane.)
        estimate_request: What `jaxcross estimate` wants to know about the script's first step, as
            JSON. Empty if the script should train.
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
    object_owners: WeakKeyDictionary[Any, Any] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    object_owners_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
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
        """Pickles as a reference to the world of whichever process unpickles it.

        Scripts may send objects that hold the world, such as steps, to worker processes. A worker
        can't use the rank's communicators, so unpickling such an object there gives it the worker's
        own world instead.
        """
        return self.unpickle, ()

    def rank_grid(self, axes: str | Mapping[str, int]) -> RankGrid:
        """Arranges the ranks in a row-major grid with these axes. Pure.

        Raises:
            ValueError: The axis sizes don't multiply to the number of ranks.
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

        The first call for a group blocks until every member has made it; ranks outside the group
        aren't involved. Threads may request communicators for different groups concurrently and in
        any order, even if that order differs between ranks.

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
                # Communicators may be created in job threads, at arbitrary points relative to this
                # rank's other waits, so different ranks may enter these waits in different orders.
                # That rules out finding missing ranks by counting waits; instead, the watchdog
                # looks at what each rank is waiting for.
                waiting_for = partial(missing_ranks, "", what, others, excuse_local=False)
                with self.monitor(job="", step=0, segment=-1, what=what, waiting_for=waiting_for):
                    # Several threads may create communicators from the same parent at the same
                    # time. MPI can only tell these calls apart by tag, so the tag has to depend on
                    # the group.
                    group_comm.comm = self.new_communicator(ranks, repr(ranks))
        return group_comm.comm

    def new_communicator(self, ranks: Sequence[int], what: str) -> Any:
        """Returns a new mpi4py communicator of these ranks, in this order. Waits for these ranks.

        All of them must make such calls in the same order.
        """
        group = self._base.Get_group().Incl(ranks)
        try:
            return self._base.Create_group(group, zlib.crc32(what.encode()) % 2**20)
        finally:
            group.Free()

    def wire(self) -> MpiWire:
        """Returns the wire that programs exchange over. Does not communicate."""
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

        This includes ranks that exchange with this one only indirectly, i.e. through other ranks.
        The call waits for exactly the ranks in the result, so all of them must make it. See
        `jaxcross.world.neighbours`.
        """
        partners = set(partners)
        if not partners and accepts is None:
            return {self.rank: text}
        waiting_for = partial(missing_ranks, name, _AGREEMENT, sorted(partners), excuse_local=False)
        with self.monitor(job=name, step=0, segment=-1, what=_AGREEMENT, waiting_for=waiting_for):
            return self._neighbours.gather(text, partners, accepts=accepts)

    def mailbox(self) -> Mailbox:
        """Returns a mailbox for messages between all ranks, with its own communicator.

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
        """Returns a context for waiting for other ranks. If that takes too long, aborts all ranks.

        If the context isn't exited within `stall_timeout_s`, the watchdog reports which ranks are
        missing and aborts all ranks. It finds them by counting these contexts, so every rank must
        enter them in the same order. Contexts with `waiting_for` or `local` aren't counted and can
        be entered in any order. Entering a context takes about a microsecond and does not
        communicate.

        Args:
            job: The waiting job, or "" for none.
            step: The job's step.
            segment: The segment of the job's program, or -1 for none.
            what: What reports call this wait.
            waiting_for: Returns the ranks that hold up this wait; see `jaxcross.health.WaitingFor`.
            local: Whether leaving the context depends on this rank alone.
        """
        return self._watchdog.monitor(
            job=job, step=step, segment=segment, what=what, waiting_for=waiting_for, local=local
        )

    def abort(self, message: str, *, code: int = 1) -> NoReturn:
        """Prints `message` with this rank's number, and terminates all ranks. Never returns."""
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
        """Returns a job's initial state, identical on all ranks from then on. Waits for all ranks.

        All ranks must make these calls in the same order, from one thread at a time.

        Args:
            state: A pytree of arrays.
            mode: `check` compares the ranks' states and returns `state`; `broadcast` returns rank
                0's values, on the same devices as this rank's.
            rank_local: Paths of leaves that may differ between ranks and are left as they are. Must
                be the same on all ranks.

        Raises:
            ExchangeError: The ranks' trees differ or, with `check`, their values do. Raised on
                every rank, naming the leaf and two ranks.
        """
        from jaxcross.world.initial_state import broadcast, check_equal

        if mode not in ("check", "broadcast"):
            raise ValueError(
                f"`mode` of `broadcast_or_check` must be 'check' or 'broadcast', got {mode!r:.60}."
            )
        with self.monitor(job="", step=0, segment=-1, what="state check"):
            return (check_equal if mode == "check" else broadcast)(state, self._base, rank_local)
