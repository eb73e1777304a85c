"""Abort notices: the rank that terminates all others first sends them the reason, which they print.

Without a notice, a rank is terminated without a message. A rank that receives a notice prints one
line with its own current activity, and returns a receipt. The sender waits for all receipts, but
for a second at most, because a rank may be dead.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, final

from jaxcross._endings import ExitKind
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
    """Sends abort notices to all other ranks and receives theirs.

    Args:
        comm: A communicator on which nothing else uses tags 4 and 5.
        flight: Describes this rank's current activity and records its exit.
    """

    def __init__(self, comm: TimedComm, flight: FlightRecorder) -> None:
        self._comm = comm
        self._flight = flight
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._notifying = threading.Lock()
        self._notified = threading.Event()
        # The sender of a notice that this rank obeys, and the sender's reason.
        self._obeyed: tuple[int, str] | None = None
        self._reports = False  # this rank terminates all ranks itself, and prints its own reason
        self._receipts: list[Any] = []  # MPI reads a message until its request is complete

    def notify(self, reason: AbortReason) -> None:
        """Records this rank's exit and notifies the others. Waits at most 1 s for receipts."""
        activity = self._flight.record_exit(
            reason.kind, reason.text, reason.lost, script_raised=reason.script_raised
        )
        from mpi4py import MPI

        if MPI.Is_finalized():
            return  # too late to send a message
        if not self._notifying.acquire(blocking=False):
            # Another thread is notifying the ranks and must not be killed halfway.
            self._notified.wait(_NOTIFY_S)
            return
        status = MPI.Status()
        # We leave out the lost ranks, because a send to a dead rank may never return.
        unnotified = set(range(self._size)) - {self._rank, *reason.lost}
        text = f"{reason.text}, {activity}" if reason.kind == ExitKind.FAILED else reason.text
        notice = (text, reason.code, reason.script_raised)
        pending = []
        for rank in sorted(unnotified):
            with suppress(Exception):  # the link to this rank may be what is broken
                pending.append(self._comm.isend(notice, dest=rank, tag=_NOTICE))
        deadline = time.monotonic() + _NOTIFY_S
        while unnotified and time.monotonic() < deadline:
            # Two ranks may notify each other at the same time. Each has to answer the other one,
            # otherwise both would wait for the whole second.
            other = self._receive()
            if other is not None:
                self._answer(other[0])
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_RECEIPT, status=status):
                self._comm.recv(source=status.Get_source(), tag=_RECEIPT)
                unnotified.discard(status.Get_source())
            threading.Event().wait(0.01)
        self._notified.set()
        del pending  # a rank that hasn't received the notice is terminated without a message

    def failed_alike(self, own: AbortReason) -> bool:
        """Whether another rank has sent notice of the same failure. Waits at most 1.5 s.

        If so, this rank obeys the notice: it has printed a single line, and the sender terminates
        all ranks.
        """
        from mpi4py import MPI

        if MPI.Is_finalized():
            return False
        # The higher the rank, the longer it waits, so that the lowest rank that failed reports
        # without waiting for the others.
        deadline = time.monotonic() + min(_ALIKE_S * self._rank, _LONGEST_ALIKE_S)
        what = own.text.removeprefix(f"rank {self._rank} ")
        while self._obeyed is None:
            notice = self._receive()
            if notice is not None:
                sender, reason, _, _ = notice
                # If a check fails on one rank, the other ranks raise "On rank N: ...".
                alike = reason.removeprefix(f"rank {sender} ").startswith(
                    what.replace(f"On rank {sender}: ", "", 1)
                )
                if alike:
                    activity = self._flight.record_exit(
                        own.kind, own.text, script_raised=own.script_raised
                    )
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
        # Another thread obeyed the notice, and has printed this rank's line.
        sender, reason = self._obeyed
        self._reports = not reason.removeprefix(f"rank {sender} ").startswith(what)
        return not self._reports

    def report(self) -> None:
        """Notes that this rank is about to print its own reason, and must not print another one."""
        self._reports = True

    def check(self) -> None:
        """Terminates this rank, with a message, if another rank's notice has arrived."""
        notice = self._receive()
        if notice is None:
            return
        sender, reason, code, script_raised = notice
        # This rank terminates all ranks, too, and prints its own reason.
        if self._reports or self._notifying.locked():
            self._answer(sender)
            return
        self._obeyed = sender, reason
        activity = self._flight.record_exit(ExitKind.TOLD, reason, script_raised=script_raised)
        print_error(
            f"jaxcross: rank {self._rank} of {self._size} ends while {activity}, because {reason}"
        )
        self._answer(sender)  # the sender terminates all ranks once it has all receipts
        threading.Event().wait(_HOLD_S)
        end_processes(code)

    def _receive(self) -> tuple[int, str, int, bool] | None:
        """Returns a notice's sender, reason and exit code, and whether the sender's script raised
        an exception; None if no notice has arrived.
        """
        from mpi4py import MPI

        status = MPI.Status()
        # A matched probe: two threads may probe at the same time, but only one of them must receive
        # the message.
        message = self._comm.improbe(source=MPI.ANY_SOURCE, tag=_NOTICE, status=status)
        return None if message is None else (status.Get_source(), *message.recv())

    def _answer(self, sender: int) -> None:
        self._receipts.append(self._comm.isend(None, dest=sender, tag=_RECEIPT))
