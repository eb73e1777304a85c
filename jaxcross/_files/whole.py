"""Writes files that are always complete, even if the process is killed or the power fails.

The content goes to a draft, which replaces the file in one step once it's complete. To survive a
loss of power too, the draft must be on disk before that, and the folder's entry after it.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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
