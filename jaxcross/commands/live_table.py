"""Draws a run's table on a terminal, based on the run's event folder."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self, TextIO, cast, final

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from jaxcross.report import RunProgress

_DRAIN_S = 2.0
_REFRESHES = 2
_CLOCKS_S = 1.0
_CHUNK = 1 << 16


def terminal(environ: Mapping[str, str]) -> Console | None:
    """Returns the terminal to draw on, if any.

    Returns None if there isn't one, or if the user has set `JAXCROSS_PROGRESS`.
    """
    if environ.get("JAXCROSS_PROGRESS") or not _is_terminal(sys.stderr):
        return None
    if _is_terminal(sys.stdout) and os.ttyname(sys.stdout.fileno()) != os.ttyname(
        sys.stderr.fileno()
    ):
        return None
    from rich.console import Console

    console = Console(file=cast("IO[str]", _Terminal(sys.stderr)))
    return None if console.is_dumb_terminal or not console.is_terminal else console


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and os.isatty(stream.fileno())
    except (OSError, ValueError):
        return False


@final
class _Terminal:
    """A terminal that may go away, e.g. when its window is closed. Drops whatever it can't show.

    The ranks' output arrives through pipes, and our threads copy it to the terminal. If a failed
    write were to raise, these threads would die and nothing would drain the pipes anymore. Before
    long, a rank would block in `print` and the run would hang.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


@contextmanager
def start_lines(events: Path, ranks: int, environ: Mapping[str, str]) -> Iterator[None]:
    """A context that logs that ranks are starting, after 5 s, 10 s, 20 s, ... until one joins."""
    from jaxcross.world import FIRST_NOTICE_S, no_progress_wanted

    over = threading.Event()
    started_s = time.time()

    def watch() -> None:
        next_s = FIRST_NOTICE_S
        while not over.wait(started_s + next_s - time.time()):
            with suppress(OSError, ValueError):  # a file is being replaced, or the log is closed
                if any(
                    path.stat().st_mtime >= started_s - _CLOCKS_S
                    for path in events.glob("rank-*.jsonl")
                ):
                    return
                print(
                    f"[jaxcross] {_ranks(ranks)} start, {next_s:.0f} s", file=sys.stderr, flush=True
                )
            next_s *= 2

    if not no_progress_wanted(environ):
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def table_of(run: RunProgress, console: Console, *, state: str = "") -> RenderableType:
    """Returns the table of a run, with the run's state in the title.

    Keeps it small enough to leave room for a few lines of the ranks' output above.
    """
    from jaxcross.report import duration, run_table

    title = f"{_ranks(run.ranks)}, {'the run ended after ' * run.over}{duration(run.run_s)}{state}"
    return run_table(run, width=console.width, most_jobs=max(3, console.height - 8), title=title)


@final
class LaunchTable:
    """A context that shows a launched run's table below the output of its ranks.

    Args:
        console: The terminal.
        events: The run's event folder.
        ranks: Number of ranks.
    """

    def __init__(self, console: Console, events: Path, ranks: int) -> None:
        from rich.live import Live

        self._console = console
        self._events = events
        self._ranks = ranks
        self._begun_s = time.monotonic()
        self._started_s = time.time()
        self._partial: dict[str, str] = {}
        self._gone = False
        self._pumps: list[threading.Thread] = []
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=_REFRESHES,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        deadline_s = time.monotonic() + _DRAIN_S
        for pump in self._pumps:  # with a timeout, since orphans of a rank may keep its pipe open
            pump.join(max(0.0, deadline_s - time.monotonic()))
        self._gone = True
        self._live.stop()

    def pipe(self, stream: IO[str] | None) -> int | None:
        """Returns what to pass to `Popen` as `stdout` or `stderr`.

        If the output goes to the terminal, that's a pipe, so that `follow` can print the output
        above the table. If it goes to a file, we leave it alone.
        """
        return subprocess.PIPE if _is_terminal(stream) else None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Prints the process's output above the table, line by line. Doesn't wait."""
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            if stream is not None:
                pump = threading.Thread(target=self._pump, args=(name, stream), daemon=True)
                self._pumps.append(pump)
                pump.start()

    def _pump(self, name: str, stream: IO[bytes]) -> None:
        from rich.text import Text

        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = ""
        over = False
        while not over:
            chunk = os.read(stream.fileno(), _CHUNK)
            over = not chunk
            lines, end, text = (text + decoder.decode(chunk, final=over)).rpartition("\n")
            if over and text:
                lines = lines + end + text
                end = "\n"
                text = ""
            # Anything without a trailing newline is probably a progress bar or a prompt from the
            # script. Show it right above the table, where later output can replace it. A progress
            # bar begins with a carriage return or, with `--tag`, ends with it.
            self._partial[name] = text.removesuffix("\r").rpartition("\r")[2]
            if end:
                self._console.print(Text.from_ansi(lines), soft_wrap=True)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        partial = [
            Text.from_ansi(text, no_wrap=True, overflow="ellipsis")
            for text in self._partial.values()
            if text
        ]
        return Group(*partial, self._table())

    def _table(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from jaxcross.report import duration, read_run

        run = None
        with suppress(OSError, ValueError):
            run = read_run(self._events)
        if (
            run is not None and run.at_s >= self._started_s - _CLOCKS_S
        ):  # otherwise, the file is left over from an earlier run in this folder
            if not run.shown:
                return Group()
            state = ""
            if self._gone and not run.over:
                state = " after the start of the run, which did not finish"
            return table_of(run, self._console, state=state)
        if self._gone:
            return Group()
        joined = len(list(self._events.glob("rank-*.jsonl"))) if self._events.is_dir() else 0
        ranks = _ranks(self._ranks)
        state = f"{joined} of {ranks} joined; no job has begun" if joined else f"{ranks} start"
        return Text(f"{state}, {duration(time.monotonic() - self._begun_s)}", style="dim")
