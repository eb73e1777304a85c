"""Starts a benchmark's script on several ranks, or restarts it with a rank's memory settings.

This module doesn't measure anything itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ended import run

from jaxcross.commands import launch
from jaxcross.world import malloc, xla_pool


def mpirun_or_exit() -> launch.Mpirun:
    mpirun = launch.find_mpirun()
    if mpirun is None:
        raise SystemExit("no `mpirun` was found: `pip install mpich`")
    return mpirun


def start_workers(ranks: int) -> int:
    """Runs this script on several ranks, with its own arguments plus `--worker`.

    The ranks get the environment that `jaxcross launch` would give them. In particular, they don't
    return freed memory to the kernel.

    Returns:
        The exit code.
    """
    line, environ = command(mpirun_or_exit(), ranks, sys.argv[0], [*sys.argv[1:], "--worker"])
    return subprocess.run(line, env=environ, check=True).returncode


def command(
    mpirun: launch.Mpirun,
    ranks: int,
    script: str,
    arguments: Sequence[str],
    *,
    cores: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts a script on ranks, and the complete environment for it.

    The ranks share `cores` cores, or all cores if it's None.
    """
    line, extra = launch.mpirun_command(
        mpirun=mpirun,
        ranks=ranks,
        program=launch.python_program([str(Path(script).resolve()), *arguments]),
        root=os.geteuid() == 0,
        cores=cores or xla_pool.cores(),
        environ=environ,
    )
    return line, {**environ, **extra}


def answer(
    script: str, arguments: Sequence[str], ranks: int, *, environ: Mapping[str, str] = os.environ
) -> Any:
    """Runs a script on ranks of this machine, and returns its result.

    The script gets the name of a file as its last argument, and must write JSON to it.
    """
    with tempfile.TemporaryDirectory(prefix=f"{Path(script).stem}-") as folder:
        out = Path(folder) / "answer.json"
        run(*command(mpirun_or_exit(), ranks, script, [*arguments, str(out)], environ=environ))
        return json.loads(out.read_text())


def as_rank(cores: int = 0) -> None:
    """Restarts this process with a rank's memory settings, unless it already has them.

    Then restricts the process to `cores` cores, unless that's 0.
    """
    if environment := malloc.settings(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
