"""What of a data set's files the operating system keeps in memory: look, drop, fill. Measures
nothing itself.

Only the files that are named are touched; no root is needed, and other programs' files stay cached.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def files_of(folder: Path) -> list[Path]:
    """The record files of a TFDS folder."""
    return sorted(
        path for path in folder.iterdir() if path.is_file() and "array_record" in path.name
    )


def drop(files: Iterable[Path]) -> None:
    """Asks the kernel to forget the files. It may keep what is dirty or mapped: see
    `resident_share`.
    """
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # a page that is not on the disk yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill(files: Iterable[Path]) -> None:
    """Reads the files once."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def resident_share(files: Iterable[Path]) -> float | None:
    """Which share of the files' pages is in memory. None where the kernel does not say."""
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
            del view  # the mapping cannot be closed under it
        if failed:
            return None
        there += int((marks & 1).sum())
        pages += count
    return there / pages if pages else None
