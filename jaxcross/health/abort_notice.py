"""Why does everybody end? The rank that ends all others tells them first, and each says so in its own words."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, final

from jaxcross.health.abort import AbortReason, end_processes, say
from jaxcross.health.flight_recorder import FlightRecorder

_END, _HEARD = 4, 5
_TELL_S = 1.0
_HOLD_S = 3.0


@final
class AbortNotices:
    """Notices of the end, from and to all other ranks.

    Args:
        comm: A communicator in which nothing else uses tags 4 and 5.
        flight: Where this rank says what it is in, and writes its last words.
    """

    def __init__(self, comm: Any, flight: FlightRecorder) -> None:
        self._comm, self._flight = comm, flight
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._telling, self._told = threading.Lock(), threading.Event()
        self._answers: list[Any] = []  # MPI reads a message until its request is complete

    def tell(self, ending: AbortReason) -> None:
        """Writes this rank's last words and tells the others. Waits until they have heard, a second at most."""
        standing = self._flight.words(ending.how, ending.reason, ending.lost)
        from mpi4py import MPI

        if MPI.Is_finalized():
            return  # nobody can be told any more
        if not self._telling.acquire(blocking=False):
            self._told.wait(_TELL_S)  # another thread does it, and must not be ended in the middle
            return
        status = MPI.Status()
        # A send to a rank that has died may never return.
        deaf = set(range(self._size)) - {self._rank, *ending.lost}
        reason = f"{ending.reason}, {standing}" if ending.how == "failed" else ending.reason
        pending = []
        for rank in sorted(deaf):
            with suppress(Exception):  # one of them may be what is broken
                pending.append(self._comm.isend((reason, ending.code), dest=rank, tag=_END))
        deadline = time.monotonic() + _TELL_S
        while deaf and time.monotonic() < deadline:
            if (other := self._receive(status)) is not None:  # tells at the same time
                self._answer(other[0])
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_HEARD, status=status):
                self._comm.recv(source=status.Get_source(), tag=_HEARD)
                deaf.discard(status.Get_source())
            threading.Event().wait(0.01)
        self._told.set()
        del pending  # whoever has not heard by now is ended without a word of its own

    def hear(self) -> None:
        """If another rank has told that all end: says so, and ends this one. Else does nothing."""
        from mpi4py import MPI

        notice = self._receive(MPI.Status())
        if notice is None:
            return
        sender, reason, code = notice
        if self._telling.locked():  # this rank ends all, too, and has said why
            self._answer(sender)
            return
        standing = self._flight.words("told", reason)
        say(f"jaxcross: rank {self._rank} of {self._size} ends while {standing}, because {reason}")
        self._answer(sender)  # which ends all, once all have spoken
        threading.Event().wait(_HOLD_S)
        end_processes(code)

    def _receive(self, status: Any) -> tuple[int, str, int] | None:
        from mpi4py import MPI

        message = self._comm.improbe(source=MPI.ANY_SOURCE, tag=_END, status=status)  # two threads may ask at once
        return None if message is None else (status.Get_source(), *message.recv())

    def _answer(self, sender: int) -> None:
        self._answers.append(self._comm.isend(None, dest=sender, tag=_HEARD))
