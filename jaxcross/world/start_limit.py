"""A time limit on starting MPI, enforced by a second process.

`MPI_Init` waits for all ranks, holding Python's global lock the whole time. If a firewall drops a
rank's messages, or a rank never gets that far, it never returns. Meanwhile, none of this process's
other threads or signal handlers can run, so nothing in here could report the problem. Instead, we
start a small guard process, which prints a message and kills the rank when time is up. The guard
exits as soon as its pipe is closed, i.e. when MPI has started or the rank has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jaxcross.world.launch_env import read_rank

# Every rank has a guard process, and the guards of all ranks except rank 0 wait this much longer.
# Once rank 0 has been killed, `mpirun` terminates the other ranks, so the message is printed once
# instead of once per rank.
_SPEAKER_FIRST_S = 2.0

_GUARD = """
import os, select, signal, sys
rank, limit_s, text = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], limit_s)[0]:
    print(text, file=sys.stderr, flush=True)
    os.kill(rank, signal.SIGKILL)
"""


@contextmanager
def limited_start(size: int, limit_s: float, environ: Mapping[str, str]) -> Iterator[None]:
    """Returns a context that prints a message and kills this rank if its block takes too long.

    Args:
        size: Number of ranks. A single rank isn't limited.
        limit_s: The limit in seconds.
        environ: The environment, in which the launcher has set this rank's number.
    """
    if size == 1:
        yield
        return
    rank = read_rank(environ)
    wait_s = min(limit_s, threading.TIMEOUT_MAX / 2) + (_SPEAKER_FIRST_S if rank else 0.0)
    line = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _GUARD,
        str(os.getpid()),
        str(wait_s),
        limit_text(rank, size, limit_s),
    ]
    try:
        guard = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
    except OSError:  # without a guard, MPI may still start
        yield
        return
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def limit_text(rank: int | None, size: int, limit_s: float) -> str:
    """Returns the message for a rank that has waited too long; `rank` is None if unknown. Pure."""
    own = "a rank" if rank is None else f"rank {rank}"
    return (
        f"jaxcross: {own} of {size} has waited {limit_s:g} s in the start of MPI; all ranks end. "
        "Either the script of some rank hangs before `jaxcross.initialize()`, or ranks cannot "
        f"reach each other. {START_CHECKS} For start-ups that take longer, raise "
        "`initialize(stall_timeout_s=...)`."
    )


START_CHECKS = (
    "Check, with `jaxcross doctor --hosts A,B`, that no firewall is between the hosts (MPI uses "
    "any TCP port), and that each host's name means the same address on all hosts (`getent hosts "
    "NAME`). If MPI uses the wrong network interface, name the one that the hosts share, with "
    "`UCX_NET_DEVICES=eth0` (MPICH with UCX), `FI_TCP_IFACE=eth0` (MPICH with libfabric) or "
    "`OMPI_MCA_btl_tcp_if_include=eth0` (Open MPI)."
)
"""What to check if ranks on different hosts can't reach each other."""
