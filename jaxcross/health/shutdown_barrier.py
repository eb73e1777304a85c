"""The end of all scripts: no rank leaves MPI while another rank may still send to it."""

from __future__ import annotations

import time
from typing import final

from jaxcross.health.timed_comm import TimedComm


@final
class ShutdownBarrier:
    """Two barriers after the end of this rank's script.

    MPI lets a rank finalise before the others, and MPICH over TCP then tries forever to reach that
    rank. So we need two barriers. Once the first one has been passed, all scripts have ended, and
    this rank stops sending. Once the second one has been passed, no rank sends any more, and MPI
    may be finalised.

    It's used by a single thread, and nothing in it waits.

    Args:
        comm: A communicator on which there are no other collective calls.

    Attributes:
        stopped_sending_s: The time at which this rank stopped sending, None before.
    """

    def __init__(self, comm: TimedComm) -> None:
        self._comm = comm
        self._barrier = comm.Ibarrier()
        self.stopped_sending_s: float | None = None

    def passed(self) -> bool:
        """Whether MPI may be finalised. Must not be called again once it has returned True."""
        if not self._comm.test(self._barrier):
            return False
        if self.stopped_sending_s is not None:
            return True
        self.stopped_sending_s = time.monotonic()
        self._barrier = self._comm.Ibarrier()
        return False
