"""Abort notices: before a rank terminates all others, it tells them why, so they can report it.

Without a notice, the other ranks would be killed in the middle of their work, with nothing in their
output to explain why. A rank that receives a notice prints one line with the reason and what it was
doing at the time, and sends back a receipt. The sender aborts as soon as it has all receipts, or
after a second at most, because a dead or stuck rank never answers.
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

# MPI tags; see `watchdog` for the others.
_NOTICE = 4
_RECEIPT = 5
_NOTIFY_S = 1.0
_HOLD_S = 3.0
_ALIKE_S = 0.5
_LONGEST_ALIKE_S = 1.5


@final
class AbortNotices:
    """Sends abort notices to the other ranks, and receives their notices.

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
        # The sender and the reason of the notice that makes this rank exit.
        self._obeyed: tuple[int, str] | None = None
        self._reports = False  # whether this rank terminates all ranks itself, for its own reason
        self._receipts: list[Any] = []  # kept, because MPI reads a message until it's sent

    def notify(self, reason: AbortReason) -> None:
        """Records this rank's exit and notifies the other ranks. Waits at most 1 s for receipts."""
        activity = self._flight.record_exit(
            reason.kind, reason.text, reason.lost, script_raised=reason.script_raised
        )
        from mpi4py import MPI

        if MPI.Is_finalized():
            return  # it's too late to send messages
        if not self._notifying.acquire(blocking=False):
            # Another thread is already sending notices. Let it finish: if this thread aborted now,
            # some ranks wouldn't get theirs.
            self._notified.wait(_NOTIFY_S)
            return
        status = MPI.Status()
        # Don't notify lost ranks, because a send to a dead rank may never return.
        unnotified = set(range(self._size)) - {self._rank, *reason.lost}
        text = f"{reason.text}, {activity}" if reason.kind == ExitKind.FAILED else reason.text
        notice = (text, reason.code, reason.script_raised)
        pending = []
        for rank in sorted(unnotified):
            with suppress(Exception):  # the failure may be a broken link to this rank
                pending.append(self._comm.isend(notice, dest=rank, tag=_NOTICE))
        deadline = time.monotonic() + _NOTIFY_S
        while unnotified and time.monotonic() < deadline:
            # Keep answering other ranks' notices while we wait for receipts of our own. If two
            # ranks fail at the same time, each of them sits here waiting for the other's receipt,
            # and without an answer, both would wait for the full second.
            other = self._receive()
            if other is not None:
                self._answer(other[0])
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_RECEIPT, status=status):
                self._comm.recv(source=status.Get_source(), tag=_RECEIPT)
                unnotified.discard(status.Get_source())
            threading.Event().wait(0.01)
        self._notified.set()
        del pending  # ranks that haven't received it by now are terminated without a message

    def failed_alike(self, own: AbortReason) -> bool:
        """Whether another rank has sent a notice about the same failure. Waits at most 1.5 s.

        If so, this rank prints a single line instead of its traceback, and leaves it to the sender
        to terminate it.
        """
        from mpi4py import MPI

        if MPI.Is_finalized():
            return False
        # If all ranks raise the same exception, only one of them should print it. So each rank
        # waits before it prints, and higher ranks wait longer. That way, the lowest failed rank
        # prints first, and the others receive its notice while they're still waiting.
        deadline = time.monotonic() + min(_ALIKE_S * self._rank, _LONGEST_ALIKE_S)
        what = own.text.removeprefix(f"rank {self._rank} ")
        while self._obeyed is None:
            notice = self._receive()
            if notice is not None:
                sender, reason, _, _ = notice
                # If a check fails on rank N, the other ranks raise the same error, prefixed with
                # "On rank N: ". That's still the same failure, so ignore the prefix when comparing
                # the texts.
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
        # In the meantime, another thread has handled a notice and printed this rank's line.
        sender, reason = self._obeyed
        self._reports = not reason.removeprefix(f"rank {sender} ").startswith(what)
        return not self._reports

    def report(self) -> None:
        """Records that this rank prints its own reason instead of another rank's."""
        self._reports = True

    def check(self) -> None:
        """If another rank's notice has arrived, prints a message and terminates this rank."""
        notice = self._receive()
        if notice is None:
            return
        sender, reason, code, script_raised = notice
        # This rank is aborting as well, and prints its own reason.
        if self._reports or self._notifying.locked():
            self._answer(sender)
            return
        self._obeyed = sender, reason
        activity = self._flight.record_exit(ExitKind.ABORTED, reason, script_raised=script_raised)
        print_error(
            f"jaxcross: rank {self._rank} of {self._size} ends while {activity}, because {reason}"
        )
        self._answer(sender)  # once the sender has all receipts, it terminates all ranks
        # Usually, the sender of the notice terminates this rank within a few seconds. If the sender
        # is stuck itself and can't, this rank terminates all ranks on its own.
        threading.Event().wait(_HOLD_S)
        end_processes(code)

    def _receive(self) -> tuple[int, str, int, bool] | None:
        """Returns a notice that has arrived, or None.

        A notice consists of the sender, the reason, the exit code, and whether the sender's script
        raised an exception.
        """
        from mpi4py import MPI

        status = MPI.Status()
        # A matched probe finds a message and claims it for this thread in a single operation. With
        # a plain probe, two threads could find the same message. One of them would receive it, and
        # the other would wait forever for a message that's no longer there.
        message = self._comm.improbe(source=MPI.ANY_SOURCE, tag=_NOTICE, status=status)
        return None if message is None else (status.Get_source(), *message.recv())

    def _answer(self, sender: int) -> None:
        self._receipts.append(self._comm.isend(None, dest=sender, tag=_RECEIPT))
