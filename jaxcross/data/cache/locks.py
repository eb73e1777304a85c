"""File locks between the threads, processes and runs of one machine.

We use the kernel's locks because it releases those of a process that dies.
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
# The kernel's `struct flock`: kind, origin, first byte, number of bytes, process.
BYTE_LOCK = struct.Struct("hhqqi4x")


@final
class FileLock:
    """Mutual exclusion among all threads and processes that name the same file. Not reentrant.

    Use it as a context manager. Once it's closed, it excludes only the threads of this process.
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
        """Closes the file. Waits if another thread holds the lock."""
        with self._threads:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None  # the kernel may reuse the number for another file


@final
class Users:
    """One user of something that several processes share.

    Create and leave it while holding a lock that all users take.

    Attributes:
        is_first: Whether there was no other user when this one joined.
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
    """Returns whether any process uses the file; False if the file doesn't exist."""
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
    """Claims on records that are being fetched. Only one thread of one process can hold each claim.

    A claim is a lock on one byte of a file, at the offset of the record's number. The lock belongs
    to this object's open file rather than to the process, because a process may have several
    caches. A thread must not wait for a claim while it holds claims itself: two threads that each
    wait for the other's would deadlock.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)
        self._lock = threading.Lock()
        # The kernel's locks don't exclude threads that share an open file.
        self._own: set[int] = set()

    def take(self, numbers: Iterable[int]) -> set[int]:
        """Claims those numbers that are free, and returns them. Doesn't wait."""
        taken = set()
        with self._lock:
            for number in numbers:
                if number not in self._own and self._try(number):
                    self._own.add(number)
                    taken.add(number)
        return taken

    def release(self, numbers: Iterable[int]) -> None:
        """Releases claims of this thread."""
        with self._lock:
            for number in numbers:
                self._set(fcntl.F_UNLCK, number)
                self._own.discard(number)

    def wait(self, number: int, stop: threading.Event) -> None:
        """Waits until no other thread claims a record, or `stop` is set."""
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
        """Closes the file, which releases all claims of this object."""
        os.close(self._fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_alone(fd: int) -> bool:
    """Returns whether no other user has locked the file. If so, we now hold it exclusively."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
