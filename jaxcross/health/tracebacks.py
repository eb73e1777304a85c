"""Tracebacks trimmed for users: from the first line of the script to the last line of the user's
own code.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from jaxcross.errors import CutError, ExchangeError, JobError

_PACKAGE = f"{Path(__file__).parents[1]}/"
_STARTERS = ("<frozen runpy>", "mpi4py/__main__.py", "mpi4py/run.py")
# Errors that jaxcross raises for the user. For all others, lines of the package belong to the
# traceback.
_OUR_ERRORS = (CutError, ExchangeError, JobError, TypeError, ValueError)


def trim(error: BaseException) -> None:
    """Removes the lines that start a script, and jaxcross's own at both ends, from an error and
    from its causes.

    A traceback that would have no line left stays as it is, and so do all where
    `jax_traceback_filtering` is off.
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
    """Whether `Runner.run` raises this job's error on every rank at its end; the cause is then this
    rank's own.
    """
    modules = {line.tb_frame.f_globals.get("__name__") for line in _lines(error.__traceback__)}
    return "jaxcross.jobs.outcome" in modules and isinstance(error, JobError | ExchangeError)


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
