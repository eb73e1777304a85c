"""Notices of the end: the rank that ends all others sends them the reason first, and each of them
prints it.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, final

from jaxcross.health.abort import AbortReason, end_processes, print_error
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.timed_comm import TimedComm

_NOTICE = 4
_RECEIPT = 5
_NOTIFY_S = 1.0
_HOLD_S = 3.0
_ALIKE_S = 0.5
_LONGEST_ALIKE_S = 1.5


@final
class AbortNotices:
    """Notices of the end, from and to all other ranks.

    Args:
        comm: A communicator in which nothing else uses tags 4 and 5.
        flight: Describes the current activity of this rank and records its exit.
    """

    def __init__(self, comm: TimedComm, flight: FlightRecorder) -> None:
        self._comm = comm
        self._flight = flight
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._notifying = threading.Lock()
        self._notified = threading.Event()
        self._obeyed: tuple[int, str] | None = (
            None  # the sender of a notice that this rank obeys, and its reason
        )
        self._reports = False  # this rank ends all by itself, and prints its own reason
        self._receipts: list[Any] = []  # MPI reads a message until its request is complete

    def notify(self, reason: AbortReason) -> None:
        """Records the exit of this rank and notifies the others. Waits for their receipts, a second
        at most.
        """
        activity = self._flight.record_exit(reason.kind, reason.text, reason.lost)
        from mpi4py import MPI

        if MPI.Is_finalized():
            return  # no message leaves this rank any more
        if not self._notifying.acquire(blocking=False):
            self._notified.wait(
                _NOTIFY_S
            )  # another thread notifies, and must not be ended in the middle
            return
        status = MPI.Status()
        # A send to a rank that has died may never return.
        unnotified = set(range(self._size)) - {self._rank, *reason.lost}
        text = f"{reason.text}, {activity}" if reason.kind == "failed" else reason.text
        pending = []
        for rank in sorted(unnotified):
            with suppress(Exception):  # the link to one of them may be what is broken
                pending.append(self._comm.isend((text, reason.code), dest=rank, tag=_NOTICE))
        deadline = time.monotonic() + _NOTIFY_S
        while unnotified and time.monotonic() < deadline:
            # Two ranks may notify each other at once: each answers, or both would wait for the
            # whole second.
            other = self._receive()
            if other is not None:
                self._answer(other[0])
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_RECEIPT, status=status):
                self._comm.recv(source=status.Get_source(), tag=_RECEIPT)
                unnotified.discard(status.Get_source())
            threading.Event().wait(0.01)
        self._notified.set()
        del pending  # a rank without the notice by now is ended without a message of its own

    def failed_alike(self, own: AbortReason) -> bool:
        """Whether another rank has sent notice of the same failure as this rank's own. Waits 1.5 s
        at most.

        If so, this rank has obeyed it: it has printed one line, and the sender ends all ranks.
        """
        from mpi4py import MPI

        if MPI.Is_finalized():
            return False
        # Ranks wait the longer the higher they are, so that the first one does not wait for the
        # others.
        deadline = time.monotonic() + min(_ALIKE_S * self._rank, _LONGEST_ALIKE_S)
        what = own.text.removeprefix(f"rank {self._rank} ")
        while self._obeyed is None:
            notice = self._receive()
            if notice is not None:
                sender, reason, _ = notice
                # A check that one rank fails raises "On rank N: ..." on the others.
                alike = reason.removeprefix(f"rank {sender} ").startswith(
                    what.replace(f"On rank {sender}: ", "", 1)
                )
                if alike:
                    activity = self._flight.record_exit(own.kind, own.text)
                    print_error(
                        f"jaxcross: rank {self._rank} of {self._size} fails in the same way "
                        f"({activity}): see the message of rank {sender}."
                    )
                self._reports = not alike
                self._answer(sender)
                return alike
            if time.monotonic() >= deadline:
                self._reports = True
                return False
            threading.Event().wait(0.01)
        sender, reason = self._obeyed  # by another thread, which has printed its line
        self._reports = not reason.removeprefix(f"rank {sender} ").startswith(what)
        return not self._reports

    def report(self) -> None:
        """Notes that this rank is about to print its own reason, so that it prints no other
        rank's.
        """
        self._reports = True

    def check(self) -> None:
        """Ends this rank, with a message, if a notice has come from another one; else does
        nothing.
        """
        notice = self._receive()
        if notice is None:
            return
        sender, reason, code = notice
        if (
            self._reports or self._notifying.locked()
        ):  # this rank ends all, too, and prints its own reason
            self._answer(sender)
            return
        self._obeyed = sender, reason
        activity = self._flight.record_exit("told", reason)
        print_error(
            f"jaxcross: rank {self._rank} of {self._size} ends while {activity}, because {reason}"
        )
        self._answer(sender)  # the sender ends all ranks once it has all receipts
        threading.Event().wait(_HOLD_S)
        end_processes(code)

    def _receive(self) -> tuple[int, str, int] | None:
        from mpi4py import MPI

        status = MPI.Status()
        # Matched: two threads may probe at once, and only one of them must receive the message.
        message = self._comm.improbe(source=MPI.ANY_SOURCE, tag=_NOTICE, status=status)
        return None if message is None else (status.Get_source(), *message.recv())

    def _answer(self, sender: int) -> None:
        self._receipts.append(self._comm.isend(None, dest=sender, tag=_RECEIPT))
