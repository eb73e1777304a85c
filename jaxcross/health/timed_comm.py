"""A communicator that notices when a call doesn't return.

A send to a dead rank may never return; with MPICH over TCP, for example, it retries forever. The
calling thread is then stuck inside MPI and can't report anything. So a second thread keeps track of
how long each call takes, and reports calls that take too long.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

_LONGEST_BETWEEN_S = 1.0


@final
class TimedComm:
    """The mpi4py calls that the watchdog needs, each with a time limit.

    Args:
        comm: A communicator that nothing else uses.
        limit_s: How many seconds a call may take.
        on_stuck: Called in the second thread if a call takes longer, with the rank that the call
            was addressed to, or None if it wasn't addressed to a particular rank.
    """

    def __init__(
        self, comm: Any, *, limit_s: float, on_stuck: Callable[[int | None], None]
    ) -> None:
        self._comm = comm
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._calls: dict[int, int | None] = {}
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxcross-guard", daemon=True)

    def start(self) -> None:
        """Starts the thread that times the calls."""
        self._thread.start()

    def stop(self) -> None:
        """Stops that thread. Waits for its end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def isend(self, value: Any, dest: int, tag: int) -> Any:
        with self._calling(dest):
            return self._comm.isend(value, dest=dest, tag=tag)

    def send(self, value: Any, dest: int, tag: int) -> None:
        with self._calling(dest):
            self._comm.send(value, dest=dest, tag=tag)

    def iprobe(self, source: int, tag: int, status: Any) -> bool:
        with self._calling(None):
            return self._comm.iprobe(source=source, tag=tag, status=status)

    def improbe(self, source: int, tag: int, status: Any) -> Any:
        """Returns a message that nobody else can receive from now on, or None if there's none."""
        with self._calling(None):
            return self._comm.improbe(source=source, tag=tag, status=status)

    def recv(self, source: int, tag: int) -> Any:
        with self._calling(source):
            return self._comm.recv(source=source, tag=tag)

    def test(self, request: Any) -> bool:
        """Returns whether a request is complete.

        MPI makes progress during this call, so it can get stuck just like a send.
        """
        with self._calling(None):
            return request.Test()

    def Ibarrier(self) -> Any:  # noqa: N802
        with self._calling(None):
            return self._comm.Ibarrier()

    def Get_rank(self) -> int:  # noqa: N802
        return self._comm.Get_rank()

    def Get_size(self) -> int:  # noqa: N802
        return self._comm.Get_size()

    @contextmanager
    def _calling(self, rank: int | None) -> Iterator[None]:
        number = next(self._numbers)
        self._calls[number] = rank
        try:
            yield
        finally:
            del self._calls[number]

    def _watch(self) -> None:
        # Measure time by counting this thread's iterations rather than by reading a clock. A clock
        # keeps running while the process is suspended, so a call in progress at that time would
        # seem to be stuck. This thread is suspended along with the call, so it doesn't count that
        # time.
        between_s = min(_LONGEST_BETWEEN_S, self._limit_s / 5)
        lasting: dict[int, float] = {}
        while not self._stop.wait(between_s):
            lasting = {
                number: lasting.get(number, -between_s) + between_s for number in self._calls.copy()
            }
            for number, seconds in lasting.items():
                if seconds <= self._limit_s:
                    continue
                try:
                    rank = self._calls[number]
                except KeyError:  # the call has returned in the meantime
                    continue
                self._on_stuck(rank)
                return
