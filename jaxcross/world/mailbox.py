"""Non-blocking messages between ranks, sent as flat arrays over a separate communicator."""

from __future__ import annotations

from collections import deque
from typing import Any, final

import numpy as np


@final
class Mailbox:
    """Sends messages to all ranks, including this one, and receives theirs. Not thread-safe.

    Messages from the same rank arrive in the order they were sent.

    Args:
        comm: An mpi4py communicator that nothing else uses.
    """

    __slots__ = ("_comm", "_leaving", "_mpi", "_own", "rank", "size")

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._own: deque[tuple[int, np.ndarray]] = deque()
        # MPI may read a message until its send completes, so hold a reference until then.
        self._leaving: list[tuple[Any, np.ndarray]] = []

    def send(self, rank: int, tag: int, message: np.ndarray) -> None:
        """Starts sending a flat uint8 array, which must not change afterwards. Does not wait."""
        if rank == self.rank:
            self._own.append((tag, message))
        else:
            self._leaving.append(
                (self._comm.Isend([message, self._mpi.BYTE], dest=rank, tag=tag), message)
            )

    def receive(self) -> tuple[int, int, np.ndarray] | None:
        """Returns the sender, tag and bytes of a message that has arrived, or None.

        If a message has only partly arrived, waits for the rest.
        """
        if self._own:
            return (self.rank, *self._own.popleft())
        status = self._mpi.Status()
        found = self._comm.Improbe(status=status)
        if found is None:
            return None
        message = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        # This blocks until the whole message has arrived. Two ranks that send each other large
        # messages may both block here at the same time, but that's not a deadlock: while a rank is
        # blocked in a receive, MPI keeps sending the rank's own messages.
        found.Recv([message, self._mpi.BYTE])
        return status.Get_source(), status.Get_tag(), message

    def sent(self) -> bool:
        """Whether all messages have been sent. Large messages only make progress in this call."""
        self._leaving = [
            (request, message) for request, message in self._leaving if not request.Test()
        ]
        return not self._leaving

    def close(self) -> None:
        """Frees the communicator. Must be called on all ranks, after their last message."""
        self._comm.Free()
