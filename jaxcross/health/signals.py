"""Handlers for Ctrl-C and SIGTERM that neither lose an interrupt nor interrupt a run at random.

Python runs signal handlers in the main thread, between two arbitrary instructions. If a handler
raises an exception, it's as if the interrupted code had raised it. This can go wrong in three ways:

- **The exception is lost.** Python prints and drops exceptions raised in a callback of the garbage
  collector. JAX installs such a callback, and garbage is collected all the time while Python
  imports modules or JAX traces a function. So without this module, half of all Ctrl-Cs would print
  "Exception ignored in _xla_gc_callback" and otherwise do nothing. Something similar can happen
  while an extension module is being loaded: its initialization may import other modules, and then
  mistake our exception for a failed import, or crash. So if the main thread is in one of these
  places, our handler doesn't raise, but has the signal sent again a moment later (`Postponement`).

  By then, the script may have ended, with Python busy running `atexit` callbacks. An exception
  would only interrupt one of these callbacks, and whatever it was about to close would stay open,
  while the process would end anyway. So we drop a resent signal if the interpreter is exiting. A
  new signal still raises an exception there, because the user may be pressing Ctrl-C to get past a
  hanging callback.
- **The handler never runs**, because the main thread is stuck in C code. This matters for SIGTERM,
  which batch systems use to end a job: if nothing happens, they kill the process a little later.
  `SigtermHandler` normally treats SIGTERM like Ctrl-C. In addition, the watchdog's thread polls it
  for signals that the main thread hasn't reacted to.
- **The exception comes at the wrong moment.** During a run, it could hit the main thread in the
  middle of an update. So `defer_signals` stores exceptions from signal handlers until the main
  thread asks for them. This covers the user's own handlers as well, e.g. for a batch system's
  warning signal. There's a catch: after the run, e.g. while final states are being saved, the main
  thread no longer asks, so the exception would never be raised. That's why, if a second signal
  arrives while the first exception is still stored, its exception is raised immediately.
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
# All signals within this time count as one. A batch system signals every process of a job,
# including `mpirun`, which forwards the signal to the ranks, so each rank gets it several times.
ONE_STOP_S = 2.0
_REACT_S = 5.0
_AT_ONCE_S = 0.5  # a user who presses Ctrl-C twice takes longer

Handler = Callable[[int, FrameType | None], object]


@final
class Postponement:
    """Decides whether a signal handler raises now or the signal is sent again later."""

    def __init__(self) -> None:
        self._sent_again = False

    def lets_through(self, number: int, frame: FrameType | None) -> bool:
        """Whether the handler should raise now. If not, the signal is sent again or dropped."""
        sent_again = self._sent_again
        self._sent_again = False
        # Drop a resent signal if the interpreter is exiting by now. The main thread gives it away:
        # Python marks it as ended as soon as the exit begins, even though handlers still run in it.
        # It wouldn't be enough for the timer's thread to check this before sending the signal,
        # because the exit could begin before the signal arrives.
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
    """Whether Python would lose an exception that's raised in this frame."""
    lost = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    lost |= {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}
    while frame is not None and frame.f_code not in lost and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@final
class InterruptHandler:
    """Raises `KeyboardInterrupt` like Python's own handler, but not where it would be lost."""

    def __init__(self) -> None:
        self._postponement = Postponement()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._postponement.lets_through(number, frame):
            raise KeyboardInterrupt


def install_interrupt() -> bool:
    """Installs `InterruptHandler` for Ctrl-C. Returns whether it was installed.

    If the script has installed its own handler, or there's already an `InterruptHandler`, the
    existing handler stays in place.
    """
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, InterruptHandler())
            return True
    return False


@final
class SigtermHandler:
    """On SIGTERM, raises `Terminated` in the main thread, and detects if that thread doesn't react.

    Args:
        flight: Records that the signal arrived.
    """

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight
        self._postponement = Postponement()
        self._handled_s = 0.0
        self._came_s = 0.0
        self._pipe = -1
        self._forking = threading.local()

    def install(self) -> None:
        """Installs the handler if this is the main thread and the script has no handler itself."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        # Python doesn't run handlers while the main thread is in C code. But an incoming signal
        # immediately writes a byte to the wakeup pipe, no matter what the main thread is doing. The
        # watchdog's thread reads that pipe, which is how it learns about signals that haven't been
        # handled yet.
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.set_blocking(end, False)
        signal.signal(signal.SIGTERM, self._handle)
        others = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        # Data loaders terminate their worker processes with SIGTERM. A forked worker inherits our
        # handler and the rank's pipe, so a signal to the worker would write a byte into that pipe,
        # and the rank would terminate itself. So we remove the handler and the pipe in the child,
        # and block SIGTERM during the fork until that's done.
        os.register_at_fork(
            before=self._hold_back, after_in_parent=self._let_through, after_in_child=self._forget
        )

    def overdue(self) -> bool:
        """Whether SIGTERM arrived more than 5 s ago, and the main thread hasn't reacted to it yet.

        That means it has been in C code all along. Doesn't wait.
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
        """Whether SIGTERM has arrived since the last time we called this."""
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
        # This signal has also written a byte into the pipe. Drain it, or a later call of `overdue`
        # would mistake it for another signal.
        self._drain()
        if self._handled_s and now_s - self._handled_s < ONE_STOP_S:
            return
        self._handled_s = now_s
        self._flight.note("SIGTERM")
        raise Terminated


@final
class DeferredHandler:
    """A signal handler that wraps another handler and stores the exception it raises.

    Attributes:
        handler: The wrapped handler.
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
                raise  # in a forked child, nobody would ask for it
            now_s = time.monotonic()
            if self._times_s and now_s - self._times_s[-1] < _AT_ONCE_S:
                # This is the same signal again: a rank may get it from the launcher as well as
                # directly.
                return
            if self._kept:
                raise
            self._times_s.append(now_s)
            self._kept.append(error)


@contextmanager
def defer_signals() -> Iterator[deque[BaseException]]:
    """Returns a context in which exceptions from signal handlers are stored instead of raised.

    They end up in the deque that the context yields, oldest first. Outside the main thread, the
    context has no effect.
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
            # If the script has installed a different handler in the meantime, leave it alone.
            if isinstance(signal.getsignal(number), DeferredHandler):
                signal.signal(number, handler)
