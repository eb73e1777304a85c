"""Supervises a rank: `python rank_supervisor.py SECONDS command ...`.

Uses only the standard library and one thread.

As soon as one rank dies, `mpirun` terminates all others, before they can report what they were
waiting for. That report is often the only clue as to what went wrong. So `mpirun` doesn't start the
rank itself but this process, and the rank is its child.

If the rank fails, this process hides it from `mpirun` for a while: it stays alive as long as other
ranks may be waiting for the dead one (but only up to a given number of seconds), and then ends in
the same way as the rank did. Meanwhile it forwards signals to the rank, and if it's killed, so is
the rank.
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
    """Runs the command, and then ends in the same way as the command did."""
    stay_s = float(arguments[0])
    command = arguments[1:]
    # Block signals until we've installed the handlers that forward them to the child. Without this,
    # a signal that arrives right after the fork would kill this process, and the child would never
    # receive it.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, parent)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    # Wait until the child has ended, but don't reap it yet, because that would release its process
    # id. The kernel may then give this id to an unrelated process, and a handler that forwards a
    # signal would send it to that process. So remove the handlers before reaping the child.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    deadline = time.monotonic() + stay_s
    while status != 0 and time.monotonic() < deadline and _missed(child):
        signal.sigtimedwait((), _POLL_S)  # sleeps; a signal ends this process immediately
    _end_like(status)


def _missed(child: int) -> bool:
    """Whether another rank of the run may be waiting for this one, here or on another host.

    The event files show this: another rank may be waiting if it's still alive, or if it's on
    another host, where we can't check that. If there's no event folder, we don't know, and assume
    that some rank may be waiting.

    If there is a folder but this rank has no file in it, the rank died before it joined the others,
    so nobody is waiting.
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
        os.setpgid(0, 0)  # so that a signal for the whole group doesn't reach the child twice
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        # If Ctrl-C arrives while the child's Python interpreter is starting, the interpreter prints
        # a traceback through its own imports. So we keep SIGINT blocked in the child; the module
        # `rank`, which the child runs, unblocks it as soon as the interpreter is running.
        held = {signal.SIGINT} if _RANK in command else set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED} - held)
        os.execvp(command[0], list(command))
    except OSError as error:
        print(
            f"jaxcross launch: `{command[0]}` cannot be started: {error}",
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
