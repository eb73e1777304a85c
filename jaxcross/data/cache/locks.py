"""Locks of files: they hold among threads, processes and runs of a machine, and the kernel frees a
dead process's.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

POLL_S = 0.02
BYTE_LOCK = struct.Struct(
    "hhqqi4x"
)  # the kernel's `struct flock`: kind, origin, first byte, bytes, process


@final
class FileLock:
    """Mutual exclusion among all threads and processes that name the same file. A context manager;
    not reentrant.

    Once it is closed it excludes the threads of this process only.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = _open(path)
        self._threads = threading.Lock()

    def __enter__(self) -> Self:
        self._threads.acquire()
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        """Closes the file. Waits for who holds the lock in another thread."""
        with self._threads:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None  # the number may be another file's from now on


@final
class Users:
    """One user of something that several processes share. Make and leave it while holding a lock
    that all users take.

    Attributes:
        is_first: Whether there was no other user when this one came.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)
        self.is_first = _is_alone(self._fd)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def leave(self) -> bool:
        """Ends the use. Returns whether there is no other user."""
        is_last = _is_alone(self._fd)
        os.close(self._fd)
        return is_last


def has_users(path: Path) -> bool:
    """Whether any process is a user there. False where the file does not exist."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _is_alone(fd)
    finally:
        os.close(fd)


@final
class Claims:
    """Claims of records that are being fetched: each by one thread of one process at a time.

    A claim is a lock on one byte of a file, at the record's number. It belongs to this object's
    open file and not to the process, which may have several caches. A thread must not wait for
    another one's claim while it holds any: it would wait in a circle.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)
        self._lock = threading.Lock()
        self._own: set[int] = set()  # locks of an open file do not exclude threads that share it

    def take(self, numbers: Iterable[int]) -> set[int]:
        """Claims what is free, without waiting, and returns it."""
        taken = set()
        with self._lock:
            for number in numbers:
                if number not in self._own and self._try(number):
                    self._own.add(number)
                    taken.add(number)
        return taken

    def release(self, numbers: Iterable[int]) -> None:
        """Gives back what this thread has claimed."""
        with self._lock:
            for number in numbers:
                self._set(fcntl.F_UNLCK, number)
                self._own.discard(number)

    def wait(self, number: int, stop: threading.Event) -> None:
        """Waits until a record is claimed by no other thread, or `stop` is set."""
        while not self.take([number]):
            if stop.wait(POLL_S):
                return
        self.release([number])

    def _try(self, number: int) -> bool:
        with suppress(BlockingIOError, PermissionError):
            self._set(fcntl.F_WRLCK, number)
            return True
        return False

    def _set(self, kind: int, number: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, BYTE_LOCK.pack(kind, os.SEEK_SET, number, 1, 0))

    def close(self) -> None:
        """Closes the file, which ends all claims of this object."""
        os.close(self._fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_alone(fd: int) -> bool:
    """Whether no other user has the file locked; if so, this one now has it alone."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
