"""File locks, which show whether another process uses a file."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_log = logging.getLogger("jaxcross")


def lock(file: IO[Any]) -> bool:
    """Locks an open file until it's closed. Returns False if another process has the lock.

    Also returns True if the file system doesn't support locks: there, we can't find out whether
    another process uses the file.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.debug("Whether another process uses `%s` cannot be known: %s.", file.name, error)
    return True


def holder(path: Path) -> str:
    """Returns a description of the process that holds a file's lock: pid, host and start time.

    The kernel shows this only to processes of the same user, and only for its own host.
    """
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended or belongs to another user
            if (
                os.readlink(fd) == str(path.resolve())
                and "FLOCK" in (fd.parents[1] / "fdinfo" / fd.name).read_text()
            ):
                pid = fd.parts[2]
                return (
                    f"process {pid} on host `{os.uname().nodename}` (started {_started(int(pid))})"
                )
    return "a process of another user or host"


def _started(pid: int) -> str:
    ticks = int(
        Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    )
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.strftime(
        "%F %T", time.localtime(time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK"))
    )
