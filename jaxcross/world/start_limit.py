"""A time limit for the start of MPI, which a second process enforces.

`MPI_Init` waits for all ranks, and holds Python's global lock all the time. If a firewall drops a
rank's messages, or a rank never gets there, `MPI_Init` never returns. No other thread and no signal
handler of this process can run then, so nothing in this process could report the problem. So we
start a small guard process, which prints a message and kills the rank when the time is over. The
guard exits as soon as its pipe is closed, which happens when MPI has started or the rank has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
# Each rank has a guard process, and the guards of all other ranks wait this much longer than that
# of rank 0. When rank 0 has been killed, `mpirun` terminates the other ranks, so the message is
# printed once rather than once per rank.
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
    """Returns a context that kills this rank, with a message, if its block takes too long.

    Args:
        size: Number of ranks. There's no limit for a single rank.
        limit_s: The limit in seconds.
        environ: The environment, where the launcher has put this rank's number.
    """
    if size == 1:
        yield
        return
    rank = next((environ[name] for name in _RANKS if environ.get(name, "").isdecimal()), "")
    wait_s = min(limit_s, threading.TIMEOUT_MAX / 2) + (
        _SPEAKER_FIRST_S if rank not in ("", "0") else 0.0
    )
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


def limit_text(rank: str, size: int, limit_s: float) -> str:
    """Returns the message of a rank that has waited too long; `rank` is "" if unknown. Pure."""
    return (
        f"jaxcross: {f'rank {rank}' if rank else 'a rank'} of {size} has waited {limit_s:g} s in "
        "the start of MPI; all ranks end. Either the script of some rank hangs before "
        f"`jaxcross.initialize()`, or ranks cannot reach each other. {START_CHECKS} For "
        "start-ups that take longer, raise `initialize(stall_timeout_s=...)`."
    )


START_CHECKS = (
    "Check, with `jaxcross doctor --hosts A,B`, that no firewall is between the hosts (MPI uses "
    "any TCP port), that each host's name means the same address on all hosts (`getent hosts "
    "NAME`), and which network interface MPI takes: name the one that the hosts share by "
    "`UCX_NET_DEVICES=eth0` (MPICH with UCX), `FI_TCP_IFACE=eth0` (MPICH with libfabric) or "
    "`OMPI_MCA_btl_tcp_if_include=eth0` (Open MPI)."
)
"""What users should check if ranks on different hosts can't reach each other."""
