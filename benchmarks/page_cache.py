"""Inspects, drops and fills the page cache of a data set's files. Measures nothing itself.

Only the named files are affected, so the files of other programs stay cached. You don't need to be
root.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def files_of(folder: Path) -> list[Path]:
    """Returns the record files of a TFDS folder."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and "array_record" in path.name
    )


def drop(files: Iterable[Path]) -> None:
    """Asks the kernel to drop the files from its page cache.

    The kernel may keep pages that are dirty or mapped: see `resident_share`.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # a page can't be dropped before it's on the disk
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill(files: Iterable[Path]) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def resident_share(files: Iterable[Path]) -> float | None:
    """Returns the fraction of the files' pages in memory, or None if the kernel doesn't say."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = pages = 0
    for path in files:
        size = path.stat().st_size
        if size == 0:
            continue
        count = -(-size // mmap.PAGESIZE)
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            marks = np.zeros(count, np.uint8)
            failed = libc.mincore(
                *map(ctypes.c_void_p, (view.ctypes.data, size, marks.ctypes.data))
            )
            del view  # a mapping can't be closed while it has views
        if failed:
            return None
        there += int((marks & 1).sum())
        pages += count
    return there / pages if pages else None
