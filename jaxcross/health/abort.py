"""Terminates every rank if one fails, whatever state MPI is in.

MPI has no way to continue without a rank, so when a rank fails, the others would wait for it
forever. The failing rank therefore prints why, sends the reason to the other ranks, and calls
`MPI_Abort`. Every part of this may hang or fail itself (a closed stderr, a broken link, a stuck
MPI), so a timer ends the process in any case.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, final

from jaxcross._endings import ExitKind
from jaxcross.errors import clause, first_line, shortened
from jaxcross.health.tracebacks import ends_run, trim

# Normally mpirun terminates the other ranks at once. This limit is for an MPI that is itself stuck.
ABORT_GRACE_S = 4.0
# mpirun reads the ranks' output through pipes. When it has to terminate them, it drops whatever it
# hasn't read yet, so we give it some time.
_READ_S = 0.3
INTERRUPTED = 130
TERMINATED = 143


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReason:
    """The reason why a rank terminates all others.

    Attributes:
        text: One sentence, which the other ranks repeat.
        kind: How this rank ends: `FAILED`, `INTERRUPTED`, `TERMINATED`, or `REPORTED`.
        code: The exit code of all ranks.
        lost: The ranks that are reported.
        script_raised: Whether the script raised an exception, so that a restarted run would raise
            it as well. MPI's own exceptions don't count, because they may come from a lost rank.
    """

    text: str
    kind: ExitKind = ExitKind.FAILED
    code: int = 1
    lost: tuple[int, ...] = ()
    script_raised: bool = False


Notify = Callable[[AbortReason], None]
"""Sends the other ranks the reason why they are terminated. May wait for about a second."""


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, with exit code 143.

    It's a subclass so that code that cleans up after Ctrl-C also cleans up after SIGTERM.
    """


def abort_everywhere(message: str, reason: AbortReason, notify: Notify | None = None) -> NoReturn:
    """Prints `message`, notifies the other ranks and terminates all of them through MPI.

    If MPI doesn't react, only this process is terminated. In any case it ends within about 4 s,
    even if stderr is closed or blocked, if another interrupt arrives, or if the main thread ends.
    """
    timer = threading.Timer(ABORT_GRACE_S, os._exit, args=(reason.code or 1,))
    # Otherwise, if a daemon thread aborts, the interpreter might exit first, with success.
    timer.daemon = False
    with suppress(RuntimeError):  # the interpreter is shutting down and starts no more threads
        timer.start()
    try:
        print_error(message)
        if notify is not None:
            with suppress(Exception):
                notify(reason)
        threading.Event().wait(_READ_S)
    finally:
        end_processes(reason.code)


def end_processes(code: int) -> NoReturn:
    """Terminates all ranks through MPI, without a message.

    If MPI hasn't been loaded yet, this only ends this process, and `mpirun` terminates the others.
    """
    code = code or 1
    if "mpi4py.MPI" not in sys.modules:
        os._exit(code)
    from mpi4py import MPI

    try:
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)
    finally:
        os._exit(code)


def print_error(text: str) -> None:
    """Prints on stderr. Never raises."""
    with suppress(Exception):
        # A closed stream must not keep the other ranks waiting. We print in a single write, even if
        # Python's output is unbuffered.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)
        sys.stdout.flush()


def is_interactive() -> bool:
    """Whether a person types into this process: a prompt, `python -i`, IPython, or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def traceback_text(error: BaseException) -> str:
    """Returns an error's traceback, trimmed for users. Never raises."""
    with suppress(Exception):
        trim(error)
        return "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__} (its traceback cannot be made)"


@final
class ExceptionHooks:
    """Hooks with which an uncaught exception in any thread terminates all ranks.

    The traceback is printed once, with the rank. In some cases, the hooks that were installed
    before are called instead: in a forked child process, whose end is not the rank's; in an
    interactive session; and if there is only one rank, because no other rank waits for it.

    Args:
        rank: This rank.
        size: Number of ranks.

    Attributes:
        notify: Sends the other ranks the reason, once there is a watchdog.
        failed_alike: Whether another rank has failed in the same way and will terminate all ranks.
            Waits for at most 1.5 s.
        report: Notes that this rank prints its own reason.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.notify: Notify | None = None
        self.failed_alike: Callable[[AbortReason], bool] | None = None
        self.report: Callable[[], None] = _nothing
        self._rank = rank
        self._size = size
        self._pid = os.getpid()
        self._previous = sys.excepthook
        self._previous_of_threads = threading.excepthook

    def install(self) -> None:
        """Installs the hooks in this process."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def _fails_alike(self, failure: AbortReason) -> bool:
        """Whether another rank reports the same failure; if so, waits to be terminated by it."""
        alike = False
        with suppress(BaseException):  # after an interrupt, this rank reports its own failure
            alike = self.failed_alike is not None and self.failed_alike(failure)
        if alike:
            with suppress(BaseException):  # Open MPI sends SIGTERM before it kills
                threading.Event().wait(ABORT_GRACE_S)
        return alike

    def _print(self, error: BaseException) -> None:
        heading = f"jaxcross: rank {self._rank} of {self._size} failed:"
        text = traceback_text(error)
        # We print in a single write; otherwise the tracebacks of several ranks interleave.
        if self._previous is sys.__excepthook__:
            print_error(f"{heading}\n{text}")
            return
        print_error(heading)
        with suppress(Exception):
            self._previous(type(error), error, error.__traceback__)

    def _show(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        """Shows an exception as Python would, but doesn't repeat the cause of a job's failure."""
        if self._previous is sys.__excepthook__ and getattr(value, "cause_rank", None) is not None:
            print_error("".join(traceback.format_exception(value, chain=False)).rstrip())
        else:
            self._previous(kind, value, trace)

    def _on_exception(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        rank = self._rank
        size = self._size
        if os.getpid() != self._pid or (is_interactive() and not issubclass(kind, Terminated)):
            self._show(kind, value, trace)
            return
        if issubclass(kind, KeyboardInterrupt):
            stop = stop_reason(rank, terminated=issubclass(kind, Terminated))
            abort_everywhere(f"jaxcross: {stop.text}; all {size} ranks end.", stop, self.notify)
        failure = AbortReason(
            text=f"rank {rank} failed with {_short(kind, value)}",
            script_raised=not _is_of_mpi(kind),
        )
        if size == 1:
            if self.notify is not None:
                with suppress(Exception):
                    self.notify(failure)  # writes it to the event file
            with suppress(Exception):
                trim(value)
            self._show(kind, value, value.__traceback__)
            return
        # This error is the same on every rank, so a traceback is only needed for an error that this
        # rank raised itself.
        if ends_run(value):
            self.report()
            # A failed job has already printed its traceback when it left the run. Only rank 0
            # prints the notes.
            if value.__cause__ is not None and getattr(value, "cause_rank", None) is None:
                self._print(value.__cause__)
            notes = getattr(value, "__notes__", ()) if rank == 0 else ()
            text = "\n".join([f"{kind.__name__}: {value}", *notes])
            abort_everywhere(
                f"jaxcross: rank {rank} of {size} ends after the run: {text}", failure, self.notify
            )
        if self._fails_alike(failure):
            end_processes(failure.code)
        self._print(value)
        message = f"jaxcross: rank {rank} failed with {kind.__name__}; all {size} ranks end."
        abort_everywhere(message, failure, self.notify)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        rank = self._rank
        size = self._size
        error = args.exc_value
        own = args.thread is not None and args.thread.name.startswith("jaxcross-")
        # If one of jaxcross's own threads died, a run would wait forever, so its failure always
        # terminates all ranks.
        goes_on = not own and (size == 1 or is_interactive())
        if os.getpid() != self._pid or goes_on:
            self._previous_of_threads(args)
            return
        if args.exc_type is SystemExit:
            return
        name = args.thread.name if args.thread is not None else "?"
        if error is not None:
            with suppress(Exception):
                trim(error)
        lines = traceback.format_exception(error)
        text = f"jaxcross: rank {rank} of {size} failed in thread {name!r}:\n{''.join(lines)}"
        abort_everywhere(
            f"{text}jaxcross: rank {rank} failed with {args.exc_type.__name__}; all {size} ranks "
            "end.",
            AbortReason(
                text=f"rank {rank} failed in thread {name!r} with {_short(args.exc_type, error)}",
                script_raised=not _is_of_mpi(args.exc_type),
            ),
            self.notify,
        )


def _nothing() -> None:
    """Stands in for the watchdog before there is one."""


def stop_reason(rank: int, *, terminated: bool) -> AbortReason:
    """Returns the reason of a termination that a person or a batch system has requested."""
    if terminated:
        return AbortReason(
            text=f"rank {rank} was told to end (SIGTERM)", kind=ExitKind.TERMINATED, code=TERMINATED
        )
    return AbortReason(
        text=f"rank {rank} was interrupted", kind=ExitKind.INTERRUPTED, code=INTERRUPTED
    )


def _is_of_mpi(kind: type[BaseException]) -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and issubclass(kind, mpi.Exception)


def _short(kind: type[BaseException], value: BaseException | None) -> str:
    text = clause(shortened(first_line(str(value)), 300))
    return f"{kind.__name__}: {text}" if text else kind.__name__
