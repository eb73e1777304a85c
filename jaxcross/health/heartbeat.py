"""Heartbeats: about once a second, each rank sends a small message to its two neighbours in a ring.

In a ring, the number of heartbeats per rank doesn't depend on the number of ranks, whereas with
heartbeats between all pairs of ranks, the total would grow quadratically. If a rank doesn't hear
from a neighbour for too long, or the kernel says that the neighbour's process is gone, the rank
reports that and terminates all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import ProcessId, State, process_state
from jaxcross.health.timed_comm import TimedComm

_BEAT = 3
_LONGEST_BETWEEN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPeer:
    """What a rank knows about a neighbour whose heartbeats have stopped.

    Attributes:
        rank: The neighbour's rank.
        process: The neighbour's process.
        found: The state of that process, according to the kernel.
        since_beat_s: Seconds since the neighbour's last heartbeat.
        activity: What it was doing at its last heartbeat, or "" if there was no heartbeat.
    """

    rank: int
    process: ProcessId
    found: State
    since_beat_s: float
    activity: str

    def __str__(self) -> str:
        process = f"its process {self.process.pid} on host `{self.process.host}`"
        activity = f", {self.activity}" if self.activity else ""
        last_beat = f"Its last heartbeat was {self.since_beat_s:.0f} s ago{activity}."
        if self.found == "gone":
            reason = "ended without a word (killed, crashed, out of memory)"
            return f"rank {self.rank} is gone: {process} {reason}. {last_beat}"
        why = {
            "stopped": f"{process} is stopped (by SIGSTOP or a debugger).",
            "running": (
                f"{process} is running, but its interpreter is blocked (by a C function that keeps "
                "its lock?), or MPI does not deliver its messages."
            ),
            "unknown": f"{process}, that host, or the link to it does not answer.",
        }[self.found]
        return (
            f"rank {self.rank} is silent for {self.since_beat_s:.0f} s: {why} {last_beat} If it is "
            "only slow, raise `initialize(heartbeat_timeout_s=...)`."
        )


@final
class BeatTimer:
    """How long ago each neighbour's last heartbeat was. Pure: time passes only in `tick`.

    Only time during which this rank itself is running counts. If a batch system suspends all ranks,
    or you close your laptop's lid, nobody sends heartbeats for hours. No rank should be declared
    lost because of that once they all resume.

    Args:
        ranks: The neighbours.
        heartbeat_timeout_s: The longest gap between two heartbeats that's considered normal.
        tick_s: The longest time between two ticks while this rank is running. A longer gap means
            that the rank was suspended.

    Attributes:
        seconds: For each neighbour, the seconds since its last heartbeat.
        activities: For each neighbour, what it was doing at its last heartbeat.
        exited: The neighbours whose script has ended, and how many shared waits each of them had
            entered by then.
    """

    def __init__(self, ranks: Sequence[int], *, heartbeat_timeout_s: float, tick_s: float) -> None:
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._tick_s = tick_s
        self.seconds = dict.fromkeys(ranks, 0.0)
        self.activities = dict.fromkeys(ranks, "")
        self.exited: dict[int, int] = {}

    def on_beat(self, rank: int, activity: str) -> None:
        """Records a heartbeat."""
        self.seconds[rank] = 0.0
        self.activities[rank] = activity

    def on_exit(self, rank: int, entered: int) -> None:
        """Records that a neighbour's script has ended, after it had entered this many shared waits.

        The neighbour keeps sending heartbeats until all ranks' scripts have ended.
        """
        self.seconds[rank] = 0.0
        self.exited[rank] = entered

    def tick(self, passed_s: float) -> list[int]:
        """Advances the time, and returns the neighbours whose last heartbeat was too long ago."""
        for rank in self.seconds:
            self.seconds[rank] += min(passed_s, self._tick_s)
        return [
            rank for rank, seconds in self.seconds.items() if seconds > self.heartbeat_timeout_s
        ]


def neighbours(rank: int, size: int) -> list[int]:
    """Returns the ranks before and after this one in the ring of all ranks."""
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


@final
class Heartbeat:
    """Sends this rank's heartbeats and receives its neighbours'.

    Only one thread may use it. None of its methods waits.

    Args:
        comm: A communicator on which nothing else uses tag 3.
        heartbeat_timeout_s: How long a neighbour may be silent before it counts as lost.
        flight: Provides this rank's current activity, which is sent along with each heartbeat.
        processes: The process of every rank.
    """

    def __init__(
        self,
        comm: TimedComm,
        *,
        heartbeat_timeout_s: float,
        flight: FlightRecorder,
        processes: Sequence[ProcessId],
    ) -> None:
        self._comm = comm
        self._flight = flight
        self._processes = processes
        self._rank: int = comm.Get_rank()
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._neighbours = neighbours(self._rank, len(processes))
        self._between_s = min(_LONGEST_BETWEEN_S, heartbeat_timeout_s / 5)
        self._timer = BeatTimer(
            self._neighbours, heartbeat_timeout_s=heartbeat_timeout_s, tick_s=2 * self._between_s
        )
        self._sent: dict[int, Any] = {}
        self._exit_messages: list[Any] = []  # kept, because MPI reads a message until it's sent
        self._gone: set[int] = set()
        self._sent_s = time.monotonic()

    def poll(self) -> LostPeer | None:
        """Receives heartbeats, sends them if they are due, and returns a lost neighbour or None."""
        self._receive()
        now_s = time.monotonic()
        passed_s = now_s - self._sent_s
        if passed_s < self._between_s:
            return None
        self._sent_s = now_s
        self._flight.beat()
        for rank in self._neighbours:
            # Don't send a neighbour another heartbeat while the previous one is still in flight. A
            # suspended neighbour doesn't receive anything, so its heartbeats would pile up.
            if rank not in self._sent or self._comm.test(self._sent[rank]):
                self._sent[rank] = self._comm.isend(self._flight.describe(), dest=rank, tag=_BEAT)
        overdue = self._timer.tick(passed_s)
        for rank in self._timer.seconds:
            found = process_state(self._processes[rank], self._processes[self._rank])
            # A process may be gone because it aborted in an orderly fashion. In that case, it has
            # sent an abort notice, which explains more than we can, but may not have arrived yet.
            # So we only report the process when we find it gone for the second time, about a second
            # later.
            if rank in overdue or (found == "gone" and rank in self._gone):
                return self.lost_peer(rank)
            if found == "gone":
                self._gone.add(rank)
        return None

    def lost_peer(self, rank: int, at_least_s: float = 0.0) -> LostPeer:
        """Returns what this rank knows about a rank that it considers lost.

        `at_least_s` is a lower bound for the time since the rank's last heartbeat.
        """
        return LostPeer(
            rank=rank,
            process=self._processes[rank],
            found=process_state(self._processes[rank], self._processes[self._rank]),
            since_beat_s=max(self._timer.seconds.get(rank, 0.0), at_least_s),
            activity=self._timer.activities.get(rank, ""),
        )

    def exited(self) -> Mapping[int, int]:
        """Returns the neighbours whose script has ended, and how many shared waits each entered."""
        return self._timer.exited

    def announce_exit(self, entered: int) -> None:
        """Tells the neighbours that this rank's script has ended, after this many shared waits.

        This rank keeps sending heartbeats afterwards.
        """
        self._exit_messages = [
            self._comm.isend(entered, dest=rank, tag=_BEAT) for rank in self._neighbours
        ]

    def _receive(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_BEAT, status=status):
            rank = status.Get_source()
            message = self._comm.recv(source=rank, tag=_BEAT)
            if isinstance(message, int):
                self._timer.on_exit(rank, message)
            else:
                self._timer.on_beat(rank, message)
