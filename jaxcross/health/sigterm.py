"""Treats SIGTERM, with which batch systems end a job, like Ctrl-C.

It works whatever the threads of this process are waiting for.
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

# A batch system signals every process of a job, and `mpirun` forwards the signals that it receives,
# so one stop arrives as several signals. Those within this time count as one.
ONE_STOP_S = 2.0
_REACT_S = 5.0


@final
class SigtermHandler:
    """Raises `Terminated` in the main thread on SIGTERM, and detects if that thread can't react.

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
        """Installs the handler in the main thread, unless the script has installed its own."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        # Python only runs a handler once the main thread returns from C code. However, it writes a
        # byte to the wakeup pipe at once, so the watchdog finds out about a signal that the main
        # thread hasn't handled yet.
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.set_blocking(end, False)
        signal.signal(signal.SIGTERM, self._handle)
        others = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        # A data loader's workers are ended by SIGTERM, too, and would write to the pipe of their
        # parent. So the signal is blocked during a fork until the child has reset the handler and
        # the pipe.
        os.register_at_fork(
            before=self._hold_back, after_in_parent=self._let_through, after_in_child=self._forget
        )

    def overdue(self) -> bool:
        """Whether SIGTERM arrived more than 5 s ago and the main thread hasn't handled it.

        That means that the main thread has been in C code all the time. Does not wait.
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
        """Whether SIGTERM has arrived since the last call."""
        with suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._pipe, 4096)
        return False

    def _hold_back(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_through(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _forget(self) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        # During a run, our handler is wrapped in a `DeferredHandler`.
        if self._handle in (
            handler,
            getattr(handler, "handler", None),
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        self._let_through()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._postponement.lets_through(number, frame):
            return
        now_s = time.monotonic()
        # Otherwise a later call of `overdue` would take this signal's byte for another signal.
        self._drain()
        if self._handled_s and now_s - self._handled_s < ONE_STOP_S:
            return
        self._handled_s = now_s
        self._flight.note("SIGTERM")
        raise Terminated
