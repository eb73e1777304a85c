"""The errors that jaxcross raises, and helper functions for their messages. Pure.

Invalid arguments raise Python's own `TypeError` and `ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

__all__ = [
    "CellError",
    "CutError",
    "ExchangeError",
    "InternalError",
    "JobError",
    "MissingExtraError",
]

_REPORT = "This is a bug in jaxcross, please report it."
_CLOSING = {"(": ")", "[": "]", "{": "}", "`": "`"}


def __dir__() -> list[str]:
    return [*__all__]


class CellError(Exception):
    """A notebook's cell has failed on some rank, or its ranks couldn't be started or have ended."""

    # How a notebook shows this error: the tracebacks of the ranks instead of the kernel's own.
    shown: Sequence[str] = ()

    def _render_traceback_(self) -> list[str]:
        return [*self.shown, f"{type(self).__name__}: {self}"]


class CutError(Exception):
    """A train step can't be traced or cut as written."""


class ExchangeError(Exception):
    """An exchange isn't possible: ranks disagree, a communicator isn't available, or MPI failed."""

    # If a job has failed: the first rank with the same cause, which has printed the error.
    cause_rank: int | None = None


class JobError(Exception):
    """A job has failed, or was used in a way that its step doesn't support.

    The message contains the job's name and, if known, the step and the rank.
    """

    # If a job has failed: the first rank with the same cause, which has printed the error.
    cause_rank: int | None = None


class InternalError(Exception):
    """jaxcross violated one of its own invariants. Please report it."""

    def __str__(self) -> str:
        text = super().__str__()
        if _REPORT in text:  # it contains the text of another internal error
            return text
        line, newline, details = text.partition("\n")
        return f"{clause(line)}. {_REPORT}{newline}{details}"


class MissingExtraError(ImportError):
    """A package that belongs to one of jaxcross's extras isn't installed."""


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Checks that the packages of an extra are installed, without importing them.

    Args:
        extra: The extra's name.
        what: The feature that needs the extra, as the subject of a sentence.
        modules: The modules that belong to the extra.

    Raises:
        MissingExtraError: One of the modules isn't installed.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {quoted(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed here. Remedy: `pip install 'jaxcross[{extra}]'`."
        )


def quoted(names: Iterable[object]) -> str:
    """Returns names in backticks, separated by commas; "" if there are none."""
    return ", ".join(f"`{name}`" for name in names)


def clause(text: str) -> str:
    """Removes trailing white space and full stops, so that `text` can be used within a sentence."""
    return text.rstrip(" \t\r\n.")


def first_line(text: str) -> str:
    """Returns the first line of a text.

    If that line leaves brackets open, we append an ellipsis and the closing brackets.
    """
    line, _, rest = text.strip().partition("\n")
    return line.rstrip() + _closed(line) if rest else line


def shortened(text: str, longest: int) -> str:
    """Returns at most `longest` characters of a text.

    If the text is longer, we append an ellipsis and close any open brackets.
    """
    if len(text) <= longest:
        return text
    return f"{text[:longest].rstrip()}{_closed(text[:longest]) or ' ...'}"


def _closed(text: str) -> str:
    """Returns an ellipsis followed by what closes the open brackets and backticks in `text`.

    Returns "" if none are open.
    """
    open_: list[str] = []
    for character in text:
        if open_ and character == open_[-1]:
            open_.pop()
        # Ignore brackets within backticks, because that's code or a name and may be incomplete.
        elif character in _CLOSING and "`" not in open_:
            open_.append(_CLOSING[character])
    return f" ...{''.join(reversed(open_))}" if open_ else ""
