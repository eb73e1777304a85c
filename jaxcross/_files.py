"""Writes files atomically, locks files, and names folders. Uses only the standard library.

A process that's killed while it's writing a file leaves it incomplete, and the old content is gone.
So we first write the new content to a temporary file (the "draft") and then rename that file, which
replaces the old one atomically. In a power failure, though, the rename may reach the disk before
the content does, so we flush the draft to disk before we rename it, and afterwards the folder,
which contains the file's name.

File locks show whether another process is using a file.

In the names of folders that a run writes to, `{time}` stands for the time when the run was started.
All ranks must replace it by the same text, even after a restart by the launcher. So `jaxcross
launch` passes this text to the ranks in an environment variable. If the ranks weren't started by
`jaxcross launch`, `initialize()` sets the variable to rank 0's time on all ranks.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_log = logging.getLogger("jaxcross")

TIME = "JAXCROSS_TIME"
"""Environment variable that holds the text by which `{time}` is replaced in folder names."""

_PLACEHOLDER = re.compile(r"\{[^{}/]*\}")
_NOT_FOR_FOLDERS = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)


def start_time() -> str:
    """Returns the current local time as part of a folder's name, down to the millisecond."""
    now_s = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    return f"{stamp}-{int(now_s % 1 * 1000):03d}"


def check_placeholders(folder: str | os.PathLike[str]) -> None:
    """Checks that a folder's name contains no placeholder other than `{time}`.

    Raises:
        ValueError: It contains a different placeholder.
    """
    name = os.fspath(folder)
    unknown = [each for each in _PLACEHOLDER.findall(name) if each != "{time}"]
    if unknown:
        raise ValueError(
            f"`{name}` contains `{unknown[0]}`, which can't be replaced. The only placeholder in "
            "the name of a folder is `{time}`, the time when the run was started."
        )


def with_time(folder: str | os.PathLike[str], environ: Mapping[str, str] | None = None) -> Path:
    """Returns a folder's path, with `{time}` replaced by the time when the run was started.

    Args:
        folder: The folder, as named by the user.
        environ: The environment; by default, that of this process.

    Raises:
        ValueError: There's a placeholder other than `{time}`, or the time isn't known, because this
            process is neither the launcher nor a rank.
    """
    check_placeholders(folder)
    name = os.fspath(folder)
    if "{time}" not in name:
        return Path(name)
    started = (os.environ if environ is None else environ).get(TIME)
    if not started:
        raise ValueError(
            f"`{name}`: `{{time}}` can't be replaced, because `jaxcross.initialize()` hasn't been "
            "called in this process. Call it first, or give an existing folder by its actual name."
        )
    return Path(name.replace("{time}", started))


def write_whole(
    path: Path, content: str | bytes, *, durable: bool = True, shared: bool = False
) -> None:
    """Writes a file atomically: it has either the old or the new content, even after a crash.

    See `replacing` for the arguments.
    """
    with replacing(path, durable=durable, shared=shared, binary=isinstance(content, bytes)) as file:
        file.write(content)


@contextmanager
def replacing(
    path: Path, *, durable: bool = True, shared: bool = False, binary: bool = False
) -> Iterator[IO[Any]]:
    """Opens a draft that replaces the file at the end of the `with` block.

    Args:
        path: The file.
        durable: Whether to wait for the disk, so that the file survives even a power failure.
        shared: Whether several processes may write the file at the same time. If so, each draft has
            a unique hidden name.
        binary: Whether the content is bytes.

    Raises:
        OSError: The file can't be written. The draft is deleted.
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
    """Waits until a file's content, or a folder's list of files, is on disk.

    If the file system doesn't support this for folders, it's a no-op.
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

    If the file system doesn't support locks, there's no way to tell whether another process is
    using the file, so this returns True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.debug("Whether another process uses `%s` cannot be known: %s.", file.name, error)
    return True


def holder(path: Path) -> str:
    """Returns a description of the process that has locked a file: its pid, host and start time.

    This only works for processes of the same user on the same host.
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
