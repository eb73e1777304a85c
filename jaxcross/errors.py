"""The errors that a caller can act on, and texts of other origin as parts of their sentences. Pure.

Bad arguments raise Python's own `TypeError` and `ValueError`.
"""

from __future__ import annotations

from importlib.util import find_spec

_CLOSING = {"(": ")", "[": "]", "{": "}", "`": "`"}


class CutError(Exception):
    """A train step cannot be traced or cut as written."""


class ExchangeError(Exception):
    """An exchange cannot be made: ranks disagree, a communicator cannot be had, or MPI failed."""

    cause_rank: int | None = (
        None  # of a job that left: the first rank with the same cause, which printed it
    )


class JobError(Exception):
    """A job failed, or was used in a way its step cannot follow. Names the job, and where known
    step and rank.
    """

    cause_rank: int | None = (
        None  # of a job that left: the first rank with the same cause, which printed it
    )


class InternalError(Exception):
    """jaxcross broke a promise to itself. Please report it."""


class MissingExtraError(ImportError):
    """A package is not installed that an extra of jaxcross brings."""


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Makes sure that the packages of an extra are installed; imports none of them.

    Args:
        extra: The extra's name.
        what: The feature that needs it, as the subject of a sentence.
        modules: The modules that the extra brings.

    Raises:
        MissingExtraError: One of them is not there.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {', '.join(f'`{name}`' for name in missing)}, not installed here. "
            f"Remedy: `pip install 'jaxcross[{extra}]'`."
        )


def clause(text: str) -> str:
    """`text` without white space and full stops at its end, so that a sentence can go on or end
    after it.
    """
    return text.rstrip(" \t\r\n.")


def first_line(text: str) -> str:
    """The first line that is not empty; where brackets close in a later one, an ellipsis and those
    brackets.
    """
    line, _, rest = text.strip().partition("\n")
    return line.rstrip() + _closed(line) if rest else line


def shortened(text: str, longest: int) -> str:
    """`text` if it has at most `longest` characters, else that many, an ellipsis, and the brackets
    that are open.
    """
    if len(text) <= longest:
        return text
    return f"{text[:longest].rstrip()}{_closed(text[:longest]) or ' ...'}"


def _closed(text: str) -> str:
    """An ellipsis and what closes the brackets and backticks that `text` leaves open; empty if it
    leaves none open.
    """
    open_: list[str] = []
    for character in text:
        if open_ and character == open_[-1]:
            open_.pop()
        elif (
            character in _CLOSING and "`" not in open_
        ):  # what stands in backticks is code, or part of a name
            open_.append(_CLOSING[character])
    return f" ...{''.join(reversed(open_))}" if open_ else ""
