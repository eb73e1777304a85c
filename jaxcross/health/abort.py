"""Terminates all ranks when one of them fails, whatever state MPI is in.

MPI can't carry on without a rank. If a rank raised an exception and just exited, the other ranks
would wait for it in their next exchange, without any error, until somebody notices that the run
isn't getting anywhere. So the failing rank prints what went wrong, sends the reason to the other
ranks, and calls `MPI_Abort`, which takes all of them down.

None of these steps is guaranteed to work, because whatever made the rank fail may get in their way,
too: stderr may be closed or blocked, the link may be down, or another thread may be stuck in an MPI
call. So before anything else, we start a timer that ends this process after 4 s no matter what.
`mpirun` or the other ranks' heartbeats will notice that it's gone.

We also want a single traceback rather than one from every rank. If all ranks hit the same bug, the
lowest rank prints its traceback and the others print a single line each. If a job has failed,
`Runner.run` raises the same error on every rank at the end of the run; that error is printed
without its traceback, because the job's own traceback was already printed when the job left the
run.
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

# Normally, `MPI_Abort` makes mpirun terminate all ranks immediately. This limit kicks in if MPI
# itself is stuck.
ABORT_GRACE_S = 4.0
# How long to wait between printing the reason for an abort and aborting. mpirun reads the ranks'
# output through pipes, and when it terminates the ranks, it drops whatever it hasn't read yet.
# Without this delay, we could lose the very message that explains the failure.
_READ_S = 0.3
# Exit codes follow the shell convention: 128 plus the signal number.
INTERRUPTED = 130
TERMINATED = 143


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReason:
    """Why a rank terminates all ranks.

    Attributes:
        text: The reason in one sentence. The other ranks print it, too.
        kind: How this rank exits: `FAILED`, `INTERRUPTED`, `TERMINATED` or `REPORTED`.
        code: The exit code for all ranks.
        lost: The ranks that this rank reports as lost.
        script_raised: Whether the script itself raised an exception. If so, restarting the run is
            pointless, because it would only raise again. MPI's own exceptions don't count, because
            they may be due to a lost rank.
    """

    text: str
    kind: ExitKind = ExitKind.FAILED
    code: int = 1
    lost: tuple[int, ...] = ()
    script_raised: bool = False


Notify = Callable[[AbortReason], None]
"""Sends the reason for an abort to the other ranks. May wait for about a second."""


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, for exit code 143.

    It's a subclass of `KeyboardInterrupt`, so user code that cleans up after Ctrl-C also cleans up
    after SIGTERM.
    """


def abort_everywhere(message: str, reason: AbortReason, notify: Notify | None = None) -> NoReturn:
    """Prints `message`, sends the reason to the other ranks, and terminates all ranks through MPI.

    Even if MPI doesn't respond to the abort, this process is gone within about 4 s, regardless of
    whether stderr is closed or blocked, another interrupt arrives, or the main thread ends in the
    meantime.
    """
    timer = threading.Timer(ABORT_GRACE_S, os._exit, args=(reason.code or 1,))
    # The timer must not be a daemon thread, because Python doesn't wait for those at exit. If we're
    # called from a daemon thread while the main thread is ending, the interpreter could beat us to
    # the exit, with exit code 0, as if nothing had failed.
    timer.daemon = False
    with suppress(RuntimeError):  # raised if the interpreter is already shutting down
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
    """Terminates all ranks through MPI, without printing anything.

    If MPI hasn't been loaded yet, this just ends this process and leaves the others to `mpirun`.
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
    """Prints a text on stderr. Never raises."""
    with suppress(Exception):
        # Printing raises if the stream is closed. We have to carry on regardless, because the other
        # ranks are still waiting. Text and newline go out in a single write, so another rank's
        # output can't end up between them.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)
        sys.stdout.flush()


def is_interactive() -> bool:
    """Whether a user is typing into this process: a prompt, `python -i`, IPython, or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def traceback_text(error: BaseException) -> str:
    """Returns an error's traceback, without internal frames. Never raises."""
    with suppress(Exception):
        trim(error)
        return "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__} (its traceback cannot be shown)"


@final
class ExceptionHooks:
    """Exception hooks that terminate all ranks after an uncaught exception in any thread.

    After an uncaught exception, the rank prints its number and the traceback, and then terminates
    all ranks. In three situations, an exception is none of the other ranks' business, and we fall
    back to the previously installed hooks: in a forked child process (the rank itself keeps
    running), in an interactive session (the user can just continue), and with a single rank.

    Args:
        rank: This rank.
        size: Number of ranks.

    Attributes:
        notify: Sends the reason to the other ranks. None until there's a watchdog.
        failed_alike: Returns whether another rank has failed in the same way and is going to
            terminate all ranks. Waits for at most 1.5 s.
        report: Records that this rank is going to print its own reason.
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
        """Whether another rank reports this failure. If so, waits to be terminated by that rank."""
        alike = False
        with suppress(BaseException):  # after an interrupt, this rank reports the failure itself
            alike = self.failed_alike is not None and self.failed_alike(failure)
        if alike:
            with suppress(BaseException):  # Open MPI sends SIGTERM before SIGKILL
                threading.Event().wait(ABORT_GRACE_S)
        return alike

    def _print(self, error: BaseException) -> None:
        heading = f"jaxcross: rank {self._rank} of {self._size} failed:"
        text = traceback_text(error)
        # Print heading and traceback in a single write, or the tracebacks of different ranks would
        # get mixed up.
        if self._previous is sys.__excepthook__:
            print_error(f"{heading}\n{text}")
            return
        print_error(heading)
        with suppress(Exception):
            self._previous(type(error), error, error.__traceback__)

    def _show(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        """Shows an exception the way Python does, but leaves out the cause of a job's failure."""
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
        # If the script itself raised an exception, a restart won't help, because it would raise
        # again. An exception that comes from MPI is a different matter: it may just mean that
        # another rank was lost.
        failure = AbortReason(
            text=f"rank {rank} failed with {_short(kind, value)}",
            script_raised=not _is_of_mpi(kind),
        )
        if size == 1:
            if self.notify is not None:
                with suppress(Exception):
                    self.notify(failure)  # records the failure in the event file
            with suppress(Exception):
                trim(value)
            self._show(kind, value, value.__traceback__)
            return
        # After a job has failed, `Runner.run` raises an error at the end of the run, with the same
        # text on every rank. That error's traceback adds nothing to its text. The traceback worth
        # printing is that of its cause, i.e. of the exception raised on this rank.
        if ends_run(value):
            self.report()
            # A failed job's traceback was already printed when the job left the run, so don't print
            # it again. The error's notes are the same on all ranks, so it's enough for rank 0 to
            # print them.
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
        # If one of our own threads dies, e.g. the exchange thread, nothing takes over its work, and
        # the run would wait for it forever. So in this case, terminate all ranks, even in an
        # interactive session or with a single rank.
        continues = not own and (size == 1 or is_interactive())
        if os.getpid() != self._pid or continues:
            self._previous_of_threads(args)
            return
        # As usual in Python, `SystemExit` only ends its own thread.
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
    """Default for `report`, until there's a watchdog."""


def stop_reason(rank: int, *, terminated: bool) -> AbortReason:
    """Returns the reason for an abort requested by the user or a batch system."""
    if terminated:
        return AbortReason(
            text=f"rank {rank} received SIGTERM", kind=ExitKind.TERMINATED, code=TERMINATED
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
