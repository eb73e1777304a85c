"""File locks between the threads, processes and runs of one machine.

We use the kernel's file locks, because the kernel releases them when a process dies.
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
# The fields of the kernel's `struct flock`: the kind of lock, what the offset is relative to, the
# offset of the first byte, the number of bytes, and the process.
BYTE_LOCK = struct.Struct("hhqqi4x")


@final
class FileLock:
    """Mutual exclusion among all threads and processes that name the same file. Not reentrant.

    Use it as a context manager. Once it's closed, it only excludes the threads of this process.
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
    """One user of a resource that several processes share.

    Create this object, and call `leave`, while holding a lock that all users take.

    Attributes:
        is_first: Whether there was no other user when this one was created.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)
        self.is_first = _is_alone(self._fd)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def leave(self) -> bool:
        """Stops using the resource. Returns whether there's no other user any more."""
        is_last = _is_alone(self._fd)
        os.close(self._fd)
        return is_last


def has_users(path: Path) -> bool:
    """Whether any process has locked this file as a user. False if the file doesn't exist."""
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
    """Claims on records that are being fetched, so that each record is fetched only once.

    Only one thread on the whole node can hold the claim on a record at a time. The claim is a lock
    on a single byte of a file, and the record's number is the offset of this byte. A process may
    have several caches, so we use locks that belong to an open file rather than to the process.

    A thread that holds claims must release them before it waits for another one. Otherwise, two
    threads could each wait for a claim that the other one holds.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _open(path)
        self._lock = threading.Lock()
        # Claims held by threads of this process. All of them use the same open file, and the kernel
        # grants a lock to an open file rather than to a thread. So its locks can't exclude these
        # threads from one another, but this set can.
        self._own: set[int] = set()

    def take(self, numbers: Iterable[int]) -> set[int]:
        """Claims those of the numbers that nobody has claimed, and returns them. Doesn't wait."""
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
        """Waits until no other thread holds the claim on a record, or `stop` is set."""
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
        """Closes the file, which releases all claims that were made with this object."""
        os.close(self._fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_alone(fd: int) -> bool:
    """Returns whether no other user has locked the file. If so, also locks it exclusively."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
