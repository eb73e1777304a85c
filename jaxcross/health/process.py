"""Identity of a rank's process, and its state as reported by this host's kernel."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["gone", "stopped", "running", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """Identifies a process among those of all hosts.

    Attributes:
        host: Name of its host.
        machine: The kernel's boot id and the namespace of its processes, which distinguish hosts
            and containers of the same name. "" if unknown.
        pid: The process's number on that machine.
        started: Start time in the kernel's ticks, because process numbers are reused. -1 if
            unknown.
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
    """Returns the state of another rank's process, as far as it can be determined from here.

    This only reads one small file. A process on another machine is `unknown`.
    """
    here = (seen_from.host, seen_from.machine)
    if not process.machine or process.started < 0 or (process.host, process.machine) != here:
        return "unknown"
    found = _stat(process.pid)
    # A different start time means that the number has been reused for a new process. Z and X stand
    # for a dead process that its parent hasn't collected yet.
    if found is None or found[1] != process.started or found[0] in "ZX":
        return "gone"
    return "stopped" if found[0] in "Tt" else "running"


def _stat(pid: int) -> tuple[str, int] | None:
    """Returns a process's state and start time, or None if there's no such process or `/proc`."""
    try:
        # The process's name is in parentheses and may contain anything, including parentheses and
        # spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
