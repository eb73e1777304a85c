"""Identity of a rank's process, and its state as the kernel of this host reports it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["gone", "stopped", "running", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process among those of all hosts.

    Attributes:
        host: Name of its host.
        machine: Tells hosts and containers of one name apart: the kernel's boot, its namespace of
            processes.
        pid: Number of the process there.
        started: Start time in the kernel's ticks, since process numbers are reused. -1 if it is not
            known.
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
    """Returns the state of another rank's process, as far as it can be known from here. Reads one
    small file.
    """
    here = (seen_from.host, seen_from.machine)
    if not process.machine or process.started < 0 or (process.host, process.machine) != here:
        return "unknown"
    found = _stat(process.pid)
    # Another start time: the number was given to a new process. Z and X: dead, but not collected by
    # its parent yet.
    if found is None or found[1] != process.started or found[0] in "ZX":
        return "gone"
    return "stopped" if found[0] in "Tt" else "running"


def _stat(pid: int) -> tuple[str, int] | None:
    """Returns state and start of a process; None if there is none, or no `/proc`."""
    try:
        # Its name stands in parentheses and may hold anything, parentheses and spaces included.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
