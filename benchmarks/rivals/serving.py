"""The rank's end of a race: connects to the controller, waits for its commands without polling,
measures itself.

Imports no framework. One JSON line a message; a rank says hello, then answers every command in
turn. Between commands it sleeps in `recv` on a Unix socket, which reaches across network
namespaces, and takes no time from the others.
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
"""Of a core's columns in /proc/stat: user, nice, system, idle, iowait, irq, softirq, ..."""


def arguments(description: str | None) -> argparse.Namespace:
    """The command line that the controller gives to every rank."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--socket", required=True)
    options.add_argument("--team", required=True)
    options.add_argument("--case", required=True)
    options.add_argument(
        "--job", type=int, help="this process's job; all of the case's if left out"
    )
    options.add_argument("--rank", type=int, default=0, help="where no launcher says it")
    options.add_argument(
        "--port", type=int, default=0, help="of the first rank, where ranks meet without MPI"
    )
    options.add_argument("--smoke", action="store_true")
    options.add_argument("--image-size", type=int, help="another than the case's")
    return options.parse_args()


def own_jobs(args: argparse.Namespace) -> list[tuple[int, Spec]]:
    """Numbers and specs of the jobs that this process runs."""
    jobs = list(enumerate(jobs_of(args.case, args.smoke, args.image_size)))
    return jobs if args.job is None else [jobs[args.job]]


def serve(args: argparse.Namespace, rank: int, actions: Mapping[str, Action]) -> int:
    """Answers commands until the controller says `end` or goes away.

    A command is `{"do": name, ...}`; its other fields go to the action. It is answered with the
    rank's own seconds, CPU seconds and peak memory beside what the action returns. All know `rest`:
    whose turn is over gives back memory, and has it again before it does anything else.
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
                # the controller ends everybody; this rank may be the only one to know why
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
    """Returns freed memory to the kernel, all teams together having more than there is, and says
    what is left.

    Only at the end of a turn: a page that comes back from the kernel is first cleared, and on a
    virtual machine fetched from its host, at 4 ms for 2 MB. That doubles ResNet-50's first steps.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return {"idle_rss_bytes": status_bytes("VmRSS")}


def take_back() -> None:
    """Fills the heap's holes with large pages again, so that no step has to. A kernel that cannot
    leaves it to them.
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


def softirq_s() -> float:
    """Seconds that the kernel has handled packets and the like on this process's cores; in steps of
    10 ms.
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
    """What Linux says of this process: `VmHWM`, the most memory it ever had, or `VmRSS`, what it
    has.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def log(message: str) -> None:
    """For the rank's log file, which is shown when something goes wrong."""
    print(message, file=sys.stderr, flush=True)
