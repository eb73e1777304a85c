"""Ending every rank when one fails, whatever state MPI is in."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from jaxcross.errors import clause, first_line, shortened
from jaxcross.health.tracebacks import ends_run, trim

# mpirun ends the others at once; this is for an MPI that is itself stuck.
ABORT_GRACE_S = 4.0
# mpirun reads ranks' output through pipes, and drops what it has not read when it is told to end them.
_READ_S = 0.3
INTERRUPTED, TERMINATED = 130, 143


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReason:
    """Why a rank ends all others.

    Attributes:
        reason: One sentence, which the other ranks repeat.
        how: `failed`, `interrupted`, `terminated`, or `reported`: trouble of other ranks.
        code: The exit code of all ranks.
        lost: The ranks that are reported.
    """

    reason: str
    how: str = "failed"
    code: int = 1
    lost: tuple[int, ...] = ()


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whoever cleans up after Ctrl-C does so for it, too; the exit code is 143."""


# Who tells the other ranks why. One process has one MPI, whose end this file is.
_TELLERS: list[Callable[[AbortReason], None]] = []


def on_abort(tell: Callable[[AbortReason], None]) -> None:
    """Has `tell` called before this rank ends the others. It may wait for about a second."""
    _TELLERS.append(tell)


def abort_everywhere(message: str, ending: AbortReason) -> NoReturn:
    """Print `message`, tell the other ranks why, and end all through MPI, or this one alone if MPI does not react.

    Ends them within about 4 s whatever happens meanwhile: a closed or blocked stderr, another interrupt, the end of the
    main thread.
    """
    timer = threading.Timer(ABORT_GRACE_S, os._exit, args=(ending.code or 1,))
    timer.daemon = False  # else the interpreter might end before, successfully, where a daemon thread aborts
    with suppress(RuntimeError):  # it ends already
        timer.start()
    try:
        say(message)
        for tell in _TELLERS:
            with suppress(Exception):
                tell(ending)
        threading.Event().wait(_READ_S)
    finally:
        end_processes(ending.code)


def end_processes(code: int) -> NoReturn:
    """Ends all ranks through MPI, without a word."""
    code = code or 1
    from mpi4py import MPI

    try:
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)
    finally:
        os._exit(code)


def say(text: str) -> None:
    """Prints on stderr. Does not raise."""
    with suppress(Exception):  # a closed stream must not keep the others waiting
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write, also where Python does not buffer
        sys.stdout.flush()


def install_hooks(rank: int, size: int) -> None:
    """Make an exception that nobody catches, in any thread, end all ranks, its traceback printed once with the rank.

    In a process that this one forks, the hooks that were there before do their work: its end is not the rank's.
    """
    previous, previous_of_threads, pid = sys.excepthook, threading.excepthook, os.getpid()

    def show(error: BaseException) -> None:
        heading = f"jaxcross: rank {rank} of {size} failed:"
        with suppress(Exception):
            trim(error)
            if previous is sys.__excepthook__:  # in one write, or those of several ranks get into each other
                heading += "\n" + "".join(traceback.format_exception(error)).rstrip()
        say(heading)
        if previous is not sys.__excepthook__:
            with suppress(Exception):
                previous(type(error), error, error.__traceback__)

    def on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:
            previous(kind, value, trace)
            return
        if issubclass(kind, KeyboardInterrupt):
            ending = stop_of(rank, terminated=issubclass(kind, Terminated))
            abort_everywhere(f"jaxcross: {ending.reason}; all {size} ranks end.", ending)
        ending = AbortReason(reason=f"rank {rank} failed with {_short(kind, value)}")
        if ends_run(value):  # the same on every rank: only what this one raised itself needs a traceback
            if value.__cause__ is not None:
                show(value.__cause__)
            text = "\n".join([f"{kind.__name__}: {value}", *getattr(value, "__notes__", ())])
            abort_everywhere(f"jaxcross: rank {rank} of {size} ends after the run: {text}", ending)
        show(value)
        abort_everywhere(f"jaxcross: rank {rank} failed with {kind.__name__}; all {size} ranks end.", ending)

    def on_thread_exception(args: Any) -> None:
        if os.getpid() != pid:
            previous_of_threads(args)
            return
        if args.exc_type is SystemExit:
            return
        name = args.thread.name if args.thread is not None else "?"
        with suppress(Exception):
            trim(args.exc_value)
        lines = traceback.format_exception(args.exc_value)
        text = f"jaxcross: rank {rank} of {size} failed in thread {name!r}:\n{''.join(lines)}"
        abort_everywhere(
            f"{text}jaxcross: rank {rank} failed with {args.exc_type.__name__}; all {size} ranks end.",
            AbortReason(reason=f"rank {rank} failed in thread {name!r} with {_short(args.exc_type, args.exc_value)}"),
        )

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception


def stop_of(rank: int, *, terminated: bool) -> AbortReason:
    """The end that a person or a batch system wants."""
    if terminated:
        return AbortReason(reason=f"rank {rank} was told to end (SIGTERM)", how="terminated", code=TERMINATED)
    return AbortReason(reason=f"rank {rank} was interrupted", how="interrupted", code=INTERRUPTED)


def _short(kind: type[BaseException], value: BaseException | None) -> str:
    text = clause(shortened(first_line(str(value)), 300))
    return f"{kind.__name__}: {text}" if text else kind.__name__
