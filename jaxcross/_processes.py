"""Finds the children of a process on this machine, or the members of its process group."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def related(pid: int, *, group: bool = False) -> list[int]:
    """Returns the child processes of a process or, with `group`, the others in its process group.

    Uses `/proc`, so it returns an empty list on systems without it.

    Args:
        pid: The process. With `group`, it must be the leader of its process group.
        group: Whether to return the members of the group rather than the children.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended in the meantime
            _, parent, leader, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(leader if group else parent) == pid:
                found.append(int(stat.parent.name))
    return [other for other in found if other != pid]
