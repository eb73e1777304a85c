"""Python stacks in a form that's useful to users: of all threads, or of an exception.

We strip an exception's traceback of frames that don't help the user: those that start the script,
and our own frames at both ends. What's left begins with the script's first line and ends with the
last line of the user's own code.
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
# Errors that we raise on purpose, to tell the user about a mistake. Our own frames are just noise
# in their tracebacks, so we remove them. Any other exception from our code may be due to a bug in
# it, so there our frames stay.
_OUR_ERRORS = (CutError, ExchangeError, JobError, TypeError, ValueError)


def trim(error: BaseException) -> None:
    """Removes from a traceback the frames that start a script, and our own frames at both ends.

    The exceptions that caused this error are trimmed as well. A traceback that would end up empty
    is left as it is. If the user has set `jax_traceback_filtering` to `off`, this is a no-op.
    """
    jax = sys.modules.get("jax")  # an error that came before JAX shouldn't have to wait for it
    if jax is not None and jax.config.values["jax_traceback_filtering"] == "off":
        return
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _without_ends(current)
        current = current.__cause__ or current.__context__


def ends_run(error: BaseException) -> bool:
    """Whether `Runner.run` raised this error at the end of a run, because a job has failed.

    Such an error is raised on every rank, but its cause is what happened on this rank.
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

    Disables garbage collection in the meantime, to avoid a deadlock in Python before 3.11.9
    (python/cpython#106883), which holds a lock while it lists the frames. If garbage collection
    kicks in at that moment, another thread may get to run, and if that thread is just starting or
    exiting, it needs the same lock.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
