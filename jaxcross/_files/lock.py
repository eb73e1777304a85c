"""Locks of files that show whether another process uses them."""

from __future__ import annotations

import fcntl
import logging
from typing import IO, Any

_log = logging.getLogger("jaxcross")


def lock(file: IO[Any]) -> bool:
    """Whether no other process has the lock of an open file; this one then has it until the file is closed.

    True as well on a file system without locks: whether another process uses the file cannot be known there.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _log.debug("Whether another process uses `%s` cannot be known: %s.", file.name, error)
    return True
