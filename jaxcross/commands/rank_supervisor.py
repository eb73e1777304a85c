"""Supervises a rank: `python rank_supervisor.py [--tag] [--log=FOLDER] SECONDS command ...`.

Single-threaded, and only uses the standard library.

As soon as one rank dies, `mpirun` terminates all the others before they get to report what they
were waiting for, and that report is often the only clue to what went wrong. So instead of the rank
itself, `mpirun` starts this process, which runs the rank as its child.

If the rank fails, we hide that from `mpirun` for a while. This process stays alive for as long as
other ranks may be waiting for the dead one (up to a given number of seconds), and then ends in the
same way the rank did. In the meantime, it keeps forwarding signals to the rank; if it gets killed,
the rank dies with it.

With `--tag`, each line of the rank's output begins with the rank's number. With `--log`, the
output is also written to a file `rank-N.log`. We do this ourselves because the launchers' own
options differ. Open MPI's `--output tag` keeps lines in one piece. Hydra's `-prepend-rank` doesn't:
it puts the number in front of whatever it reads at once, so if a rank prints a line in several
pieces, the line is mixed up with those of other ranks (seen with MPICH 5.0.2).

The output is carried by yet another process, which reads until nobody can write anymore. It has its
own session, so if `mpirun` kills the rank and its supervisor, whatever the rank has printed by then
still reaches the file.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, final

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_RANK = "jaxcross.commands.rank"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_DRAIN_S = 2.0
_CHUNK = 1 << 16
_PIPE_BUF = 4096
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the command, then ends in the same way it did."""
    options = [each for each in arguments[:2] if each.startswith("--")]
    stay_s = float(arguments[len(options)])
    command = arguments[len(options) + 1 :]
    # Block signals until the handlers that forward them to the child are installed. Otherwise, a
    # signal that arrives right after the fork would kill this process without ever reaching the
    # child.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    output = _carry_output(options) if options else None
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, parent, output)
    if output is not None:
        os.close(output.stdout)
        os.close(output.stderr)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    # Wait for the child to exit, but don't reap it yet, because that would release its process id.
    # The kernel could then give the id to an unrelated process, and our handlers would forward
    # signals to it. So remove the handlers before reaping the child.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    if output is not None:
        # `mpirun` may stop reading as soon as this process exits. So first wait until the output
        # process has passed on the rank's last lines. The wait has a time limit, because a process
        # that the rank has left behind may keep the pipe open.
        select.select([output.over], [], [], _DRAIN_S)
    deadline = time.monotonic() + stay_s
    while status != 0 and time.monotonic() < deadline and _missed(child):
        signal.sigtimedwait((), _POLL_S)  # sleeps; a signal ends this process immediately
    _end_like(status)


class _Output(NamedTuple):
    """Pipes to the process that carries the output, and one that ends when this process ends."""

    stdout: int
    stderr: int
    over: int


def _carry_output(options: Sequence[str]) -> _Output:
    """Starts a process that carries the rank's output to `mpirun` and to the log file."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    if rank is None:
        _refuse(
            "this `mpirun` doesn't tell a process which rank it is, which `--tag` and `--log-dir` "
            "need. Use that of MPICH or Open MPI, or leave them out."
        )
    folder = next((each[len("--log=") :] for each in options if each.startswith("--log=")), None)
    log = -1
    path = ""
    if folder is not None:
        path = os.path.join(folder, f"rank-{rank}.log")
        try:
            os.makedirs(folder, exist_ok=True)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            _refuse(
                f"rank {rank} on host `{os.uname().nodename}` can't write its log file: {error}. "
                "Give `--log-dir` a folder that every rank can create and write to."
            )
    stdout, to_stdout = os.pipe()
    stderr, to_stderr = os.pipe()
    over, until = os.pipe()
    if os.fork() == 0:
        try:
            os.setsid()
            keep = {1, 2, stdout, stderr, until, log}
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd not in keep:
                    _close(fd)
            tag = f"[{rank}] " if "--tag" in options else None
            log_file = LogFile(log, path) if folder is not None else None
            carry(((stdout, OutputStream(1, tag)), (stderr, OutputStream(2, tag))), log_file)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(0)
    for fd in (stdout, stderr, until, log):
        _close(fd)
    return _Output(to_stdout, to_stderr, over)


def _refuse(text: str) -> NoReturn:
    print(f"jaxcross launch: {text}", file=sys.stderr, flush=True)
    os._exit(1)


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)


def carry(streams: Sequence[tuple[int, OutputStream]], log: LogFile | None) -> None:
    """Copies what can be read from these pipes until all of them are closed at the other end."""
    by_fd = dict(streams)
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while by_fd:
        for fd, _ in poll.poll():
            chunk = os.read(fd, _CHUNK)
            if log is not None:
                log.write(chunk)
            by_fd[fd].write(chunk)
            if not chunk:
                poll.unregister(fd)
                del by_fd[fd]


@final
class LogFile:
    """A rank's log file: the bytes of both streams, in the order in which they arrive.

    If the file can't be written any more, e.g. because the disk is full, prints a message once.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def write(self, chunk: bytes) -> None:
        """Writes bytes at the end of the file."""
        if self._fd < 0:
            return
        try:
            _write(self._fd, chunk)
        except OSError as error:
            self._fd = -1
            text = f"`{self._path}` is incomplete, but the run continues: {error}."
            OutputStream(2, None).write(f"jaxcross launch: {text}\n".encode())


@final
class OutputStream:
    """A rank's output stream to `mpirun`. With a tag, puts it in front of each line.

    With a tag, an incomplete line is held back until the rest of it arrives. A carriage return also
    completes a line, because that's how progress bars end each of their updates.

    `mpirun` keeps a line in one piece if we write it at once and it's no longer than `_PIPE_BUF`.
    Longer lines are broken up.
    """

    def __init__(self, fd: int, tag: str | None) -> None:
        self._fd = fd
        self._tag = None if tag is None else tag.encode()
        self._held = b""

    def write(self, chunk: bytes) -> None:
        """Writes bytes. An empty chunk is the end of the stream."""
        pieces = [chunk] if self._tag is None else self._lines(self._tag, chunk)
        for piece in pieces:
            if self._fd < 0:
                return
            try:
                _write(self._fd, piece)
            except OSError:  # `mpirun` is gone
                self._fd = -1

    def _lines(self, tag: bytes, chunk: bytes) -> Iterator[bytes]:
        lines = (self._held + chunk).splitlines(keepends=True)
        self._held = b""
        if lines and not lines[-1].endswith(b"\n"):
            rest = lines.pop()
            if chunk:
                self._held = rest  # even after a carriage return, which may be half of `\r\n`
            elif rest.strip():
                lines.append(rest.removesuffix(b"\r") + b"\n")
        longest = _PIPE_BUF - len(tag) - len(b"\r\n")
        for line in lines:
            while len(line) > longest + 2:
                end = _end_of_character(line, longest)
                yield tag + line[:end] + b"\n"
                line = line[end:]
            if line != b"\r":  # this is how many progress bars begin
                yield tag + line
        while len(self._held) > longest:
            end = _end_of_character(self._held, longest)
            yield tag + self._held[:end] + b"\n"
            self._held = self._held[end:]


def _end_of_character(text: bytes, most: int) -> int:
    """Returns the largest index up to `most` at which no UTF-8 character would be split.

    That's `most` itself if the text isn't UTF-8 there.
    """
    # The bytes of a character, of which there are at most four, all begin with the bits 10, except
    # for the first one.
    ends = range(most, max(most - 4, 0), -1)
    return next((end for end in ends if text[end] & 0xC0 != 0x80), most)


def _write(fd: int, content: bytes) -> None:
    while content:
        try:
            content = content[os.write(fd, content) :]
        except BlockingIOError:
            select.select([], [fd], [])


def _missed(child: int) -> bool:
    """Whether another rank of the run may be waiting for this one, on any host.

    We can tell from the event files. A rank counts as waiting if it's still alive, or if it's on
    another host, where we can't check. Without an event folder we can't tell at all, so assume that
    somebody is waiting.

    If there's a folder but no file for this rank in it, the rank died before it joined the others,
    so nobody is waiting for it.
    """
    folder = os.environ.get("JAXCROSS_EVENTS")
    if folder is None:
        return True
    headers = [
        header
        for name in _names(folder)
        if (header := _header(os.path.join(folder, name))) is not None
    ]
    own = next((header for header in headers if header.get("pid") == child), None)
    if own is None:
        return False
    here = {
        h.get("pid")
        for h in headers
        if (h.get("run"), h.get("host")) == (own.get("run"), own.get("host"))
    }
    return len(here) != own.get("size") or any(_lives(pid) for pid in here - {child})


def _names(folder: str) -> list[str]:
    try:
        return [
            name
            for name in os.listdir(folder)
            if name.startswith("rank-") and name.endswith(".jsonl")
        ]
    except OSError:
        return []


def _header(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as stream:
            header = json.loads(stream.readline(4096))
    except (OSError, ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) and isinstance(header.get("pid"), int) else None


def _lives(pid: object) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _become(command: Sequence[str], parent: int, output: _Output | None) -> NoReturn:
    try:
        if output is not None:
            os.dup2(output.stdout, 1)
            os.dup2(output.stderr, 2)
            # Otherwise, Python would hold back output, since it goes to a pipe, and a killed rank
            # would lose it.
            os.environ.setdefault("PYTHONUNBUFFERED", "1")
        os.setpgid(0, 0)  # or else a signal to the whole group would reach the child twice
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        # A Ctrl-C while the child's Python interpreter is starting would make it print a traceback
        # through its own imports. So keep SIGINT blocked in the child; the `rank` module, which it
        # runs, unblocks it once the interpreter is up.
        held = {signal.SIGINT} if _RANK in command else set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED} - held)
        os.execvp(command[0], list(command))
    except OSError as error:
        print(
            f"jaxcross launch: `{command[0]}` cannot be started: {error}. It must exist at this "
            "path on this machine, and be executable.",
            file=sys.stderr,
            flush=True,
        )
    os._exit(127)


def _end_like(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
