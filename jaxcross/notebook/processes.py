"""The ranks of a notebook, as its kernel sees them: starts and ends them, and talks to them.

Each rank has four named pipes, in a folder that only this user can read and that's removed once
all pipes are open:

    N.in       messages to the rank, one JSON object per line
    N.reply    messages from the rank, likewise
    N.out      its standard output, including that of C code and of subprocesses
    N.err      its standard error

We can't use `mpirun`'s own pipes for this, since it merges the output of all ranks and passes its
input to rank 0 only.

Messages and output arrive over different pipes, so nothing tells us directly which came first. But
a rank flushes its output before it sends a message, and a pipe holds what has been written to it.
So when we receive a message, we first read all of the rank's output.

If the kernel ends in whatever way, its ends of the pipes are closed. A rank that finds this out
exits.
"""

from __future__ import annotations

import codecs
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jaxcross._processes import related
from jaxcross.commands import (
    NO_MPIRUN,
    end_with,
    find_mpirun,
    mpirun_command,
    python_program,
    shared_accelerator,
    supervised,
)
from jaxcross.errors import CellError
from jaxcross.world import xla_pool

MODULE = "jaxcross.notebook.cell_rank"
BACKEND = "module://jaxcross.notebook.figures"

_LOOK_S = 0.2  # how often to check that `mpirun` is alive while ranks start
_END_S = 5.0
# For how long `mpirun` doesn't notice that a rank is gone. We notice ourselves, and name the rank.
_HOLD_S = 5
_LINES = 20
_READ_BYTES = 1 << 16  # the capacity of a pipe on Linux
_READS = 4


@dataclass(frozen=True, slots=True)
class Output:
    """Text that a rank wrote to `out` or `err`."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message from a rank."""

    rank: int
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank's process has ended, or can't be understood any more."""

    rank: int


Event = Output | Message | Gone


@final
class RankProcesses:
    """Ranks on this machine that execute cells.

    The constructor starts them and waits until all of them are ready.

    Args:
        ranks: Number of ranks.

    Attributes:
        size: Number of ranks.
        ended: Whether the ranks have been ended.

    Raises:
        CellError: There is no `mpirun`, or a rank ended before it was ready.
    """

    def __init__(self, ranks: int) -> None:
        self.size = ranks
        self.ended = False
        mpirun = find_mpirun()
        if mpirun is None:
            raise CellError(NO_MPIRUN)
        self._folder = Path(tempfile.mkdtemp(prefix="jaxcross-ranks-"))
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[tuple[int, str], _Pipe] = {}
        self._inputs: list[int] = []
        self._some_gone = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            for rank in range(ranks):
                self._open(rank)
            environ = {**os.environ, "MPLBACKEND": BACKEND}
            environ.setdefault("PYTHONFAULTHANDLER", "1")
            line, extra = mpirun_command(
                mpirun=mpirun,
                ranks=ranks,
                program=supervised(
                    python_program(["-m", MODULE, str(self._folder)]), hold_s=_HOLD_S
                ),
                root=os.geteuid() == 0,
                cores=xla_pool.cores(),
                environ=environ,
            )
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    end_with.tied(line, os.getpid()),
                    env={**environ, **extra, **shared_accelerator(environ)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # the kernel's interrupts are not for `mpirun`
                )
            self._wait_until_ready()
            # All pipes are open, so nobody needs their names any more. If we removed the folder at
            # the end, a killed kernel would leave it behind.
            shutil.rmtree(self._folder, ignore_errors=True)
        except BaseException:
            self.end(now=True)
            raise

    @property
    def _log(self) -> Path:
        return self._folder / "mpirun.txt"

    def _open(self, rank: int) -> None:
        """Makes a rank's pipes, and opens this process's ends."""
        for stream in ("reply", "out", "err"):
            path = self._folder / f"{rank}.{stream}"
            os.mkfifo(path, 0o600)
            # Doesn't block. As long as the rank hasn't opened its end, the selector ignores ours.
            pipe = _Pipe(rank, stream, os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            self._pipes[rank, stream] = pipe
            self._selector.register(pipe.number, selectors.EVENT_READ, pipe)
        path = self._folder / f"{rank}.in"
        os.mkfifo(path, 0o600)
        # A pipe that's open in both directions needs no partner, so neither end has to wait for the
        # other. `_wait_until_ready` replaces it.
        self._inputs.append(os.open(path, os.O_RDWR))

    def _wait_until_ready(self) -> None:
        waiting = set(range(self.size))
        errors: list[str] = []
        while waiting:
            # Check this before reading, so nothing that a rank wrote before its end is missed.
            ended = self._process is not None and self._process.poll() is not None
            for event in self.events(0 if ended else _LOOK_S):
                if isinstance(event, Output) and event.stream == "err":
                    errors.append(event.text)
                elif isinstance(event, Message):
                    waiting.discard(event.rank)
                    self._take_input(event.rank)
                elif isinstance(event, Gone):
                    ended = True
            if ended and waiting:
                text = "".join([*errors, self._log.read_text(errors="replace")]).strip()
                tail = "\n".join(text.splitlines()[-_LINES:])
                raise CellError(
                    f"The {self.size} ranks could not be started; `jaxcross doctor` checks the "
                    f"installation. Their last output:\n{tail or '(none)'}"
                )

    def _take_input(self, rank: int) -> None:
        """Gives up our own reading end of a rank's input, now that the rank has opened it.

        From now on, the rank notices if we close the pipe, and we notice if the rank is gone.
        """
        both = self._inputs[rank]
        self._inputs[rank] = os.open(self._folder / f"{rank}.in", os.O_WRONLY)
        os.close(both)

    def send(self, message: Mapping[str, Any], *ranks: int) -> None:
        """Sends a message to these ranks, or else to all. A rank that's gone is skipped.

        Waits while a rank doesn't read, which it always does unless it's stuck.
        """
        data = f"{json.dumps(message)}\n".encode()
        for rank in ranks or range(self.size):
            rest = memoryview(data)
            with suppress(BrokenPipeError):
                while rest:
                    rest = rest[os.write(self._inputs[rank], rest) :]

    def events(self, timeout_s: float) -> Iterator[Event]:
        """Yields what has arrived, and waits for something to arrive if nothing has.

        Args:
            timeout_s: How long to wait, in seconds.
        """
        for key, _ in self._selector.select(timeout_s):
            pipe: _Pipe = key.data
            # Another pipe of the same rank may have made us read and close this one already.
            if pipe.open and pipe.stream == "reply":
                yield from self._replies(pipe)
            elif pipe.open:
                yield from self._outputs(pipe)

    def _replies(self, pipe: _Pipe) -> Iterator[Event]:
        data = pipe.read()
        for stream in ("out", "err"):
            yield from self._outputs(self._pipes[pipe.rank, stream])
        *lines, pipe.rest = (pipe.rest + data).split(b"\n")
        for line in lines:
            try:
                yield Message(pipe.rank, json.loads(line))
            except ValueError:  # written by somebody else, or cut short by an interrupt
                pipe.open = False
        if not pipe.open:
            self._close(pipe)
            self._some_gone = True
            yield Gone(pipe.rank)

    def _outputs(self, pipe: _Pipe) -> Iterator[Event]:
        if not pipe.open:
            return
        text = pipe.decoder.decode(pipe.read(), final=not pipe.open)
        if not pipe.open:
            self._close(pipe)
        if text:
            yield Output(pipe.rank, pipe.stream, text)

    def _close(self, pipe: _Pipe) -> None:
        pipe.open = False
        self._selector.unregister(pipe.number)
        os.close(pipe.number)

    def end(self, *, now: bool) -> list[Output]:
        """Ends the ranks, waits until they are gone, and returns their remaining output.

        Args:
            now: Whether to end them whatever they're doing. Otherwise they exit like a script that
                has reached its end, which only works while they're idle. If they don't exit within
                5 s, they're killed.
        """
        if self.ended:
            return []
        self.ended = True
        with _uninterrupted():
            return self._end(now=now)

    def _end(self, *, now: bool) -> list[Output]:
        process = self._process
        last: list[Event] = []
        if now and process is not None:
            self.send({"end": True})
        for number in self._inputs:
            os.close(number)
        self._inputs.clear()
        if process is not None:
            last += self._until_closed(_END_S)
            if now or self._some_gone:
                # The supervisor of a rank that died keeps `mpirun` waiting. We don't signal
                # `mpirun` any earlier, because a rank that dies from SIGTERM would be such a rank.
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                _kill(process.pid)
                process.wait()
        for pipe in self._pipes.values():
            if pipe.stream != "reply":
                last += self._outputs(pipe)
        for pipe in self._pipes.values():
            if pipe.open:
                self._close(pipe)
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return [event for event in last if isinstance(event, Output)]

    def _until_closed(self, limit_s: float) -> Iterator[Event]:
        """Yields what arrives until all ranks are gone, or time is up."""
        deadline_s = time.monotonic() + limit_s
        replies = [pipe for pipe in self._pipes.values() if pipe.stream == "reply"]
        while any(pipe.open for pipe in replies):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            yield from self.events(min(left_s, _LOOK_S))
            # A rank that hasn't even started doesn't close anything.
            if self._process is not None and self._process.poll() is not None:
                return


@final
class _Pipe:
    """This process's end of a pipe that a rank writes to."""

    def __init__(self, rank: int, stream: str, number: int) -> None:
        self.rank = rank
        self.stream = stream
        self.number = number
        self.open = True
        self.rest = b""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> bytes:
        """Returns what the pipe holds. Doesn't wait. Notes if it was closed at the other end.

        Returns at least what the pipe holds now, but doesn't go on for as long as the rank writes.
        """
        parts: list[bytes] = []
        with suppress(BlockingIOError):
            for _ in range(_READS):
                parts.append(os.read(self.number, _READ_BYTES))
                if not parts[-1]:
                    self.open = False
                    break
        return b"".join(parts)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Returns a context that ignores Ctrl-C. An impatient user presses it more than once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kill(pid: int) -> None:
    """Kills a process and all its descendants."""
    for child in related(pid):
        _kill(child)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
