"""SIGTERM, with which batch systems end a job, treated as Ctrl-C whatever the threads of this
process wait for.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import final

from jaxcross.health.abort import Terminated
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.gc_safe_signals import Postponement

# A batch system signals every process of a job, and `mpirun` passes on what it gets.
ONE_STOP_S = 2.0
_REACT_S = 5.0


@final
class SigtermHandler:
    """Turns SIGTERM into `Terminated` in the main thread, and detects a main thread that does not
    come to it.

    Args:
        flight: Records the signal.
    """

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight
        self._postponement = Postponement()
        self._handled_s = 0.0
        self._came_s = 0.0
        self._pipe = -1
        self._forking = threading.local()

    def install(self) -> None:
        """Installs the handler, unless the script has installed one, or this is not the main
        thread.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        # Python runs a handler when the main thread is back from C. The byte that it writes to a
        # wakeup pipe is there at once, so that the watchdog sees a signal that the main thread has
        # not.
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.set_blocking(end, False)
        signal.signal(signal.SIGTERM, self._handle)
        others = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        # Workers of a data loader end by SIGTERM, too, and would write to the pipe of their parent.
        # Until they have forgotten it, the signal waits.
        os.register_at_fork(
            before=self._hold_back, after_in_parent=self._let_through, after_in_child=self._forget
        )

    def overdue(self) -> bool:
        """Whether SIGTERM came 5 s ago and the main thread, in C all the time, has not seen it.
        Does not wait.
        """
        if self._pipe < 0:
            return False
        now_s = time.monotonic()
        if (
            self._drain()
            and now_s - self._handled_s > ONE_STOP_S
            and self._came_s <= self._handled_s
        ):
            self._came_s = now_s
        return self._came_s > self._handled_s and now_s - self._came_s > _REACT_S

    def _drain(self) -> bool:
        """Whether SIGTERM has come since the last call."""
        with suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._pipe, 4096)
        return False

    def _hold_back(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_through(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _forget(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if self._handle in (
            handler,
            getattr(handler, "handler", None),
        ):  # during a run it is deferred
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        self._let_through()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._postponement.lets_through(number, frame):
            return
        now_s = time.monotonic()
        # else `overdue`, called later, would take the byte of this signal for another one
        self._drain()
        if self._handled_s and now_s - self._handled_s < ONE_STOP_S:
            return
        self._handled_s = now_s
        self._flight.note("SIGTERM")
        raise Terminated
