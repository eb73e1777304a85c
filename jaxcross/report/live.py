"""Shows the jobs' progress: bars on a terminal, plain lines in a log."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from jaxcross.interleave.instrument import Instrument, Span
from jaxcross.report.units import number, seconds

_FIRST = "has data, traces and compiles its first step"
_BEGINNINGS = ("joined", "resumes after")  # of the status notes with which a job begins another run


@dataclass(slots=True)
class _Row:
    """One job as shown."""

    steps: int | None
    done: int = 0
    last_end_ns: int | None = None
    period_ns: float | None = None
    loss: float | None = None
    loss_step: int = -1
    status: str = "waiting"
    latest: int = 0
    printed: int = -1
    begun: bool = False
    over: bool = False
    task: TaskID | None = None

    def begin_again(self) -> None:
        """Another run of the job begins: what is known is that of the one before."""
        self.done, self.latest, self.printed = 0, 0, -1
        self.last_end_ns = self.period_ns = self.loss = None
        self.begun = self.over = False
        self.status = "waiting"

    def pace(self) -> str:
        return "" if self.period_ns is None else f"{seconds(self.period_ns / 1e9)}/step"

    def loss_text(self) -> str:
        if self.loss is None:
            return ""
        # It is read back once it is computed: perhaps later than the next step begins, or before this one is counted.
        of = "" if self.loss_step in (-1, self.done) else f" of step {self.loss_step}"
        return f"loss {number(self.loss)}{of}"


class _QuietStream:
    """A stream that ignores write errors: a reader that has gone away must not end a run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class LiveView(Instrument):
    """An instrument that shows each job's state, step, pace and loss.

    Lane threads call it, so it never waits for anything but its own short lock. Without a terminal it prints a line
    when a job changes its state and about twenty lines over a job's steps; where their number is not known, for steps 1
    to 9, 10, 20 to 90, 100, 200 and so on.

    Args:
        jobs: Number of steps of each job, None where it is not known.
        enabled: False on every rank but 0: then nothing is printed.
        console: Where to print; standard error by default, so that results stay apart.

    Example:
        >>> with LiveView({"a": 3}, enabled=False) as view:
        ...     view.note(job="a", kind="loss", value=0.5)
    """

    def __init__(self, jobs: Mapping[str, int | None], *, enabled: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._console.file = _QuietStream(self._console.file)  # pyright: ignore[reportAttributeAccessIssue]
        self._enabled = enabled
        self._lock = threading.Lock()
        self._rows = {job: _Row(steps) for job, steps in jobs.items()}
        self._bars: Progress | None = None

    def __enter__(self) -> Self:
        if self._enabled and self._console.is_terminal:
            bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[pace]:>14} {task.fields[loss]:>12} {task.fields[status]}", markup=False),
                console=self._console,
            )
            bars.start()
            self._bars = bars
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def span(self, span: Span) -> None:
        """Takes a finished span: a new step number is progress, the first batch or `compile` a change of state."""
        if not self._enabled or not span.job or span.kind not in ("compute", "collective", "compile", "input"):
            return
        if not span.in_step:
            return
        with self._lock:
            row = self._rows.setdefault(span.job, _Row(None))
            if row.over and span.step < row.done:
                row.begin_again()
            if span.kind == "compile":
                self._state(span.job, row, f"compiled in {seconds((span.end_ns - span.start_ns) / 1e9)}")
                return
            if span.kind == "input":
                if not row.begun and not row.done:
                    row.begun = True  # the second batch may come before the first step ends
                    self._state(span.job, row, _FIRST)
                return
            # Work for a step says that the one before is made, perhaps in an earlier run. The next step's computation
            # may end before this one's exchange.
            begun, row.latest = row.latest, max(row.latest, span.step)
            row.done = max(row.latest - 1, 0)
            if begun and row.latest > begun:
                self._stepped(span.job, row, span.start_ns)

    def note(self, *, job: str, kind: str, step: int = -1, value: float | str | None = None) -> None:
        """Takes a remark: `loss` with a number, `status` with a text, `done`."""
        if not self._enabled:
            return
        with self._lock:
            row = self._rows.setdefault(job, _Row(None))
            begins = kind == "status" and str(value).startswith(_BEGINNINGS)
            if row.over and begins:
                row.begin_again()
            if kind == "loss" and isinstance(value, int | float):
                row.loss, row.loss_step = float(value), step
                row.status = "" if row.status in ("waiting", _FIRST) else row.status
                self._show(job, row)
            elif kind == "status":
                row.done = max(row.done, step)  # a job that leaves begins no step that would end its last one
                # A later note on a job that is over, such as that its state is not saved, does not hide its status.
                text = f"{row.status}; {value}" if row.over else str(value)
                row.over = row.over or step >= 0
                self._state(job, row, text)
            elif kind == "done":
                row.done = max(row.done + (row.latest > 0), step)
                row.over = True
                self._state(job, row, "done")

    def _stepped(self, job: str, row: _Row, now_ns: int) -> None:
        if row.last_end_ns is not None:
            length = now_ns - row.last_end_ns
            row.period_ns = length if row.period_ns is None else 0.7 * row.period_ns + 0.3 * length
        row.last_end_ns = now_ns
        row.status = ""
        self._show(job, row)

    def _state(self, job: str, row: _Row, status: str) -> None:
        changed, row.status = row.status != status, status
        self._show(job, row, always=changed)

    def _show(self, job: str, row: _Row, *, always: bool = False) -> None:
        if self._bars is not None:
            if row.task is None:
                row.task = self._bars.add_task(job, total=row.steps, pace="", loss="", status="")
            fields: dict[str, Any] = {"pace": row.pace(), "loss": row.loss_text(), "status": row.status}
            self._bars.update(row.task, completed=row.done, **fields)
            return
        stride = 10 ** (len(str(row.done)) - 1) if row.steps is None else max(1, row.steps // 20)
        if always or (row.done != row.printed and row.done % stride == 0):
            row.printed = row.done
            of = f"/{row.steps}" if row.steps else ""
            parts = [f"step {row.done}{of}" if row.done else "", row.pace(), row.loss_text(), row.status]
            line = f"{job}: " + ", ".join(part for part in parts if part)
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
