"""Holds a rank's place after its end: `python supervise.py SECONDS command ...`. Standard library only, one thread.

`mpirun` ends all ranks the moment that one dies by itself, before the others can say what they waited for. What it
started is this process; the rank is its child. If the child ends badly, this one stays while others may miss it, some
seconds at most, then ends in the same way. It passes signals on, and its child never outlives it.
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

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the command, and ends as it did."""
    patience_s, command = float(arguments[0]), arguments[1:]
    # Nothing may come between the child's birth and the handlers that pass signals on to it.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        _become(command, parent)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    # Its number stays its own until the handlers are gone: no signal may reach a stranger.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    deadline = time.monotonic() + patience_s
    while status != 0 and time.monotonic() < deadline and _missed(child):
        signal.sigtimedwait((), _LOOK_S)  # who is told to end meanwhile does so at once
    _end_like(status)


def _missed(child: int) -> bool:
    """Whether some rank may wait for this one: another one of its run lives here, or is on another host.

    It is known from the event files. Without a folder for them nobody knows; a rank without a file has never joined.
    """
    folder = os.environ.get("JAXCROSS_EVENTS")
    if folder is None:
        return True
    headers = [header for name in _names(folder) if (header := _header(os.path.join(folder, name))) is not None]
    own = next((header for header in headers if header.get("pid") == child), None)
    if own is None:
        return False
    here = {h.get("pid") for h in headers if (h.get("run"), h.get("host")) == (own.get("run"), own.get("host"))}
    return len(here) != own.get("size") or any(_lives(pid) for pid in here - {child})


def _names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.startswith("rank-") and name.endswith(".jsonl")]
    except OSError:
        return []


def _header(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as stream:
            header = json.loads(stream.readline(4096))
    except (OSError, ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) and isinstance(header.get("pid"), int) else None


def _lives(pid: Any) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _become(command: Sequence[str], parent: int) -> NoReturn:
    try:
        os.setpgid(0, 0)  # signals for the group reach the child through its parent, once
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"jaxcross launch: `{command[0]}` cannot be started: {error}", file=sys.stderr, flush=True)
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
