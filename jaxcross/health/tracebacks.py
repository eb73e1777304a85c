"""Python stacks in a form that's useful for users: of all threads, or of an exception.

From an exception's traceback, we remove the frames that don't help the user. It then starts at the
script's first line and ends at the last line of the user's own code.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType

from jaxcross.errors import CutError, ExchangeError, JobError

_PACKAGE = f"{Path(__file__).parents[1]}/"
_STARTERS = ("<frozen runpy>", "mpi4py/__main__.py", "mpi4py/run.py")
# Errors that we raise on purpose, to tell the user about something. If any other exception is
# raised in our own code, it may be a bug in there, so we leave our frames in its traceback.
_OUR_ERRORS = (CutError, ExchangeError, JobError, TypeError, ValueError)


def trim(error: BaseException) -> None:
    """Removes from a traceback the frames that start a script, and our own frames at both ends.

    Also trims the tracebacks of the exceptions that caused this one. If no frame would be left, a
    traceback stays as it is. With `jax_traceback_filtering` set to `off`, nothing is trimmed.
    """
    import jax

    if jax.config.values["jax_traceback_filtering"] == "off":
        return
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _without_ends(current)
        current = current.__cause__ or current.__context__


def ends_run(error: BaseException) -> bool:
    """Whether `Runner.run` raised this error at the end of a run, because a job has failed.

    Such an error is raised on every rank, but its cause is what happened on this one.
    """
    frames = [line.tb_frame for line in _lines(error.__traceback__)]
    places = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames}
    raised = ("jaxcross.jobs.runner", "raise_first") in places
    return raised and isinstance(error, JobError | ExchangeError)


def _without_ends(error: BaseException) -> TracebackType | None:
    lines = _lines(error.__traceback__)
    kept = lines[:]
    while kept and (_file(kept[0]).endswith(_STARTERS) or _file(kept[0]).startswith(_PACKAGE)):
        kept.pop(0)
    while kept and isinstance(error, _OUR_ERRORS) and _file(kept[-1]).startswith(_PACKAGE):
        kept.pop()
    trace: TracebackType | None = None
    for line in reversed(kept or lines):
        trace = TracebackType(trace, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return trace


def _file(line: TracebackType) -> str:
    return line.tb_frame.f_code.co_filename


def _lines(trace: TracebackType | None) -> list[TracebackType]:
    lines = []
    while trace is not None:
        lines.append(trace)
        trace = trace.tb_next
    return lines


def stacks() -> str:
    """Returns the stacks of all threads, the main thread's first. Does not stop the threads."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(_frames().items(), key=lambda item: item[0] != main)
    parts = [
        f"thread {names.get(i, '?')!r}:\n{''.join(traceback.format_stack(frame))}"
        for i, frame in frames
    ]
    return "\n".join(parts)


def _frames() -> dict[int, FrameType]:
    """Returns the current frame of every thread.

    Python before 3.11.9 holds a lock while it lists the frames. If garbage is collected at that
    moment, another thread may get to run, and if that thread is just starting or exiting, it needs
    the same lock, so the process deadlocks (python/cpython#106883). So we disable garbage
    collection meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
