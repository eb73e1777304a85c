"""Runs a case on several MPI ranks, in its own process group and with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxcross.commands.launch import find_mpirun, mpirun_command
from jaxcross.world import workers, xla_pool
from tests.support import warm_python

CASES = Path(__file__).parent / "cases"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What the ranks left: the exit code of `mpirun`, and all their output."""

    returncode: int
    stdout: str
    stderr: str

    def check(self) -> Finished:
        """Fails the test, with the ranks' output, unless all ranks succeeded."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., Finished]:
    """`mpirun(n, case, *args, timeout=240, env={})`, where `case` is a file in `cases/` or Python
    source.

    Ranks are forks of a process that has already imported JAX (`tests/support/warm_python.py`).
    `warm=False` starts an interpreter for each rank, for tests of real processes: how a rank
    starts, dies, or is signalled. The time limit catches hangs. The default of 240 s is below the
    watchdog's default, so a run that should end by itself can't wait for the watchdog. Runs that do
    real work get 900 s, because a machine may be slow and loaded.
    """
    launcher = find_mpirun()
    if launcher is None:
        pytest.skip("no mpirun")

    def call(
        n: int,
        case: str,
        *args: str,
        timeout: float = 240,
        env: dict[str, str] | None = None,
        warm: bool = True,
    ) -> Finished:
        program: Sequence[str] = [str(CASES / case)] if case.endswith(".py") else ["-c", case]
        path = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )  # cases import `tests.support`
        environ = {**os.environ, "PYTHONPATH": path, **(env or {})}
        environ.pop(
            workers.VARIABLE, None
        )  # set by a test that called `initialize` and thereby made this process a rank
        line, extra = mpirun_command(
            mpirun=launcher,
            ranks=n,
            program=[*(warm_python.COMMAND if warm else [sys.executable]), *program, *args],
            root=os.geteuid() == 0,
            cores=xla_pool.cores(),
            environ=environ,
        )
        return finish(line, {**extra, **environ}, timeout)

    return call


def finish(line: Sequence[str], environ: dict[str, str], timeout: float) -> Finished:
    """Runs to the end. On a timeout, terminates the whole process group and fails."""
    process = subprocess.Popen(
        line,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # mpirun forwards SIGTERM to ranks that have their own process groups.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            stdout, stderr = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        pytest.fail(f"no end within {timeout} s\n{stdout}\n{stderr}")
    return Finished(returncode=process.returncode, stdout=stdout, stderr=stderr)
