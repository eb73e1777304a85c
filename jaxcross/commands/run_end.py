"""How a run of `jaxcross launch` ended, and what to print if its ranks haven't explained it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcross.report.event_files import RankRecord

_STOPPED = (130, 143)
_BY_SIGNAL = 128
_STOPPED_RECORDS = ("interrupted", "terminated", "told", "left")
"""Last records of ranks that were stopped. With any other last record, such an exit code means a
crash.
"""


@contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that processes are ended and temporary files removed."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(_BY_SIGNAL + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_text(code: int, stops: int, records: Sequence[RankRecord]) -> str:
    """Returns how a run was stopped, if its ranks can't have said so; "" otherwise. Pure.

    Args:
        code: The exit code.
        stops: Number of signals to stop that the launcher received.
        records: The ranks' event files; empty until the ranks have joined.
    """
    if code not in _STOPPED:
        return ""
    if not records:
        return "stopped before the start"
    return "stopped at once by a second signal" if stops > 1 else ""


def is_explained(code: int, records: Sequence[RankRecord]) -> bool:
    """Whether the ranks' own output explains how the run ended: they all finished, were stopped, or
    one of them raised. Pure.
    """
    if code == 0 or code in _STOPPED:
        return all(record.words in _STOPPED_RECORDS for record in records)
    return (
        code < _BY_SIGNAL
        and bool(records)
        and all(record.words in (*_STOPPED_RECORDS, "failed") for record in records)
    )


def explain(records: Sequence[RankRecord], events: Path) -> None:
    """Prints the post-mortem, and where the event files are."""
    from jaxcross.commands.post_mortem import show
    from jaxcross.report.event_files import read

    if not records:
        with suppress(OSError):
            events.rmdir()  # fails unless it is empty
        return
    skipped: dict[int, str] = {}
    with suppress(OSError, ValueError):
        read(events, skipped=skipped)
    show(records, sys.stderr, skipped)
    print(
        "The events stay, since no rank has said why it ended. This table again: jaxcross doctor "
        f"--post-mortem {shlex.quote(str(events))}",
        file=sys.stderr,
        flush=True,
    )
