"""Files that are always complete, and file locks. For all folders; uses only the standard library.

A file stays complete even if the process is killed or the power fails: the content goes to a draft,
which replaces the file in one step once it's complete. To survive a loss of power too, the draft
must be on disk before that, and the folder's entry after it.

A lock shows whether another process uses a file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_log = logging.getLogger("jaxcross")

_NOT_FOR_FOLDERS = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)


def write_whole(
    path: Path, content: str | bytes, *, durable: bool = True, shared: bool = False
) -> None:
    """Writes a file so that after a crash, and for readers, it has the old or the new content.

    See `replacing` for the arguments.
    """
    with replacing(path, durable=durable, shared=shared, binary=isinstance(content, bytes)) as file:
        file.write(content)


@contextmanager
def replacing(
    path: Path, *, durable: bool = True, shared: bool = False, binary: bool = False
) -> Iterator[IO[Any]]:
    """Opens a draft that replaces a file once it's complete.

    Args:
        path: The file.
        durable: Whether to wait for the disk, so that this holds even after a loss of power.
        shared: Whether several processes may write the file at the same time. Each draft then has a
            hidden name of its own.
        binary: Whether the content is bytes.

    Raises:
        OSError: The file can't be written. None of the new content is left behind.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}" if shared else f"{path.name}.new")
    try:
        with draft.open("wb") if binary else draft.open("w", newline="") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk.

    Some file systems don't support this for folders, in which case it's a no-op.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


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
