"""The end of all scripts: no rank leaves MPI while another may still send to it."""

from __future__ import annotations

import time
from typing import Any, final


@final
class Leaving:
    """This rank's script has ended; are those of all others? One thread uses it, and nothing in it waits.

    MPI lets a rank be gone before the others, and MPICH over TCP then tries for ever to reach it. So there are two
    barriers. Past the first, all scripts have ended, and this rank sends nothing more; past the second, nobody does.

    Args:
        comm: A communicator in which nothing else is collective.

    Attributes:
        silent_since_s: When this rank began to be silent, None before.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._barrier = comm.Ibarrier()
        self.silent_since_s: float | None = None

    def over(self) -> bool:
        """Whether MPI may be finalised. Once it is, do not ask again."""
        if not self._comm.test(self._barrier):
            return False
        if self.silent_since_s is not None:
            return True
        self.silent_since_s = time.monotonic()
        self._barrier = self._comm.Ibarrier()
        return False
