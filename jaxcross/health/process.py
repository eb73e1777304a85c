"""Which process a rank is, and what the kernel says of a rank on this host."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["gone", "stopped", "running", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process among those of all hosts.

    Attributes:
        host: Name of its host.
        machine: What tells hosts and containers with one name apart: the kernel's boot, its namespace of processes.
        pid: Number of the process there.
        started: When it began, in the kernel's ticks: numbers of processes are used again. -1 where nobody knows.
    """

    host: str
    machine: str
    pid: int
    started: int


def here() -> Place:
    """This process."""
    machine = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    found = _look(os.getpid())
    return Place(host=os.uname().nodename, machine=machine, pid=os.getpid(), started=-1 if found is None else found[1])


def state(of: Place, seen_from: Place) -> State:
    """Whether the process of another rank is there, as far as it can be known from here. Reads one small file."""
    if not of.machine or of.started < 0 or (of.host, of.machine) != (seen_from.host, seen_from.machine):
        return "unknown"
    found = _look(of.pid)
    if found is None or found[1] != of.started or found[0] in "ZX":
        return "gone"
    return "stopped" if found[0] in "Tt" else "running"


def _look(pid: int) -> tuple[str, int] | None:
    """State and start of a process; None if there is none, or no `/proc`."""
    try:
        # Its name stands in parentheses and may hold anything, parentheses and spaces included.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
