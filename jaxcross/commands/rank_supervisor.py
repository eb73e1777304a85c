"""Supervises a rank: `python rank_supervisor.py SECONDS command ...`.

Single-threaded, and only uses the standard library.

As soon as one rank dies, `mpirun` terminates all the others before they get to report what they
were waiting for, and that report is often the only clue to what went wrong. So instead of the rank
itself, `mpirun` starts this process, which runs the rank as its child.

If the rank fails, we hide that from `mpirun` for a while. This process stays alive for as long as
other ranks may be waiting for the dead one (up to a given number of seconds), and then ends in the
same way the rank did. In the meantime, it keeps forwarding signals to the rank; if it gets killed,
the rank dies with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_RANK = "jaxcross.commands.rank"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the command, then ends in the same way it did."""
    stay_s = float(arguments[0])
    command = arguments[1:]
    # Block signals until the handlers that forward them to the child are installed. Otherwise, a
    # signal that arrives right after the fork would kill this process without ever reaching the
    # child.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, parent)
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
    deadline = time.monotonic() + stay_s
    while status != 0 and time.monotonic() < deadline and _missed(child):
        signal.sigtimedwait((), _POLL_S)  # sleeps; a signal ends this process immediately
    _end_like(status)


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


def _become(command: Sequence[str], parent: int) -> NoReturn:
    try:
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
