"""The rank's side of a race: connects to the controller, runs its commands, and measures itself.

A message is one line of JSON. A rank first says hello, then answers one command after the other.
All teams share the hosts' cores, so a rank that has nothing to do must not take any CPU time from
the others: it sleeps in `recv` until the next command comes. The socket is a Unix socket, because
these work across network namespaces. This module imports no framework.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rivals.cases import Spec, jobs_of

Action = Callable[..., dict[str, Any] | None]
LARGE_PAGE = 2 << 20
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
SOFTIRQ = 6
"""The column in /proc/stat, after user, nice, system, idle, iowait and irq."""


def arguments(description: str | None) -> argparse.Namespace:
    """Parses the command line that the controller passes to every rank."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--socket", required=True)
    options.add_argument("--team", required=True)
    options.add_argument("--case", required=True)
    options.add_argument(
        "--job", type=int, help="the number of this process's job (default: all of the case)"
    )
    options.add_argument("--rank", type=int, default=0, help="if no launcher sets it")
    options.add_argument(
        "--port", type=int, default=0, help="of the first rank, if ranks connect without MPI"
    )
    options.add_argument("--smoke", action="store_true")
    options.add_argument("--image-size", type=int, help="replaces the case's")
    return options.parse_args()


def own_jobs(args: argparse.Namespace) -> list[tuple[int, Spec]]:
    """Returns the numbers and specs of the jobs that this process runs."""
    jobs = list(enumerate(jobs_of(args.case, args.smoke, args.image_size)))
    return jobs if args.job is None else [jobs[args.job]]


def serve(args: argparse.Namespace, rank: int, actions: Mapping[str, Action]) -> int:
    """Answers commands until the controller sends `end` or closes the connection.

    A command is `{"do": name, ...}`, whose other fields are passed to the action of that name. The
    answer has the rank's seconds, CPU seconds and peak memory, plus what the action returns.
    `rest` is available in every program: it returns memory to the kernel once other teams are to
    run. The next command first takes that memory back.
    """
    actions, resting = {"rest": rest, **actions}, False
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(args.socket)
    with connection, connection.makefile("rw", encoding="utf-8") as stream:

        def say(**facts: Any) -> None:
            stream.write(json.dumps(facts) + "\n")
            stream.flush()

        say(
            team=args.team,
            rank=rank,
            cores=sorted(os.sched_getaffinity(0)),
            host=socket.gethostname(),
        )
        for line in stream:
            command = json.loads(line)
            name = command.pop("do")
            if name == "end":
                say(ended=True)
                break
            if resting and name != "rest":
                take_back()
            resting = name == "rest"
            try:
                say(**_measured(actions[name], command))
            except Exception:
                # The controller will end all ranks, and this may be the only one that knows why.
                say(error=traceback.format_exc())
                return 1
    return 0


def _measured(action: Action, command: Mapping[str, Any]) -> dict[str, Any]:
    _forget_peak()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    facts = action(**command) or {}
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu, "peak_rss_bytes": status_bytes("VmHWM"), **facts}


def rest() -> dict[str, Any]:
    """Returns freed memory to the kernel, because the machine can't hold the memory of all teams.

    We do this only when other teams are about to run. A page that the process gets again has to be
    cleared by the kernel, and on a virtual machine it's first fetched from the host, which takes
    4 ms for 2 MB. This doubles the time of ResNet-50's first steps.

    Returns:
        The memory that the process still holds.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return {"idle_rss_bytes": status_bytes("VmRSS")}


def take_back() -> None:
    """Fills the holes in the heap with large pages, so that the steps don't have to.

    If the kernel doesn't support this, nothing happens, and the steps get the pages one by one.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            low, high = -(-low // LARGE_PAGE) * LARGE_PAGE, high // LARGE_PAGE * LARGE_PAGE
            if low < high:
                madvise(low, high - low, MADV_POPULATE_WRITE)
            for page in range(low, high, LARGE_PAGE):
                madvise(page, LARGE_PAGE, MADV_COLLAPSE)


def total_cpu_s() -> float:
    """Returns the CPU time that this process has taken so far, with the children it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def softirq_s() -> float:
    """Returns the seconds that the kernel has spent on packets and other soft interrupts.

    Counts only this process's cores, in steps of 10 ms.
    """
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.removeprefix("cpu").isdigit() and int(
            name.removeprefix("cpu")
        ) in os.sched_getaffinity(0):
            ticks += int(numbers[SOFTIRQ])
    return ticks / os.sysconf("SC_CLK_TCK")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(field: str) -> int:
    """Returns a field of this process's status, such as `VmHWM` (peak memory) or `VmRSS`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def log(message: str) -> None:
    """Writes a line to the rank's log file, which is shown if something goes wrong."""
    print(message, file=sys.stderr, flush=True)
