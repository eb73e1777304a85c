"""Runs a command so that none of its processes outlives it: `python guard.py COMMAND ...`.

jaxcross's tests start `mpirun` in a separate session, and each rank has its own process group, so
terminating pytest's process group isn't enough. Instead, this process becomes the parent of all
orphans (Linux calls that a subreaper), which makes every process that the command ever started one
of its descendants. It kills them all when the command has ended, on SIGTERM, or when stdin is
closed. The kernel closes stdin even if the process that started this one is killed.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36

STOPPED = 125
"""Exit code if the command was stopped; otherwise it is the command's own."""


def main(command: list[str]) -> int:
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("this kernel has no subreapers: Linux 3.4 or newer is needed")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        ended = os.pidfd_open(child.pid)
        ready: list[object] = []
        while not ready:
            ready, _, _ = select.select([ended, sys.stdin], [], [], 1.0)
            reap_orphans(child.pid)
        return child.wait() if ended in ready else STOPPED
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        end_all()


def reap_orphans(command: int) -> None:
    """Collects the orphans that have ended, but not the command itself.

    This can't wait until the end. The kernel only ends a PID namespace once all of its processes
    have been collected, including those that were orphaned and became our children. So a test that
    closes a lab would wait for us forever.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == command:
                break
            os.waitpid(ended.si_pid, 0)


def end_all() -> None:
    """Kills all descendants. Any process that's just being started is found in the next round."""
    while pids := descendants():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):  # its parent hasn't ended yet: next round
                os.waitpid(pid, 0)


def descendants() -> list[int]:
    """Returns all descendants of this process, whatever their session or process group."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found.extend(children.get(pid, []))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
