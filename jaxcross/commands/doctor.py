"""`jaxcross doctor`: checks what training needs, and prints a remedy for each problem."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxcross._versions import mpi4jax_fault, mpi4jax_remedy, unsupported_jax
from jaxcross.errors import first_line

_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the doctor's table.

    Attributes:
        name: What was checked.
        found: What was found.
        remedy: What to do about it. Empty if nothing is wrong, or if another check has the remedy.
        fatal: Whether training is impossible until this is fixed.
        cause: Name of another check that has to be fixed before this one can be judged, if any.
    """

    name: str
    found: str
    remedy: str = ""
    fatal: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What we found on this machine, before judging it.

    Attributes:
        probe: The JSON output of `jaxcross.world.probe`.
        exchange: The JSON output of its two-rank all-reduce, or `{"error": ...}`.
        versions: Versions of jax, jaxlib and mpi4jax; anything that isn't installed is left out.
        mpirun: Path and vendor of the launcher; None if there isn't one.
        libraries: The folder with the MPI library that belongs to `mpirun`; None if we didn't find
            it.
        cores: Number of cores this process may use.
        machine_cores: Number of cores in the machine.
        pool: Number of threads that XLA's CPU pool will have on each rank.
        no_namespaces: Why `jaxcross.lab` can't set up two hosts on this machine; None if it can.
    """

    probe: Mapping[str, Any]
    exchange: Mapping[str, Any]
    versions: Mapping[str, str]
    mpirun: tuple[str, str] | None
    libraries: str | None
    cores: int
    machine_cores: int
    pool: int
    no_namespaces: str | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor", help="check MPI, mpi4jax, JAX and the launcher", description=__doc__
    )
    parser.add_argument(
        "--post-mortem",
        type=Path,
        metavar="DIR",
        help="read the ranks' event files there: who ended first, and in what",
    )
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        help=(
            "check these hosts and the network between them, as `jaxcross launch --hosts A,B` will "
            "use them"
        ),
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examines the machine, prints a table, and returns 1 if training can't work.

    Starts subprocesses and takes about ten seconds. With `--post-mortem`, it only reads event
    files; with `--hosts`, it checks other machines.
    """
    if args.post_mortem is not None:
        from jaxcross.commands import post_mortem_table

        return post_mortem_table.run(args.post_mortem)
    if args.hosts is not None:
        from jaxcross.commands import doctor_hosts

        return doctor_hosts.run(args.hosts)
    checks = judge(look())
    show("jaxcross doctor", checks)
    return exit_code(checks)


def show(title: str, checks: Sequence[Check]) -> None:
    """Prints the checks as a table, followed by the remedies."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_lines=False)
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(_mark(check), check.name, _escaped(check.found))
    console = Console()
    console.print(table)
    for check in checks:
        if check.remedy:
            console.print(
                f"[bold]{check.name}[/bold]: {_escaped(check.remedy)}",
                soft_wrap="\n" in check.remedy,
            )


def _mark(check: Check) -> str:
    if check.cause:
        return "[dim]-"
    if not check.remedy:
        return "[green]ok"
    return "[red]wrong" if check.fatal else "[yellow]note"


def exit_code(checks: Sequence[Check]) -> int:
    """Returns 1 if training can't work."""
    return int(any(check.fatal for check in checks))


def look() -> MachineFacts:
    """Examines the machine. Anything that might hang or crash gets its own process and a time
    limit.
    """
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
        exchange = ask(line, extra).get("exchange", {"error": "no answer"})
    return MachineFacts(
        probe=ask([sys.executable, "-m", "jaxcross.world.probe"], {}),
        exchange=exchange,
        versions=_versions("jax", "jaxlib", "mpi4jax"),
        mpirun=None if mpirun is None else (mpirun.path, mpirun.vendor),
        libraries=None if mpirun is None else libraries_of(mpirun.path),
        cores=xla_pool.cores(),
        machine_cores=os.cpu_count() or 1,
        pool=xla_pool.effective(os.environ, xla_pool.needed(xla_pool.cores())),
        no_namespaces=no_lab(),
    )


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def libraries_of(mpirun: str) -> str | None:
    """Returns the folder of the MPI library that was installed together with `mpirun`, if any."""
    prefixes = (Path(mpirun).absolute().parent.parent, Path(mpirun).resolve().parent.parent)
    folders = (prefix / name for prefix in prefixes for name in ("lib", "lib64"))
    return next((str(folder) for folder in folders if any(folder.glob("libmpi.so*"))), None)


def judge(found: MachineFacts) -> list[Check]:
    """Judges the findings. If one problem explains others, only that one gets a remedy. Pure."""
    mpi, mpi4jax, jax = (
        found.probe.get(k, {"error": "no answer"}) for k in ("mpi", "mpi4jax", "jax")
    )
    checks = [
        _judge_mpi(mpi, found),
        _judge_threads(mpi),
        _judge_mpi4jax(mpi4jax, found),
        _judge_jax(jax, found.versions),
        _judge_mpirun(found.mpirun),
        _judge_exchange(found.exchange),
        _judge_pool(found),
        _judge_binding(found),
        _judge_namespaces(found.no_namespaces),
    ]
    fatal = {check.name for check in checks if check.fatal}
    return [_explained(check, fatal) for check in checks]


_CAUSES = {
    "thread level": ("MPI",),
    "mpi4jax": ("MPI", "JAX"),
    "mpirun": ("MPI",),
    "all-reduce of 2 ranks": ("MPI", "JAX", "mpirun", "mpi4jax", "thread level", "XLA CPU pool"),
}
"""For each check, the other checks that bring it down when they fail. If several of those have
failed, we blame the first.
"""


def _explained(check: Check, fatal: set[str]) -> Check:
    """If a check only failed because of another, replaces its remedy by the name of that check."""
    cause = next((name for name in _CAUSES.get(check.name, ()) if name in fatal), None)
    if cause is None or not check.fatal:
        return check
    return Check(name=check.name, found=f"cannot be checked before {cause}", cause=cause)


_NO_MPI = (
    "Install an MPI alongside jaxcross (`pip install mpich`), or load your cluster's MPI module."
)


def _judge_mpi(mpi: Mapping[str, Any], found: MachineFacts) -> Check:
    if "error" not in mpi:
        return Check(name="MPI", found=f"{mpi['library']} (MPI {mpi['standard']})")
    error = first_line(str(mpi["error"]))
    remedy = _NO_MPI
    if found.mpirun is not None and found.libraries is not None:
        # Both `mpirun` and its MPI library exist, but the loader can't find the library. This is
        # what happens when someone adds the `bin` folder of an MPI installation to PATH by hand and
        # forgets to add its `lib` folder to the loader's path.
        error += f"; `{found.mpirun[0]}` is on the path, its library in `{found.libraries}` is not"
        remedy = (
            "Let the loader find the library of your `mpirun`: load your cluster's MPI module, or "
            f"`export LD_LIBRARY_PATH={found.libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}`."
        )
    return Check(name="MPI", found=error, remedy=remedy, fatal=True)


def _judge_threads(mpi: Mapping[str, Any]) -> Check:
    level = str(mpi.get("thread_level", "unknown"))
    wrong = level != "multiple"
    remedy = (
        "jaxcross needs `MPI_THREAD_MULTIPLE`: use an MPI built with it, and leave `mpi4py.rc` "
        "alone."
    )
    return Check(name="thread level", found=level, remedy=remedy if wrong else "", fatal=wrong)


def _judge_mpi4jax(mpi4jax: Mapping[str, Any], findings: MachineFacts) -> Check:
    if "mpi4jax" not in findings.versions:
        return Check(
            name="mpi4jax",
            found="not installed, which is fine: it's optional, and exchanges use mpi4py",
        )
    if "error" in mpi4jax:
        jaxlib = findings.versions.get("jaxlib", "")
        # If the test exchange was correct, it fell back to mpi4py, so this isn't fatal.
        return Check(
            name="mpi4jax",
            found=mpi4jax_fault(first_line(mpi4jax["error"]), jaxlib),
            remedy=mpi4jax_remedy(jaxlib),
            fatal=not _is_correct(findings.exchange),
        )
    cuda = "with CUDA" if mpi4jax["cuda"] else "without CUDA (exchanges run on the host)"
    found = f"{mpi4jax['version']}, built for {mpi4jax['built_for']}, {cuda}"
    # mpi4jax prints a warning whenever JAX is newer than the versions it knows about, even if the
    # two work together. We have our own version check, so drop the warning.
    warnings = (
        text
        for text in mpi4jax.get("warnings", ())
        if not text.startswith("The latest supported JAX version")
    )
    return Check(name="mpi4jax", found=found, remedy=" ".join(warnings))


def _judge_jax(jax: Mapping[str, Any], versions: Mapping[str, str]) -> Check:
    version = versions.get("jax", "")
    reason = unsupported_jax(version) if version else ""
    if reason:
        return Check(name="JAX", found=version, remedy=reason, fatal=True)
    if "error" in jax:
        remedy = (
            "JAX cannot start: check the accelerator's driver, or try the CPU with "
            "`JAX_PLATFORMS=cpu`."
        )
        if "jaxlib" in jax["error"]:  # JAX compares the two versions on import
            remedy = (
                f"Install jax and jaxlib of one version: `pip install jax=={version} "
                f"jaxlib=={version}`."
            )
        return Check(name="JAX", found=jax["error"], remedy=remedy, fatal=True)
    return Check(
        name="JAX", found=f"{jax['version']} (jaxlib {jax['jaxlib']}): {', '.join(jax['devices'])}"
    )


def _judge_mpirun(mpirun: tuple[str, str] | None) -> Check:
    if mpirun is None:
        return Check(name="mpirun", found="none", remedy=_NO_MPI, fatal=True)
    return Check(name="mpirun", found=f"{mpirun[0]} ({mpirun[1]})")


def _judge_exchange(exchange: Mapping[str, Any]) -> Check:
    name = "all-reduce of 2 ranks"
    if _is_correct(exchange):
        return Check(name=name, found=f"correct, over {exchange['over']}")
    found = str(exchange.get("error", f"wrong: {dict(exchange)}"))
    remedy = (
        "`mpirun` and mpi4py's MPI must be of one vendor; run `jaxcross launch -n 2 -m "
        "jaxcross.world.probe exchange`."
    )
    return Check(name=name, found=found, remedy=remedy, fatal=True)


def _is_correct(exchange: Mapping[str, Any]) -> bool:
    return bool(exchange.get("correct")) and exchange.get("ranks") == 2


def _judge_pool(found: MachineFacts) -> Check:
    small = found.pool < 2
    remedy = "Unset `NPROC` and `PJRT_NPROC`: a waiting exchange would hold the only thread."
    return Check(
        name="XLA CPU pool",
        found=f"{found.pool} threads for {found.cores} of {found.machine_cores} cores",
        remedy=remedy if small else "",
        fatal=small,
    )


def _judge_binding(found: MachineFacts) -> Check:
    bound = found.cores == 1 and found.machine_cores > 1
    remedy = "This shell is bound to one core; compute and exchange will share it."
    return Check(
        name="binding",
        found=f"{found.cores} of {found.machine_cores} cores",
        remedy=remedy if bound else "",
    )


def _judge_namespaces(reason: str | None) -> Check:
    remedy = "`jaxcross demo` will emulate its link and say so; training is not affected."
    return Check(
        name="network namespaces", found=reason or "available", remedy=remedy if reason else ""
    )


def ask(line: Sequence[str], extra: Mapping[str, str]) -> dict[str, Any]:
    """Runs a command and returns its last line of JSON, or else an error for each component."""
    try:
        done = subprocess.run(
            line,
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"no answer within {_TIMEOUT_S:.0f} s")
    for text in reversed(done.stdout.splitlines()):
        if text.startswith("{"):
            return json.loads(text)
    return _failed(f"exit code {done.returncode}: {reason_in(done.stderr)}")


def reason_in(stderr: str) -> str:
    """Returns the line of a failed command's output that's most likely to state the reason.

    The last line usually comes from the launcher, and merely says that some rank has failed. What
    we want is the last line that names an exception; if there isn't any, we settle for the last
    line after all.
    """
    lines = stderr.strip().splitlines() or ["no output"]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (named or lines)[-1]


def _failed(error: str) -> dict[str, Any]:
    return {name: {"error": error} for name in ("mpi", "mpi4jax", "jax", "exchange")}


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
