"""Is everybody alive? Each rank sends a small message to its two neighbours in a ring, about once a second.

What a rank costs does not grow with their number. Who hears nothing of a neighbour for too long, or sees that its
process is gone, tells all others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import Place, State, state

_BEAT = 3
_LONGEST_BETWEEN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A neighbour that does not beat any more.

    Attributes:
        rank: Which one.
        place: Its process.
        found: What the kernel says of that process.
        silent_s: For how long nothing was heard of it.
        standing: Where it was when it was last heard, "" if never.
    """

    rank: int
    place: Place
    found: State
    silent_s: float
    standing: str

    def __str__(self) -> str:
        process = f"its process {self.place.pid} on host `{self.place.host}`"
        last = f", {self.standing}" if self.standing else ""
        heard = f"It was last heard {self.silent_s:.0f} s ago{last}."
        if self.found == "gone":
            return f"rank {self.rank} is gone: {process} ended without a word (killed, crashed, out of memory). {heard}"
        why = {
            "stopped": f"{process} is stopped (by SIGSTOP or a debugger).",
            "running": f"{process} is there, but its interpreter does nothing (a C function that keeps its lock?), or "
            "MPI does not bring its messages.",
            "unknown": f"{process}, that host, or the link to it does not answer.",
        }[self.found]
        return (
            f"rank {self.rank} is silent for {self.silent_s:.0f} s: {why} {heard} If it is only slow, raise "
            "`initialize(heartbeat_timeout_s=...)`."
        )


@final
class Silence:
    """For how long each neighbour has been silent. Pure: time passes by `tick` only.

    Counted is the time that this rank itself was awake for: if all ranks were stopped together, as batch systems do
    and lids of laptops, none has been silent.

    Args:
        ranks: Whom this rank listens to.
        heartbeat_timeout_s: How long a rank may be silent.
        tick_s: The longest time between two ticks of a rank that is awake.
    """

    def __init__(self, ranks: Sequence[int], *, heartbeat_timeout_s: float, tick_s: float) -> None:
        self.heartbeat_timeout_s, self._tick_s = heartbeat_timeout_s, tick_s
        self.seconds = dict.fromkeys(ranks, 0.0)
        self.standings = dict.fromkeys(ranks, "")
        self.gone: dict[int, int] = {}

    def heard(self, rank: int, standing: str) -> None:
        """A beat came."""
        self.seconds[rank], self.standings[rank] = 0.0, standing

    def left(self, rank: int, entered: int) -> None:
        """A rank said that its script ended, after so many waits for others. It beats until all scripts have."""
        self.seconds[rank] = 0.0
        self.gone[rank] = entered

    def tick(self, passed_s: float) -> list[int]:
        """Lets time pass; the ranks that have been silent for too long."""
        for rank in self.seconds:
            self.seconds[rank] += min(passed_s, self._tick_s)
        return [rank for rank, seconds in self.seconds.items() if seconds > self.heartbeat_timeout_s]


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks before and behind in the ring of all ranks."""
    return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


@final
class Heartbeat:
    """Sends this rank's beats and listens to its neighbours'. One thread uses it, and nothing in it waits.

    Args:
        comm: A communicator in which nothing else uses tag 3.
        heartbeat_timeout_s: How long a neighbour may be silent.
        flight: Where this rank says what it is in.
        places: The process of every rank.
    """

    def __init__(
        self, comm: Any, *, heartbeat_timeout_s: float, flight: FlightRecorder, places: Sequence[Place]
    ) -> None:
        self._comm, self._flight, self._places = comm, flight, places
        self._rank: int = comm.Get_rank()
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._neighbours = neighbours(self._rank, len(places))
        self._between_s = min(_LONGEST_BETWEEN_S, heartbeat_timeout_s / 5)
        self._silence = Silence(self._neighbours, heartbeat_timeout_s=heartbeat_timeout_s, tick_s=2 * self._between_s)
        self._sent: dict[int, Any] = {}
        self._farewells: list[Any] = []  # MPI reads a message until its request is complete
        self._gone: set[int] = set()
        self._sent_s = time.monotonic()

    def turn(self) -> Loss | None:
        """Listens; beats, if it is time to; a neighbour that was lost."""
        self._listen()
        now_s = time.monotonic()
        passed_s = now_s - self._sent_s
        if passed_s < self._between_s:
            return None
        self._sent_s = now_s
        self._flight.beat()
        for rank in self._neighbours:
            # One message under way is enough: those to a rank that stands still must not pile up.
            if rank not in self._sent or self._comm.test(self._sent[rank]):
                self._sent[rank] = self._comm.isend(self._flight.standing(), dest=rank, tag=_BEAT)
        silent = self._silence.tick(passed_s)
        for rank in self._silence.seconds:
            found = state(self._places[rank], self._places[self._rank])
            # Who is gone may have told why: that message is heard before the second look.
            if rank in silent or (found == "gone" and rank in self._gone):
                return self.loss(rank)
            if found == "gone":
                self._gone.add(rank)
        return None

    def loss(self, rank: int, at_least_s: float = 0.0) -> Loss:
        """What is known of a rank that is given up, after that time if it is not known to have been longer."""
        silent_s = max(self._silence.seconds.get(rank, 0.0), at_least_s)
        found = state(self._places[rank], self._places[self._rank])
        standing = self._silence.standings.get(rank, "")
        return Loss(rank=rank, place=self._places[rank], found=found, silent_s=silent_s, standing=standing)

    def left(self) -> Mapping[int, int]:
        """Neighbours whose script ended, and after how many waits for others."""
        return self._silence.gone

    def farewell(self, entered: int) -> None:
        """Tells the neighbours that this rank's script ended, after so many waits for others. It beats on."""
        self._farewells = [self._comm.isend(entered, dest=rank, tag=_BEAT) for rank in self._neighbours]

    def _listen(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_BEAT, status=status):
            rank = status.Get_source()
            said = self._comm.recv(source=rank, tag=_BEAT)
            if isinstance(said, int):
                self._silence.left(rank, said)
            else:
                self._silence.heard(rank, said)
