"""Handlers for Ctrl-C and SIGTERM that neither lose an interrupt nor interrupt a run at random.

When a signal arrives, Python runs its handler in the main thread, between two arbitrary
instructions. If the handler raises an exception, it's as if the code that was interrupted had
raised it. There are three ways in which this can go wrong:

- **The exception is lost.** If an exception is raised in a callback of the garbage collector,
  Python prints and drops it. JAX installs such a callback, and garbage is collected all the time
  while Python imports modules or JAX traces a function. So without this module, half of all Ctrl-Cs
  would print "Exception ignored in _xla_gc_callback" and have no other effect. Something similar
  can happen while an extension module is being loaded: its initialization may import other modules,
  and may then mistake our exception for a failed import, or crash. So if the main thread is in one
  of these places, our handler doesn't raise. It has the signal sent again a moment later
  (`Postponement`).

  By that time, the script may have ended, and Python may be running the callbacks of `atexit`. An
  exception would only interrupt one of them, and whatever it was about to close would stay open,
  while the process would end anyway. So we drop a signal that was sent again if the interpreter is
  exiting. A new signal still raises an exception there, because the user may be pressing Ctrl-C to
  get past a callback that hangs.
- **The handler never runs**, because the main thread is stuck in C code. This matters for SIGTERM,
  with which batch systems end a job: if nothing happens, they kill the process a little later.
  `SigtermHandler` normally treats SIGTERM like Ctrl-C. In addition, the watchdog's thread asks it
  regularly whether a signal has arrived to which the main thread hasn't reacted.
- **The exception comes at the wrong moment.** During a run, it could interrupt the main thread
  while that thread is changing something. So `defer_signals` stores exceptions from signal handlers
  until the main thread asks for them. This covers the user's own handlers as well, such as one for
  a batch system's warning signal. There's one catch: after the run, e.g. while its last states are
  being saved, the main thread doesn't ask any more, so the exception would never be raised. So when
  a second signal arrives while the first exception is still stored, its exception is raised
  immediately.
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
# All signals within this time count as one. A batch system sends its signal to every process of a
# job, including `mpirun`, and `mpirun` forwards the signal to the ranks. So each rank gets it
# several times.
ONE_STOP_S = 2.0
_REACT_S = 5.0
_AT_ONCE_S = 0.5  # a user who presses Ctrl-C twice takes longer

Handler = Callable[[int, FrameType | None], object]


@final
class Postponement:
    """Decides whether a signal handler raises now, or whether the signal is sent again later."""

    def __init__(self) -> None:
        self._sent_again = False

    def lets_through(self, number: int, frame: FrameType | None) -> bool:
        """Whether the handler should raise now. If not, the signal is sent again or dropped."""
        sent_again = self._sent_again
        self._sent_again = False
        # Drop a signal that was sent again if the interpreter is exiting by now. We can tell from
        # the main thread: Python marks it as ended as soon as the exit begins, although handlers
        # still run in it. It wouldn't be enough if the timer's thread checked this before sending
        # the signal, because the exit could begin before the signal arrives.
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

    If the script has installed a handler of its own, or there's an `InterruptHandler` already, that
    one stays in place.
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
        """Installs the handler, if this is the main thread and the script has no handler of its
        own.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        # As long as the main thread is in C code, Python doesn't run any handler. But whatever the
        # main thread is doing, as soon as a signal arrives, a byte is written to the wakeup pipe.
        # The watchdog's thread reads that pipe, so it notices signals that haven't been handled
        # yet.
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.set_blocking(end, False)
        signal.signal(signal.SIGTERM, self._handle)
        others = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        # Data loaders terminate their worker processes by SIGTERM. A forked worker inherits our
        # handler and the rank's pipe, so the worker's signal would write a byte into that pipe, and
        # the rank would terminate itself. So we remove the handler and the pipe in the child, and
        # block SIGTERM during the fork until that's done.
        os.register_at_fork(
            before=self._hold_back, after_in_parent=self._let_through, after_in_child=self._forget
        )

    def overdue(self) -> bool:
        """Whether SIGTERM arrived more than 5 s ago, and the main thread hasn't reacted to it yet.

        In that case, the main thread has been in C code all the time. Does not wait.
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
        # During a run, our handler is inside a `DeferredHandler`.
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
        # This signal has also written a byte into the pipe. Remove it, because otherwise a later
        # call of `overdue` would find it and think that another signal has arrived.
        self._drain()
        if self._handled_s and now_s - self._handled_s < ONE_STOP_S:
            return
        self._handled_s = now_s
        self._flight.note("SIGTERM")
        raise Terminated


@final
class DeferredHandler:
    """A signal handler that calls another handler, and stores the exception that it raises.

    Attributes:
        handler: The other handler, which this one replaces.
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
                # This is the same signal once more: a rank may get it from the launcher as well as
                # directly.
                return
            if self._kept:
                raise
            self._times_s.append(now_s)
            self._kept.append(error)


@contextmanager
def defer_signals() -> Iterator[deque[BaseException]]:
    """Returns a context in which exceptions from signal handlers are stored instead of raised.

    They are in the deque that the context yields, oldest first. Outside the main thread, the
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
            # If the script has installed a different handler in the meantime, keep that one.
            if isinstance(signal.getsignal(number), DeferredHandler):
                signal.signal(number, handler)
