"""The rank's end of a race: connects to the controller, waits for its commands without polling, measures itself.

Imports no framework. One JSON line a message; a rank says hello, then answers every command in turn. Between commands
it sleeps in `recv` on a Unix socket, which reaches across network namespaces, and takes no time from the others.
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


def arguments(description: str | None) -> argparse.Namespace:
    """The command line that the controller gives to every rank."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--socket", required=True)
    options.add_argument("--team", required=True)
    options.add_argument("--case", required=True)
    options.add_argument("--job", type=int, help="this process's job; all of the case's if left out")
    options.add_argument("--rank", type=int, default=0, help="where no launcher says it")
    options.add_argument("--port", type=int, default=0, help="of the first rank, where ranks meet without MPI")
    options.add_argument("--smoke", action="store_true")
    return options.parse_args()


def own_jobs(args: argparse.Namespace) -> list[tuple[int, Spec]]:
    """Numbers and specs of the jobs that this process runs."""
    jobs = list(enumerate(jobs_of(args.case, args.smoke)))
    return jobs if args.job is None else [jobs[args.job]]


def serve(args: argparse.Namespace, rank: int, actions: Mapping[str, Action]) -> int:
    """Answers commands until the controller says `end` or goes away.

    A command is `{"do": name, ...}`; its other fields go to the action. `measured` commands are answered with the
    rank's own seconds, CPU seconds and peak memory beside what the action returns.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(args.socket)
    with connection, connection.makefile("rw", encoding="utf-8") as stream:

        def say(**facts: Any) -> None:
            stream.write(json.dumps(facts) + "\n")
            stream.flush()

        say(team=args.team, rank=rank, cores=sorted(os.sched_getaffinity(0)), host=socket.gethostname())
        for line in stream:
            command = json.loads(line)
            name = command.pop("do")
            if name == "end":
                say(ended=True)
                break
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
    answer = {"seconds": seconds, "cpu_s": cpu, "peak_rss_bytes": _status("VmHWM"), **facts}
    give_back_memory()
    return {**answer, "idle_rss_bytes": _status("VmRSS")}


def give_back_memory() -> None:
    """Returns freed memory to the kernel: a rank that waits must not take it from the one that runs."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def log(message: str) -> None:
    """For the rank's log file, which is shown when something goes wrong."""
    print(message, file=sys.stderr, flush=True)
