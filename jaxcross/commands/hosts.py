"""The hosts of `jaxcross launch --hosts a,b`, and whether `mpirun` can reach them."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxcross.errors import quoted

ANSWER_S = 15.0
POLL_S = 5.0
LINE_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={ANSWER_S:.0f}")
_AGENTS = ("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC")
# This variable can list several agents with arguments, e.g. `ssh -p 22 : rsh`. `mpirun` uses the
# first.
_AGENT_LINES = "PRTE_MCA_plm_ssh_agent"
# The agent is the command (e.g. `ssh`) that `mpirun` uses to start a rank on another host. If one
# of these variables is set, `mpirun` may bypass the agent or call it with additional arguments, so
# whether we can reach a host through the agent says nothing about `mpirun`.
_MANAGERS = (
    "HYDRA_LAUNCHER",
    "HYDRA_BOOTSTRAP",
    "HYDRA_LAUNCHER_EXTRA_ARGS",
    "LOADL_STEP_ID",
    "LSB_JOBID",
    "PBS_JOBID",
    "PE_HOSTFILE",
    "PRTE_MCA_plm",
    "SLURM_JOB_ID",
)


def parse_hosts(text: str) -> tuple[str, ...]:
    """Splits a list of hosts like `a,b`.

    Raises:
        ValueError: A name is invalid or occurs twice; the text says which.
    """
    names = tuple(text.split(","))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"`--hosts` must be names of hosts with commas between them, as `--hosts a,b`, got "
                f"`{text}`."
            )
        if names.count(name) > 1:
            raise ValueError(f"`--hosts` names `{name}` twice. Name each host once.")
    return names


def agent_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the command we use to run things on a host: `mpirun`'s agent, or else `ssh`."""
    line = shlex.split(environ.get(_AGENT_LINES, "").partition(":")[0])
    return next(((environ[name],) for name in _AGENTS if environ.get(name)), tuple(line) or _SSH)


def missing_hosts(hosts: Sequence[str], agent: Sequence[str]) -> list[str]:
    """Returns the hosts that don't answer, in the order given.

    Asks up to 32 hosts in parallel, so this takes at most `ANSWER_S` and a few seconds.
    """
    if not hosts:
        return []
    with ThreadPoolExecutor(min(len(hosts), 32)) as pool:
        answers = pool.map(lambda host: _answers([*agent, host, "true"]), hosts)
        return [host for host, answer in zip(hosts, answers, strict=True) if not answer]


def unreachable_hosts(hosts: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the hosts on which `mpirun` can't start a rank.

    We check this before starting `mpirun`, which would otherwise hang for minutes (if not forever)
    waiting for such a host. Blocks for up to `ANSWER_S` and a few seconds.

    If the ranks are started by a resource manager such as Slurm, it doesn't matter whether we can
    log in to the hosts. In that case, a host only counts as unreachable if it doesn't answer and
    its name can't be resolved either.
    """
    managed = any(environ.get(name) for name in _MANAGERS)
    elsewhere = [host for host in hosts if not (_has_address(host) if managed else is_here(host))]
    return missing_hosts(elsewhere, agent_of(environ))


def start_text(
    hosts: Sequence[str], missing: Sequence[str], agent: Sequence[str], checks: str
) -> str:
    """Explains a run in which no rank on these hosts has joined. Pure.

    Args:
        hosts: The hosts.
        missing: The hosts that currently don't answer.
        agent: The command we used to reach them.
        checks: What the user should check if every host answers.
    """
    if missing:
        names = quoted(missing)
        return f"no rank has joined: {names} did not answer `{' '.join(agent)} {missing[0]} true`"
    return (
        f"no rank on {', '.join(hosts)} has joined. If the lines above are MPI's: "
        f"{checks[0].lower()}{checks[1:-1]}"
    )


def is_here(host: str) -> bool:
    """Whether a host is this machine. If so, `mpirun` starts its ranks without the agent."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def wait_for_hosts(
    find_missing: Callable[[], Sequence[str]],
    *,
    limit_s: float,
    show: Callable[[str], None],
    pause: Callable[[float], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Waits until no host is missing, showing a line per minute. Returns False after `limit_s`."""
    pause = pause or threading.Event().wait
    start_s = clock()
    shown_s = start_s
    while missing := find_missing():
        now_s = clock()
        if now_s - start_s >= limit_s:
            return False
        if now_s - shown_s >= LINE_S:
            shown_s = now_s
            show(
                f"{', '.join(missing)} did not answer for {now_s - start_s:.0f} s; waits for "
                f"{limit_s:.0f} s at most"
            )
        pause(min(POLL_S, limit_s))
    return True


def signal_ranks(number: int, ranks: Mapping[str, Sequence[int]], agent: Sequence[str]) -> None:
    """Sends a signal to the ranks on other hosts. Doesn't wait for a response.

    `ranks` maps each host to the process ids of its ranks.
    """
    for host, pids in ranks.items():
        line = [*agent, host, f"kill -{number} {' '.join(map(str, pids))}"]
        threading.Thread(target=_answers, args=(line,), daemon=True).start()


def _answers(line: Sequence[str]) -> bool:
    try:
        done = subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=ANSWER_S + 5,
            check=False,
            start_new_session=True,  # keeps the terminal's Ctrl-C away from this command
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
