"""The end of all scripts: no rank leaves MPI while another may still send to it."""

from __future__ import annotations

import time
from typing import final

from jaxcross.health.timed_comm import TimedComm


@final
class ShutdownBarrier:
    """Two barriers after the end of this rank's script. One thread uses it, and nothing in it
    waits.

    MPI lets a rank finalise before the others, and MPICH over TCP then tries for ever to reach it.
    Past the first barrier all scripts have ended, and this rank sends nothing more; past the second
    one no rank sends any more.

    Args:
        comm: A communicator in which nothing else is collective.

    Attributes:
        stopped_sending_s: The time from which on this rank sends nothing, None before.
    """

    def __init__(self, comm: TimedComm) -> None:
        self._comm = comm
        self._barrier = comm.Ibarrier()
        self.stopped_sending_s: float | None = None

    def passed(self) -> bool:
        """Whether MPI may be finalised. Once it is true, do not ask again."""
        if not self._comm.test(self._barrier):
            return False
        if self.stopped_sending_s is not None:
            return True
        self.stopped_sending_s = time.monotonic()
        self._barrier = self._comm.Ibarrier()
        return False
