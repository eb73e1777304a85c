"""`jaxcross doctor`: what training needs, what is there, and one line of remedy for each thing that is wrong."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: What was looked at.
        found: What was found.
        remedy: What to do about it; empty if all is well.
        fatal: Training cannot work until it is done.
    """

    name: str
    found: str
    remedy: str = ""
    fatal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings on this machine, not judged yet.

    Attributes:
        probe: The JSON of `jaxcross.world.probe`.
        exchange: The JSON of its two-rank all-reduce, or `{"error": ...}`.
        mpirun: Path and vendor of the launcher, or None.
        cores: Cores that this process may use.
        machine_cores: Cores that the machine has.
        pool: Threads that XLA's CPU pool will have in a rank.
        no_namespaces: Why two hosts cannot be set up on this machine; None if they can.
    """

    probe: Mapping[str, Any]
    exchange: Mapping[str, Any]
    mpirun: tuple[str, str] | None
    cores: int
    machine_cores: int
    pool: int
    no_namespaces: str | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the command line."""
    parser = subparsers.add_parser("doctor", help="check MPI, mpi4jax, JAX and the launcher", description=__doc__)
    parser.add_argument(
        "--post-mortem",
        type=Path,
        metavar="DIR",
        help="read the ranks' event files there: who ended first, and in what",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, print the table, and return 1 if training could not work. Starts processes; about ten seconds.

    With `--post-mortem` it reads files instead.
    """
    if args.post_mortem is not None:
        from jaxcross.commands import post_mortem

        return post_mortem.run(args.post_mortem)
    from rich.console import Console
    from rich.table import Table

    checks = judge(look())
    table = Table(title="jaxcross doctor", show_lines=False)
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        mark = "[green]ok" if not check.remedy else "[red]wrong" if check.fatal else "[yellow]note"
        table.add_row(mark, check.name, _escaped(check.found))
    console = Console()
    console.print(table)
    for check in checks:
        if check.remedy:
            console.print(f"[bold]{check.name}[/bold]: {_escaped(check.remedy)}")
    return exit_code(checks)


def exit_code(checks: Sequence[Check]) -> int:
    """1 if training could not work."""
    return int(any(check.fatal for check in checks))


def look() -> Findings:
    """Ask the machine. Each question runs in a process of its own, with a time limit."""
    from jaxcross.commands.launch import find_mpirun, mpirun_command
    from jaxcross.lab import available as no_lab
    from jaxcross.world import xla_pool

    mpirun = find_mpirun()
    exchange: Mapping[str, Any] = {"error": "no `mpirun`"}
    if mpirun is not None:
        line, extra = mpirun_command(
            mpirun=mpirun,
            ranks=2,
            program=[sys.executable, "-m", "jaxcross.world.probe", "exchange"],
            root=os.geteuid() == 0,
            cores=xla_pool.cores(),
            environ=os.environ,
        )
        exchange = _ask(line, extra).get("exchange", {"error": "no answer"})
    return Findings(
        probe=_ask([sys.executable, "-m", "jaxcross.world.probe"], {}),
        exchange=exchange,
        mpirun=None if mpirun is None else (mpirun.path, mpirun.vendor),
        cores=xla_pool.cores(),
        machine_cores=os.cpu_count() or 1,
        pool=xla_pool.effective(os.environ, xla_pool.needed(xla_pool.cores(), 1)),
        no_namespaces=no_lab(),
    )


def judge(found: Findings) -> list[Check]:
    """Returns a check for each part of the findings. Pure."""
    mpi, mpi4jax, jax = (found.probe.get(k, {"error": "no answer"}) for k in ("mpi", "mpi4jax", "jax"))
    checks = [_judge_mpi(mpi), _judge_threads(mpi), _judge_mpi4jax(mpi4jax), _judge_jax(jax)]
    if found.mpirun is None:
        remedy = "Install an MPI next to jaxcross (`pip install mpich`), or load your cluster's MPI module."
        checks.append(Check(name="mpirun", found="none", remedy=remedy, fatal=True))
    else:
        checks.append(Check(name="mpirun", found=f"{found.mpirun[0]} ({found.mpirun[1]})"))
    checks.append(_judge_exchange(found.exchange))
    small = found.pool < 2
    checks.append(
        Check(
            name="XLA CPU pool",
            found=f"{found.pool} threads for {found.cores} of {found.machine_cores} cores",
            remedy="Unset `NPROC` and `PJRT_NPROC`: a waiting exchange would hold the only thread." if small else "",
            fatal=small,
        )
    )
    bound = found.cores == 1 and found.machine_cores > 1
    checks.append(
        Check(
            name="binding",
            found=f"{found.cores} of {found.machine_cores} cores",
            remedy="This shell is bound to one core; compute and exchange will share it." if bound else "",
        )
    )
    checks.append(
        Check(
            name="network namespaces",
            found=found.no_namespaces or "available",
            remedy="`jaxcross demo` will emulate its link and say so; training is not affected."
            if found.no_namespaces
            else "",
        )
    )
    return checks


def _judge_mpi(mpi: Mapping[str, Any]) -> Check:
    if "error" in mpi:
        remedy = "Install an MPI next to jaxcross (`pip install mpich`), or load your cluster's MPI module."
        return Check(name="MPI", found=mpi["error"], remedy=remedy, fatal=True)
    return Check(name="MPI", found=f"{mpi['library']} (MPI {mpi['standard']})")


def _judge_threads(mpi: Mapping[str, Any]) -> Check:
    level = str(mpi.get("thread_level", "unknown"))
    wrong = level != "multiple"
    remedy = "jaxcross needs `MPI_THREAD_MULTIPLE`: use an MPI built with it, and leave `mpi4py.rc` alone."
    return Check(name="thread level", found=level, remedy=remedy if wrong else "", fatal=wrong)


def _judge_mpi4jax(mpi4jax: Mapping[str, Any]) -> Check:
    if "error" in mpi4jax:
        remedy = (
            "Rebuild it for the MPI that is loaded: "
            "`pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4jax mpi4jax`."
        )
        return Check(name="mpi4jax", found=mpi4jax["error"], remedy=remedy, fatal=True)
    cuda = "with CUDA" if mpi4jax["cuda"] else "without CUDA (exchanges run on the host)"
    found = f"{mpi4jax['version']}, built for {mpi4jax['built_for']}, {cuda}"
    return Check(name="mpi4jax", found=found, remedy=" ".join(mpi4jax.get("warnings", ())))


def _judge_jax(jax: Mapping[str, Any]) -> Check:
    if "error" in jax:
        remedy = "JAX cannot start: reinstall jax and jaxlib of one version, and check the accelerator's driver."
        return Check(name="JAX", found=jax["error"], remedy=remedy, fatal=True)
    return Check(name="JAX", found=f"{jax['version']} (jaxlib {jax['jaxlib']}): {', '.join(jax['devices'])}")


def _judge_exchange(exchange: Mapping[str, Any]) -> Check:
    name = "all-reduce of 2 ranks"
    if exchange.get("correct") and exchange.get("ranks") == 2:
        return Check(name=name, found="correct")
    found = str(exchange.get("error", f"wrong: {dict(exchange)}"))
    remedy = (
        "`mpirun` and mpi4py's MPI must be of one vendor; run `jaxcross launch -n 2 -m jaxcross.world.probe exchange`."
    )
    return Check(name=name, found=found, remedy=remedy, fatal=True)


def _ask(line: Sequence[str], extra: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object on the last line that a process prints; an `error` for each part otherwise."""
    try:
        done = subprocess.run(
            line, env={**os.environ, **extra}, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _failed(f"no answer within {_TIMEOUT_S:.0f} s")
    for text in reversed(done.stdout.splitlines()):
        if text.startswith("{"):
            return json.loads(text)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return _failed(f"exit code {done.returncode}: {last}")


def _failed(error: str) -> dict[str, Any]:
    return {name: {"error": error} for name in ("mpi", "mpi4jax", "jax", "exchange")}


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
