"""Flat messages between ranks on a communicator of their own, sent and received without waiting for
anybody.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, final

import numpy as np


class Mailbox(Protocol):
    """One thread's messages to and from all ranks, itself included. Those of one rank come in the
    order sent.
    """

    rank: int
    size: int

    def send(self, rank: int, tag: int, message: np.ndarray) -> None:
        """Begins to send bytes (uint8, flat), which must not change any more. Does not wait."""
        ...

    def receive(self) -> tuple[int, int, np.ndarray] | None:
        """Sender, tag and bytes of a message that has come, if one has. Waits at most for the rest
        of it.
        """
        ...

    def sent(self) -> bool:
        """Whether every message has left this rank. Moves large ones on."""
        ...

    def close(self) -> None:
        """Gives the communicator back. Every rank must call it, everything sent and received."""
        ...


@final
class MpiMailbox:
    """`Mailbox` over a communicator that nothing else uses."""

    __slots__ = ("_comm", "_leaving", "_mpi", "_own", "rank", "size")

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._own: deque[tuple[int, np.ndarray]] = deque()
        self._leaving: list[
            tuple[Any, np.ndarray]
        ] = []  # MPI reads a message until its request is complete

    def send(self, rank: int, tag: int, message: np.ndarray) -> None:
        if rank == self.rank:
            self._own.append((tag, message))
        else:
            self._leaving.append(
                (self._comm.Isend([message, self._mpi.BYTE], dest=rank, tag=tag), message)
            )

    def receive(self) -> tuple[int, int, np.ndarray] | None:
        if self._own:
            return (self.rank, *self._own.popleft())
        status = self._mpi.Status()
        found = self._comm.Improbe(status=status)
        if found is None:
            return None
        message = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        # Both ends may be in such a call at once: it moves on what this rank sends, too.
        found.Recv([message, self._mpi.BYTE])
        return status.Get_source(), status.Get_tag(), message

    def sent(self) -> bool:
        self._leaving = [
            (request, message) for request, message in self._leaving if not request.Test()
        ]
        return not self._leaving

    def close(self) -> None:
        self._comm.Free()
