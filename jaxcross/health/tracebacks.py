"""Python's stacks as users should see them: of all threads of this process, or of an error.

An error's traceback is trimmed: it starts at the script's first line and ends at the user's last
line of code.
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
# Errors that jaxcross raises to the user. In all other errors, the package's lines stay in the
# traceback, because the error may have its cause there.
_OUR_ERRORS = (CutError, ExchangeError, JobError, TypeError, ValueError)


def trim(error: BaseException) -> None:
    """Removes the lines that start a script, and jaxcross's lines at both ends, from a traceback.

    The tracebacks of the error's causes are trimmed as well. If no line would be left, a traceback
    stays as it is. With `jax_traceback_filtering` set to `off`, nothing is trimmed.
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
    """Whether this is a job's error that `Runner.run` raises at the end of the run on every rank.

    The cause of such an error is this rank's own.
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
    """Returns the stack of every thread, the main thread first. Does not stop the threads."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(_frames().items(), key=lambda item: item[0] != main)
    parts = [
        f"thread {names.get(i, '?')!r}:\n{''.join(traceback.format_stack(frame))}"
        for i, frame in frames
    ]
    return "\n".join(parts)


def _frames() -> dict[int, FrameType]:
    """Returns the frame of every thread.

    While Python before 3.11.9 lists the frames, it holds a lock that threads need to start or exit.
    If garbage is collected during that time, such a thread may run, and the process deadlocks
    (python/cpython#106883). So we disable garbage collection.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
