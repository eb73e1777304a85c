"""Terminates all ranks when one of them fails, whatever state MPI is in.

MPI can't continue without a rank. If a rank raised an exception and just exited, the other ranks
would wait for it in their next exchange, without any error, until somebody notices that the run
makes no progress. So the failing rank prints what went wrong, sends the reason to the other ranks,
and calls `MPI_Abort`, which terminates all of them.

We can't rely on any of these steps, because what made the rank fail may affect them as well: stderr
may be closed or blocked, the link may be broken, or MPI may be stuck in a call of another thread.
So before anything else, we start a timer that ends this process after 4 s in any case. When it's
gone, `mpirun` or the other ranks' heartbeats notice that.

We also want one traceback rather than one per rank. If all ranks run into the same bug, the lowest
of them prints it, and each of the others prints a single line. If a job has failed, `Runner.run`
raises the same error on every rank at the end of the run; that error is printed without its
traceback, because the job's own traceback was already printed when the job left the run.
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

# Normally, `MPI_Abort` makes mpirun terminate all ranks immediately. This limit applies if MPI
# itself is stuck.
ABORT_GRACE_S = 4.0
# The time between printing the reason for an abort and aborting. mpirun reads the ranks' output
# through pipes. When it terminates the ranks, it drops whatever it hasn't read yet. Without this
# delay, the message that explains the failure could be lost.
_READ_S = 0.3
# Exit codes, by the convention of shells: 128 plus the number of the signal.
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
            pointless, because it would raise again. MPI's own exceptions don't count, because they
            may be caused by a lost rank.
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

    Even if MPI doesn't react to the abort, this process ends itself within about 4 s. It does so
    even if stderr is closed or blocked, another interrupt arrives, or the main thread ends in the
    meantime.
    """
    timer = threading.Timer(ABORT_GRACE_S, os._exit, args=(reason.code or 1,))
    # The timer must not run in a daemon thread, because Python doesn't wait for those when it
    # exits. If this function is called from a daemon thread while the main thread is ending, the
    # interpreter could exit before the abort, with exit code 0, as if nothing had failed.
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

    If MPI hasn't been loaded yet, this only ends this process. `mpirun` then terminates the others.
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
        # Printing raises if the stream is closed. We have to continue in that case, because the
        # other ranks are still waiting. The text and its newline are printed by a single write, so
        # another rank's output can't end up between them.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)
        sys.stdout.flush()


def is_interactive() -> bool:
    """Whether a user types into this process: a prompt, `python -i`, IPython, or a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def traceback_text(error: BaseException) -> str:
    """Returns an error's traceback, without internal frames. Never raises."""
    with suppress(Exception):
        trim(error)
        return "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__} (its traceback cannot be made)"


@final
class ExceptionHooks:
    """Exception hooks that terminate all ranks after an uncaught exception in any thread.

    After an uncaught exception, the rank prints its number and the traceback before it terminates
    all ranks. There are three situations in which an exception doesn't concern other ranks, so we
    call the previously installed hooks instead: in a forked child process, because the rank itself
    keeps running; in an interactive session, because the user can just continue; and if there's
    only one rank.

    Args:
        rank: This rank.
        size: Number of ranks.

    Attributes:
        notify: Sends the reason to the other ranks. None until there's a watchdog.
        failed_alike: Returns whether another rank has failed in the same way and is going to
            terminate all ranks. Waits for at most 1.5 s.
        report: Records that this rank is going to print a reason of its own.
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
        """Whether another rank reports this failure, and if so, waits to be terminated by it."""
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
        # One write for heading and traceback. With several writes, the tracebacks of different
        # ranks would be interleaved.
        if self._previous is sys.__excepthook__:
            print_error(f"{heading}\n{text}")
            return
        print_error(heading)
        with suppress(Exception):
            self._previous(type(error), error, error.__traceback__)

    def _show(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        """Shows an exception like Python, but if it's a job's failure, leaves out its cause."""
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
        # If the script itself raised an exception, a restart can't help, because it would raise
        # again. An exception that comes from MPI is different: it may just mean that another rank
        # was lost.
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
        # If a job has failed, `Runner.run` raises an error at the end of the run, with the same
        # text on every rank. The traceback of that error would only repeat what its text says. The
        # traceback worth printing is that of its cause, i.e. of the exception that was raised on
        # this rank.
        if ends_run(value):
            self.report()
            # If a job failed, its traceback was printed at the time when it left the run, so we
            # don't print it again. The notes of the error are the same on all ranks, so only rank 0
            # prints them.
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
        # If one of our own threads dies, e.g. the one that makes the exchanges, nothing takes over
        # its work, and the run would wait for that thread forever. So we terminate all ranks in
        # this case, even in an interactive session or with a single rank.
        continues = not own and (size == 1 or is_interactive())
        if os.getpid() != self._pid or continues:
            self._previous_of_threads(args)
            return
        # As usual in Python, `SystemExit` ends only its own thread.
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
    """Returns the reason for an abort that a user or a batch system has requested."""
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
