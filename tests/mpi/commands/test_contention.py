"""`jaxcross contention` over MPI at toy size: a whole run, and its refusal of a single rank."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxcross.commands.contention import RANK
from jaxcross.plan import MachineContention
from tests.support import warm_python


def _run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = [*warm_python.COMMAND, "-m", *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=240, env={**os.environ, **env}, check=False
    )


@pytest.mark.integration
def test_contention_is_measured(
    mpirun: object, quick_compiler: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "contention.json"
    done = _run("jaxcross.cli", "contention", str(file), "--seconds", "0.5", env=quick_compiler)
    assert done.returncode == 0, done.stdout + done.stderr
    ((rate, there),) = MachineContention.load(file).measured
    assert rate > 0 and there.compute >= 1 and there.exchange >= 1
    shown = done.stdout.splitlines()[1:]  # the first line is the launcher's command
    assert len(shown) <= 10 and shown[0].startswith("Contention of 2 ranks on this machine")
    assert done.stderr.count("jaxcross contention: round") == 5


def test_one_rank_is_refused(
    mpirun: Callable[..., Any], quick_compiler: dict[str, str], tmp_path: Path
) -> None:
    """Refused even if the launcher belongs to another MPI, so each process is its own world."""
    done = _run(RANK, "1", str(tmp_path / "none.json"), env=quick_compiler)
    assert done.returncode != 0
    assert "One rank exchanges nothing: contention is measured on at least 2." in done.stderr
