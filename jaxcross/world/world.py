"""The MPI world of a process: who it is, its communicators, its watchdog, and how it ends."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from jaxcross.errors import clause, first_line
from jaxcross.health.abort import INTERRUPTED, TERMINATED, AbortReason, abort_everywhere
from jaxcross.health.activity import missing_ranks
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.watchdog import Monitor, WaitingFor, Watchdog
from jaxcross.wire.arena import Arena
from jaxcross.wire.job_comms import JobComms
from jaxcross.wire.rank_grid import RankGrid, make_rank_grid
from jaxcross.world.control_plane import Control
from jaxcross.world.exchange_owner import ExchangeOwner
from jaxcross.world.mailbox import Mailbox, MpiMailbox
from jaxcross.world.neighbours import Accepts, Neighbours
from jaxcross.world.sched_slice import ask_for_short_slices

if TYPE_CHECKING:
    from jaxcross.program.compile import ExecutableCache
    from jaxcross.wire.mpi_wire import MpiWire, Over

_AGREEMENT = "agreement of the ranks that exchange with one another"


@dataclass(slots=True)
class _Slot:
    """A communicator that is being made: its own lock, so that one group never waits for
    another.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    comm: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks, seen from this one. Made by `jaxcross.initialize`, once a process.

    Attributes:
        rank: This process among all, 0 to size - 1.
        size: Number of ranks.
        local_rank: This process among those of its node.
        local_size: Ranks on this node.
        vendor: The MPI: `mpich`, `openmpi`, ...
        over: The library that makes the exchanges, `mpi4jax` or `mpi4py`; the same on every rank.
        arena: Memory into which exchanges over mpi4py receive.
        pool_size: Threads of XLA's CPU pool, the same on every rank: results depend on it in the
            last bits.
        control: Small agreements between all ranks, for one thread at a time.
        executables: Everything that this process has compiled, shared by like jobs.
        make_wire: Makes the wire; see `wire`.
        unpickle: Returns the world of the process that calls it.
        exchange_owner: Which thread or run may exchange now.
        heartbeat_timeout_s: Seconds after which a rank that does not beat is reported, and all
            ranks are aborted; 0 for never.
        flight: What this rank is in, and its event file.
        exchanger: The one thread that makes exchanges next to computation where no runner has
            lanes.
        estimate_request: What `jaxcross estimate` asks of the script's first step, as JSON; empty
            if the script is to train.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    vendor: str
    pool_size: int
    heartbeat_timeout_s: float
    over: Over
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
    _slots: dict[Any, _Slot] = field(default_factory=dict, repr=False)
    _slots_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __reduce__(self) -> tuple[Callable[[], World], tuple[()]]:
        """Pickles as "the world of the process that reads it": what a worker is sent may hold
        one.
        """
        return self.unpickle, ()

    def rank_grid(self, axes: str | Mapping[str, int]) -> RankGrid:
        """The ranks as a grid with these axes, row-major. Pure.

        Raises:
            ValueError: The sizes do not multiply to the number of ranks.
        """
        return make_rank_grid(axes, rank=self.rank, size=self.size)

    def communicator(
        self,
        grid: RankGrid,
        axes: Sequence[str],
        groups: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """The mpi4py communicator of this rank's group over `axes`; made once, then kept.

        The first call for a group waits until each of its members calls; others are not involved.
        Threads may ask for different groups in any order, and on different ranks in different
        orders.

        Raises:
            ValueError: An unknown axis.
        """
        from mpi4py import MPI

        ranks = grid.group(axes, groups)
        if len(ranks) == 1:
            return MPI.COMM_SELF
        with self._slots_lock:
            slot = self._slots.setdefault(ranks, _Slot())
        with slot.lock:
            if slot.comm is None:
                what = f"making a communicator of ranks {ranks}"
                others = [r for r in ranks if r != self.rank]
                # In a job's thread, hence in no order with what the lanes do.
                waiting_for = partial(missing_ranks, "", what, others, excuse_local=False)
                with self.monitor(job="", step=0, segment=-1, what=what, waiting_for=waiting_for):
                    # MPI tells concurrent creations over one parent apart by their tag alone.
                    slot.comm = self.new_communicator(ranks, repr(ranks))
        return slot.comm

    def new_communicator(self, ranks: Sequence[int], what: str) -> Any:
        """A new mpi4py communicator of these ranks in this order. Waits for them; all must call it
        in one order.
        """
        group = self._base.Get_group().Incl(ranks)
        try:
            return self._base.Create_group(group, zlib.crc32(what.encode()) % 2**20)
        finally:
            group.Free()

    def wire(self) -> MpiWire:
        """Returns the wire over which programs exchange. Does not communicate."""
        return self.make_wire(self)

    def gather_connected(
        self,
        name: str,
        text: str,
        partners: Iterable[int],
        *,
        accepts: Accepts | None = None,
    ) -> dict[int, str]:
        """The texts of the ranks that exchange with this one in step `name`, directly or through
        others, by rank.

        Waits for those ranks only, each of which must call it. See `jaxcross.world.neighbours`.
        """
        partners = set(partners)
        if not partners and accepts is None:
            return {self.rank: text}
        waiting_for = partial(missing_ranks, name, _AGREEMENT, sorted(partners), excuse_local=False)
        with self.monitor(job=name, step=0, segment=-1, what=_AGREEMENT, waiting_for=waiting_for):
            return self._neighbours.gather(text, partners, accepts=accepts)

    def mailbox(self) -> Mailbox:
        """Messages between all ranks, apart from all others. Waits for all ranks, which must call
        it in one order.
        """
        with self.monitor(job="", step=0, segment=-1, what="making a mailbox"):
            return MpiMailbox(self._base.Dup())

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
        """Returns a context in which this rank waits for others; the watchdog aborts all ranks if
        it lasts too long.

        Costs about a microsecond; does not communicate. Every rank must enter these contexts in the
        same order, with two exceptions.

        Args:
            job: The job that waits, "" for none.
            step: Its step.
            segment: The segment in its program, -1 for none.
            what: Names the wait in reports.
            waiting_for: Returns the ranks that the wait is for: such a context has no place in the
                order.
            local: Whether this rank alone decides when it ends: no place in the order either.
        """
        return self._watchdog.monitor(
            job=job, step=step, segment=segment, what=what, waiting_for=waiting_for, local=local
        )

    def abort(self, message: str, *, code: int = 1) -> NoReturn:
        """Print `message` with this rank and end all ranks. Does not return."""
        first = clause(first_line(message))
        size = self._base.Get_size()  # raises in a worker: it ends no rank
        kind = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}.get(code, "failed")
        abort_everywhere(
            f"jaxcross: rank {self.rank} aborts all {size} ranks: {message}",
            AbortReason(text=f"rank {self.rank} aborts all ranks: {first}", kind=kind, code=code),
            self._watchdog.notify,
        )

    @property
    def stall_timeout_s(self) -> float:
        """Seconds after which a wait for other ranks is reported, and all ranks are aborted."""
        return self._watchdog.timeout_s

    def broadcast_or_check(
        self, state: Any, *, mode: str = "check", rank_local: Collection[str] = ()
    ) -> Any:
        """A job's initial state, made sure to be equal on all ranks. Waits for every rank.

        All ranks must call it in the same order, one thread at a time.

        Args:
            state: A pytree of arrays.
            mode: `check` compares and returns `state`; `broadcast` returns rank 0's values in this
                rank's places.
            rank_local: Paths of leaves that stay as they are: each rank has its own. The same on
                every rank.

        Raises:
            ExchangeError: The trees or, when checking, the values differ; on every rank, with the
                leaf and two ranks.
        """
        from jaxcross.world.replicas import broadcast, check_equal

        if mode not in ("check", "broadcast"):
            raise ValueError(f"`mode` is {mode!r}: use 'check' or 'broadcast'.")
        with self.monitor(job="", step=0, segment=-1, what="state check"):
            return (check_equal if mode == "check" else broadcast)(state, self._base, rank_local)
