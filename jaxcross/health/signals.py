"""Handlers for Ctrl-C and SIGTERM whose exceptions neither get lost nor interrupt a run.

Python runs a signal's handler in the main thread, between any two instructions, and an exception
that the handler raises appears there. This goes wrong in three ways:

- **The exception is lost.** Python drops exceptions that are raised in a callback of the garbage
  collector. JAX installs such a callback, and importing and tracing collect garbage all the time,
  so half of all Ctrl-Cs would print "Exception ignored in _xla_gc_callback" and do nothing else.
  While an extension module is being loaded, its initialization may import other modules. It then
  takes the exception for a failed import, or crashes. In both places, our handler doesn't raise,
  but has the signal sent again a moment later (`Postponement`).

  By then, the script may have ended. The exception could then only interrupt a callback of
  `atexit`: Python prints it, the process ends anyway, and whatever the callback was closing stays
  open. So a signal that was sent again is dropped if the interpreter is exiting. A new signal still
  raises at that point, because the user who presses Ctrl-C may want to get past a callback that
  hangs.
- **The handler never runs**, because the main thread is busy in C code. `SigtermHandler` treats
  SIGTERM, with which batch systems end a job, like Ctrl-C, and the watchdog's thread asks it
  whether the main thread has failed to react.
- **The exception comes at the wrong moment.** During a run, `defer_signals` keeps a handler's
  exception until the main thread asks for it, so that it never interrupts the main thread in the
  middle of something. This also works for the user's own handlers, such as one for a batch system's
  warning. If the main thread has stopped asking, e.g. because the run has ended and its last states
  are being saved, the first exception stays where it is. So the exception of a second signal is
  raised at once.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import TYPE_CHECKING, final

from jaxcross.health.abort import Terminated

if TYPE_CHECKING:
    from jaxcross.health.flight_recorder import FlightRecorder

_AGAIN_S = 0.05
# A batch system signals every process of a job, and `mpirun` forwards the signals that it receives,
# so one stop arrives as several signals. Those within this time count as one.
ONE_STOP_S = 2.0
_REACT_S = 5.0
_AT_ONCE_S = 0.5  # a person who presses Ctrl-C twice is slower

Handler = Callable[[int, FrameType | None], object]


@final
class Postponement:
    """Decides whether a signal's handler raises now, or the signal is sent again a moment later."""

    def __init__(self) -> None:
        self._sent_again = False

    def lets_through(self, number: int, frame: FrameType | None) -> bool:
        """Whether the handler should raise here; if not, the signal is re-sent or dropped."""
        sent_again = self._sent_again
        self._sent_again = False
        # Handlers run in the main thread, which counts as ended as soon as it starts to exit. We
        # can't decide this in the timer's thread, because the exit could begin right after the
        # decision.
        if sent_again and not threading.main_thread().is_alive():
            return False
        if not _would_be_lost(frame):
            return True
        again = threading.Timer(_AGAIN_S, self._send_again, (number,))
        again.daemon = True
        again.start()
        return False

    def _send_again(self, number: int) -> None:
        self._sent_again = True
        os.kill(os.getpid(), number)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Whether Python would drop an exception that is raised in this frame."""
    lost = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    lost |= {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}
    while frame is not None and frame.f_code not in lost and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@final
class InterruptHandler:
    """Raises `KeyboardInterrupt` like Python's own handler, except where it would be lost."""

    def __init__(self) -> None:
        self._postponement = Postponement()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._postponement.lets_through(number, frame):
            raise KeyboardInterrupt


def install_interrupt() -> bool:
    """Installs `InterruptHandler` for Ctrl-C, and returns whether it did.

    A handler that the script has installed stays in place, and so does an `InterruptHandler`.
    """
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, InterruptHandler())
            return True
    return False


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


@final
class DeferredHandler:
    """A signal handler that calls another handler and keeps any exception that the latter raises.

    Attributes:
        handler: The handler that it replaces.
    """

    def __init__(self, handler: Handler, kept: deque[BaseException], times_s: deque[float]) -> None:
        self.handler = handler
        self._kept = kept
        self._times_s = times_s
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            if os.getpid() != self._pid:
                raise  # in a forked child, no thread asks for it
            now_s = time.monotonic()
            if self._times_s and now_s - self._times_s[-1] < _AT_ONCE_S:
                # The same signal arrives several times: through the launcher, and sent to each
                # process.
                return
            if self._kept:
                raise
            self._times_s.append(now_s)
            self._kept.append(error)


@contextmanager
def defer_signals() -> Iterator[deque[BaseException]]:
    """A context in which exceptions of signal handlers are kept, in order, in the yielded deque.

    Outside the main thread, it has no effect.
    """
    kept: deque[BaseException] = deque()
    times_s: deque[float] = deque(maxlen=1)
    before: dict[int, Handler] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, DeferredHandler(handler, kept, times_s))
        yield kept
    finally:
        for number, handler in before.items():
            # If the script has installed another handler in the meantime, that one stays.
            if isinstance(signal.getsignal(number), DeferredHandler):
                signal.signal(number, handler)
