"""The children of a process on this machine, and the members of its process group, by `/proc`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def related(pid: int, *, group: bool = False) -> list[int]:
    """Returns the processes that this one started, or with `group`, the others of the group that it
    leads. Returns none if there is no /proc.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended in the meantime
            _, parent, leader, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(leader if group else parent) == pid:
                found.append(int(stat.parent.name))
    return [other for other in found if other != pid]
