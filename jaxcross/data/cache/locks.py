"""File locks that work across the threads, processes and runs on a machine.

We rely on the kernel's file locks because they're released automatically if a process dies.
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
# The kernel's `struct flock`: lock type, what the offset is relative to, offset, length, and pid.
BYTE_LOCK = struct.Struct("hhqqi4x")


@final
class FileLock:
    """A lock for all threads and processes that use the same file. Not reentrant.

    Use it as a context manager. Once closed, it only works between threads of this process.
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
            self._fd = None  # the kernel may reuse this number for another file


@final
class Users:
    """Registers this process as a user of a resource that several processes share.

    Create it and call `leave` while holding a lock that's common to all users.

    Attributes:
        is_first: Whether there were no other users at the time.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)
        self.is_first = _is_alone(self._fd)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def leave(self) -> bool:
        """Stops using the resource. Returns whether we were the last user."""
        is_last = _is_alone(self._fd)
        os.close(self._fd)
        return is_last


def has_users(path: Path) -> bool:
    """Whether any process is registered as a user in this file. False if the file doesn't exist."""
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
    """Claims on records being fetched, which make sure that each record is only fetched once.

    A record can be claimed by at most one thread on the whole node. Under the hood, a claim is a
    file lock on a single byte, whose offset is the record's number. These locks belong to an open
    file rather than to a process, because a process can have several caches open.

    Release your own claims before you wait for someone else's. Otherwise two threads can deadlock,
    each waiting for a claim held by the other.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)
        self._lock = threading.Lock()
        # Claims held by threads of this process. They all share one open file, and as far as the
        # kernel is concerned, a lock belongs to the open file, not to a thread. So we need this set
        # to keep our own threads apart.
        self._own: set[int] = set()

    def take(self, numbers: Iterable[int]) -> set[int]:
        """Claims as many of the numbers as are still free, and returns these. Doesn't wait."""
        taken = set()
        with self._lock:
            for number in numbers:
                if number not in self._own and self._try(number):
                    self._own.add(number)
                    taken.add(number)
        return taken

    def release(self, numbers: Iterable[int]) -> None:
        """Releases claims that this thread holds."""
        with self._lock:
            for number in numbers:
                self._set(fcntl.F_UNLCK, number)
                self._own.discard(number)

    def wait(self, number: int, stop: threading.Event) -> None:
        """Waits until nobody else has claimed the record, or `stop` is set."""
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
        """Closes the file, which releases all claims made through this object."""
        os.close(self._fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_alone(fd: int) -> bool:
    """Returns whether there are no other users. If so, locks the file exclusively."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
