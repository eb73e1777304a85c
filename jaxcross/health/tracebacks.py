"""Tracebacks as a user needs them: from the first line of the script to the last one that is the user's own."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from jaxcross.errors import CutError, ExchangeError, JobError

_PACKAGE = f"{Path(__file__).parents[1]}/"
_STARTERS = ("<frozen runpy>", "mpi4py/__main__.py", "mpi4py/run.py")
_SAID_BY_US = (CutError, ExchangeError, JobError, TypeError, ValueError)  # of others in our own lines, all lines count


def trim(error: BaseException) -> None:
    """Leaves out, of an error and of those that led to it, what starts a script and jaxcross's own lines at its ends.

    A traceback that would have no line left stays as it is, and so do all where JAX is told not to filter its own.
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
    """Whether this is a job's error that `Runner.run` raises on every rank at its end; its cause is this rank's own."""
    modules = {line.tb_frame.f_globals.get("__name__") for line in _lines(error.__traceback__)}
    return "jaxcross.jobs.outcome" in modules and isinstance(error, JobError | ExchangeError)


def _without_ends(error: BaseException) -> TracebackType | None:
    lines = _lines(error.__traceback__)
    kept = lines[:]
    while kept and (_file(kept[0]).endswith(_STARTERS) or _file(kept[0]).startswith(_PACKAGE)):
        kept.pop(0)
    while kept and isinstance(error, _SAID_BY_US) and _file(kept[-1]).startswith(_PACKAGE):
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
