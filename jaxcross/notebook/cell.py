"""Runs one cell on all ranks: what's shown of it, how it fails, and whether the ranks can be kept.

A cell that fails on all ranks is usually just a typo, and it must not cost the user the state that
earlier cells have computed. On the other hand, if a cell fails on one rank only, the others may be
waiting for it in an exchange, forever. What tells the two apart is whether all ranks return from
the cell. If they do, none of them is in an exchange, and all can execute another cell. If a rank
hasn't returned some seconds after another one failed, we end all ranks, since MPI has no way to get
a single rank out of an exchange.

We also end the ranks after an interrupt, even if all of them return. Each rank raises
`KeyboardInterrupt` wherever it happens to be, so one of them may have sent what another one hasn't
received, and a later exchange might receive it.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from jaxcross.errors import CellError
from jaxcross.notebook.processes import Event, Gone, Output, RankProcesses

RETURN_S = 5.0
"""How many seconds the other ranks have to return from a cell that has failed on one of them."""

INTERRUPT_S = 20.0
"""How many seconds ranks have to return from a cell after an interrupt. `Runner.run` uses them to
complete the current step and to save checkpoints. A second interrupt ends the ranks immediately.
"""

_LOOK_S = 0.5
_LOST = (
    "All ranks have been ended, so the names that earlier cells defined are lost. The next "
    "`%%ranks` cell starts new ranks."
)

Show = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Shows an object in the notebook, given its data by MIME type, and the metadata."""


class CellInterrupted(KeyboardInterrupt):
    """An interrupted cell. A notebook shows the tracebacks of the ranks, not the kernel's own."""

    shown: Sequence[str] = ()

    def _render_traceback_(self) -> list[str]:
        return [*self.shown, f"KeyboardInterrupt: {self}"]


@final
@dataclass(slots=True)
class Outcome:
    """What has become of a cell so far. Pure.

    Attributes:
        size: Number of ranks.
        returned: For each rank that has returned, its error; None if it succeeded.
        gone: The ranks whose processes have ended.
        written: What the ranks have written, by rank and stream.
    """

    size: int
    returned: dict[int, Mapping[str, str] | None] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    written: dict[tuple[int, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def waiting(self) -> list[int]:
        """The ranks that haven't returned."""
        return [rank for rank in range(self.size) if rank not in self.returned]

    @property
    def failed(self) -> list[int]:
        """The ranks on which the cell has failed."""
        return [rank for rank, error in sorted(self.returned.items()) if error is not None]

    def other_output(self) -> Iterator[tuple[str, str]]:
        """Yields each stream, and the text to show, of ranks that wrote something of their own.

        Most programs print the same on every rank, which is only worth showing once. A progress bar
        overwrites its line after each carriage return, so we only show its last state.
        """
        for stream in ("out", "err"):
            first = "".join(self.written[0, stream])
            start = "" if first.endswith("\n") or not first else "\n"
            for rank in range(1, self.size):
                text = "".join(self.written[rank, stream])
                if text and text != first:
                    lines = [
                        line.rstrip("\r").rpartition("\r")[2]
                        for line in text.removesuffix("\n").split("\n")
                    ]
                    yield stream, start + "".join(f"[rank {rank}] {line}\n" for line in lines)
                    start = ""

    def tracebacks(self) -> list[str]:
        """Returns the tracebacks of all failed ranks. Equal ones are shown once."""
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank in self.failed:
            error = self.returned[rank]
            assert error is not None
            ranks[error["traceback"]].append(rank)
        return [f"On {named(ranks[text], self.size)}:\n{text}\n" for text in ranks]

    def summary(self) -> str:
        """One sentence about how the cell failed. "" if it didn't."""
        if self.gone:
            has = "has" if len(self.gone) == 1 else "have"
            return (
                f"{named(self.gone, self.size)} {has} ended during the cell, e.g. by `os._exit`, "
                "a crash, `kill` or an abort."
            )
        if not self.failed:
            return ""
        kinds = sorted({error["error"] for error in self.returned.values() if error is not None})
        text = f"the cell failed with {', '.join(kinds)} on {named(self.failed, self.size)}"
        fine = [rank for rank, error in sorted(self.returned.items()) if error is None]
        if self.waiting:
            has = "has" if len(self.waiting) == 1 else "have"
            return (
                f"{text}, and {RETURN_S:g} s later, {named(self.waiting, self.size)} {has} not "
                "returned, probably because of an exchange that needs all ranks."
            )
        if fine:
            return (
                f"{text}, but not on {named(fine, self.size)}, so values may now differ between "
                "ranks."
            )
        return f"{text}."


def named(ranks: Sequence[int], size: int) -> str:
    """Names ranks within a sentence, e.g. "rank 1" or "all 2 ranks". Pure."""
    if len(ranks) == size and size > 1:
        return f"all {size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def run_cell(ranks: RankProcesses, text: str, name: str, show: Show) -> None:
    """Runs a cell on all ranks and waits for it.

    Shows rank 0's output as it arrives, and that of the other ranks at the end.

    Args:
        ranks: The ranks. If they can't execute another cell, they're ended.
        text: The cell.
        name: The cell's name in tracebacks.
        show: Shows an object that rank 0 displays.

    Raises:
        CellError: The cell failed on some rank, or a rank's process has ended.
        CellInterrupted: The user interrupted the cell.
    """
    outcome = Outcome(ranks.size)
    try:
        ranks.send({"cell": text, "name": name})
        _wait(ranks, outcome, show, None)
    except KeyboardInterrupt:
        try:
            _interrupt(ranks, outcome, show)
        finally:  # even after another interrupt
            _end(ranks, outcome)
        interrupted = CellInterrupted(_LOST)
        interrupted.shown = outcome.tracebacks()
        raise interrupted from None
    except BaseException:  # e.g. from `show`, for which a rank is still waiting
        ranks.end(now=True)
        raise
    summary = outcome.summary()
    if outcome.gone or outcome.waiting:
        _end(ranks, outcome)
        summary = f"{summary} {_LOST}"
    else:
        _print_others(outcome)
    if summary:
        failure = CellError(f"{summary[0].upper()}{summary[1:]}")
        failure.shown = outcome.tracebacks()
        raise failure


def check_idle(ranks: RankProcesses, show: Show) -> None:
    """Shows what the ranks' threads have written since the last cell.

    Args:
        ranks: The ranks.
        show: Shows an object that rank 0 displays.

    Raises:
        CellError: A rank's process has ended. The others are ended as well.
    """
    outcome = Outcome(ranks.size)
    for event in ranks.events(0):
        _take(ranks, outcome, event, show)
    if not outcome.gone:
        _print_others(outcome)
        return
    _end(ranks, outcome)
    text = named(sorted(outcome.gone), ranks.size)
    has = "has" if len(outcome.gone) == 1 else "have"
    raise CellError(
        f"{text[0].upper()}{text[1:]} {has} ended since the last cell, and this cell has not run. "
        f"{_LOST}"
    )


def _wait(ranks: RankProcesses, outcome: Outcome, show: Show, limit_s: float | None) -> None:
    """Waits until all ranks have returned, or some of them can't be expected to any more.

    Args:
        ranks: The ranks.
        outcome: Updated as ranks return.
        show: Shows an object.
        limit_s: How many seconds to wait at most. By default, there's no limit until a rank fails.
    """
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    while outcome.waiting:
        left_s = _LOOK_S if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            return
        for event in ranks.events(min(left_s, _LOOK_S)):
            _take(ranks, outcome, event, show)
        # If MPI has aborted, all ranks end within a moment. Wait for the last of them, so we don't
        # blame the first.
        if outcome.gone and deadline_s is None:
            deadline_s = time.monotonic() + 1.0
        if outcome.failed and deadline_s is None:
            deadline_s = time.monotonic() + RETURN_S
        if {*outcome.waiting} <= {*outcome.gone}:
            return


def _take_output(outcome: Outcome, event: Output) -> None:
    outcome.written[event.rank, event.stream].append(event.text)
    if event.rank == 0:
        print(event.text, end="", file=_stream(event.stream), flush=True)


def _take(ranks: RankProcesses, outcome: Outcome, event: Event, show: Show) -> None:
    if isinstance(event, Output):
        _take_output(outcome, event)
    elif isinstance(event, Gone):
        outcome.gone.append(event.rank)
    elif "display" in event.content:
        show(event.content["display"], event.content["metadata"])
        ranks.send({"shown": True}, event.rank)
    elif "done" in event.content:
        outcome.returned[event.rank] = event.content["done"]


def _interrupt(ranks: RankProcesses, outcome: Outcome, show: Show) -> None:
    """Interrupts the ranks and gives them time to return."""
    try:
        ranks.send({"interrupt": True}, *outcome.waiting)
        _wait(ranks, outcome, show, INTERRUPT_S)
    except KeyboardInterrupt:  # the user doesn't want to wait any longer
        return


def _end(ranks: RankProcesses, outcome: Outcome) -> None:
    """Ends all ranks, and shows what they have written."""
    for event in ranks.end(now=True):
        _take_output(outcome, event)
    _print_others(outcome)


def _print_others(outcome: Outcome) -> None:
    for stream, text in outcome.other_output():
        print(text, end="", file=_stream(stream), flush=True)


def _stream(name: str) -> Any:
    return sys.stdout if name == "out" else sys.stderr
