"""Starts a benchmark's script as ranks, or again as a rank is started. Measures nothing itself."""

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
    """Runs this script again on so many ranks, with its own words and `--worker`; returns the exit
    code.

    The ranks have the environment that `jaxcross launch` gives them. In particular, they keep their
    memory.
    """
    line, environ = command(mpirun_or_exit(), ranks, sys.argv[0], [*sys.argv[1:], "--worker"])
    return subprocess.run(line, env=environ, check=True).returncode


def command(
    mpirun: launch.Mpirun,
    ranks: int,
    script: str,
    words: Sequence[str],
    *,
    cores: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """Returns the line that starts a script on ranks, which share so many cores or all, and its
    whole environment.
    """
    line, extra = launch.mpirun_command(
        mpirun=mpirun,
        ranks=ranks,
        program=launch.python_program([str(Path(script).resolve()), *words]),
        root=os.geteuid() == 0,
        cores=cores or xla_pool.cores(),
        environ=environ,
    )
    return line, {**environ, **extra}


def answer(
    script: str, words: Sequence[str], ranks: int, *, environ: Mapping[str, str] = os.environ
) -> Any:
    """Runs a script on ranks of this machine; returns the JSON that they write to the file that its
    last word names.
    """
    with tempfile.TemporaryDirectory(prefix=f"{Path(script).stem}-") as folder:
        out = Path(folder) / "answer.json"
        run(*command(mpirun_or_exit(), ranks, script, [*words, str(out)], environ=environ))
        return json.loads(out.read_text())


def as_rank(cores: int = 0) -> None:
    """Starts this process again with a rank's memory settings if it has none, and keeps so many
    cores, 0: all.
    """
    if environment := malloc.settings(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
