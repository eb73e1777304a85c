"""How to identify a rank's process, and what this host's kernel says about its state."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["gone", "stopped", "running", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """Identifies a process among the processes of all hosts.

    Attributes:
        host: Name of its host.
        machine: The kernel's boot id and process namespace. Needed in addition to `host`, because
            two hosts or containers may have the same name. "" if unknown.
        pid: The process id on that machine.
        started: The process's start time in the kernel's clock ticks. Needed in addition to `pid`,
            because the kernel reuses process ids. -1 if unknown.
    """

    host: str
    machine: str
    pid: int
    started: int


def this_process() -> ProcessId:
    """Returns the identity of this process."""
    machine = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    found = _stat(os.getpid())
    started = -1 if found is None else found[1]
    return ProcessId(host=os.uname().nodename, machine=machine, pid=os.getpid(), started=started)


def process_state(process: ProcessId, seen_from: ProcessId) -> State:
    """Returns the state of another rank's process, as far as this host's kernel can tell.

    Reads one small file. A process on a different machine is `unknown`.
    """
    here = (seen_from.host, seen_from.machine)
    if not process.machine or process.started < 0 or (process.host, process.machine) != here:
        return "unknown"
    found = _stat(process.pid)
    # The kernel reuses process ids, so a different start time means that the process we're looking
    # for has ended and its id now belongs to another process. In the states Z and X, the process is
    # dead, but its parent hasn't reaped it yet.
    if found is None or found[1] != process.started or found[0] in "ZX":
        return "gone"
    return "stopped" if found[0] in "Tt" else "running"


def _stat(pid: int) -> tuple[str, int] | None:
    """Returns a process's state and start time, or None if there's no such process or `/proc`."""
    try:
        # The second field is the process's name in parentheses, which may itself contain spaces and
        # parentheses. So only split what follows the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
