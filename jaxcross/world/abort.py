"""Ending every rank when one fails, whatever state MPI is in."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

# mpirun ends the others at once; this is for an MPI that is itself stuck.
ABORT_GRACE_S = 4.0
# mpirun reads ranks' output through pipes, and drops what it has not read when it is told to end them.
_READ_S = 0.3
_INTERRUPTED = 130


def abort_everywhere(message: str, *, code: int = 1) -> NoReturn:
    """Print `message` and end all ranks through MPI, or this one alone if MPI does not react within 4 s.

    Ends them whatever happens meanwhile: a closed or blocked stderr, another interrupt, the end of the main thread.
    """
    code = code or 1
    timer = threading.Timer(ABORT_GRACE_S, os._exit, args=(code,))
    timer.daemon = False  # else the interpreter might end before, successfully, where a daemon thread aborts
    with suppress(RuntimeError):  # it ends already
        timer.start()
    try:
        _say(message)
        threading.Event().wait(_READ_S)
    finally:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)
        os._exit(code)


def _say(text: str) -> None:
    with suppress(Exception):  # a closed stream must not keep the others waiting
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()


def install_hooks(rank: int, size: int) -> None:
    """Make an exception that nobody catches, in any thread, end all ranks, its traceback printed once with the rank."""
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            abort_everywhere(f"jaxcross: rank {rank} was interrupted; all {size} ranks end.", code=_INTERRUPTED)
        _say(f"jaxcross: rank {rank} of {size} failed:")
        with suppress(Exception):
            previous(kind, value, trace)
        abort_everywhere(f"jaxcross: rank {rank} failed with {kind.__name__}; all {size} ranks end.")

    def on_thread_exception(args: Any) -> None:
        if args.exc_type is SystemExit:
            return
        name = args.thread.name if args.thread is not None else "?"
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        text = f"jaxcross: rank {rank} of {size} failed in thread {name!r}:\n{''.join(lines)}"
        abort_everywhere(f"{text}jaxcross: rank {rank} failed with {args.exc_type.__name__}; all {size} ranks end.")

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
