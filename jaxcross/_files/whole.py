"""Files that are whole whatever is killed, and folders whose entries are on disk."""

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
    """Writes a file so that a reader, and a crash, find the old content or the new one. See
    `replacing`.
    """
    with replacing(path, durable=durable, shared=shared, binary=isinstance(content, bytes)) as file:
        file.write(content)


@contextmanager
def replacing(
    path: Path, *, durable: bool = True, shared: bool = False, binary: bool = False
) -> Iterator[IO[Any]]:
    """Opens a draft that takes the place of a file once it is whole.

    Args:
        path: The file.
        durable: Whether to wait for the disk, so that this holds after a loss of power, too.
        shared: Whether several processes may write the file at once: the drafts then have hidden
            names of their own.
        binary: Whether the content is bytes.

    Raises:
        OSError: It cannot be written; nothing is left of the new content.
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
    """Waits until a file, or the entries of a folder, are on disk. Some file systems do not do that
    for folders.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
